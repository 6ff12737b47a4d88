"""The CUDA engine against drivers that record what they are asked: no GPU, no driver library."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import cupy.cuda
import numpy as np
import pytest
import torch
from flashsmith.cli import main
from flashsmith.compile import Binary
from flashsmith.engines import torch_tensors
from flashsmith.engines.cuda import CudaEngine, CudaKernel, packed
from flashsmith.engines.driver import CudaDriver, cuda_device
from flashsmith.engines.engine import Tensor
from flashsmith.engines.tensor_map import Boxes
from flashsmith.errors import LaunchError, UsageError
from flashsmith.render import Source
from flashsmith.run import Forward, Sizes, pack, run_backward, run_forward
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import ARG_BYTES, KERNELS, KernelName, KernelSpec
from flashsmith.spec.problem import Problem

PROBLEM = Problem(dtype="bf16", d=64, causal=True, B=2, Hq=4, Hk=2, Nq=37, Nk=50)
GPU = find_gpu("a100")


class FakeDriver:
    """A device whose memory is the CPU's; `world` is the device that is current, shared by all of them."""

    def __init__(self, world: list[int], index: int = 0, sm: int = 80) -> None:
        self.world, self.index, self.sm, self.sms = world, index, sm, 132
        self.memory, self.name = torch.device("cpu"), f"fake {index}"
        self.calls: list[tuple[Any, ...]] = []
        self.streams = 7000 + index
        self.in_capture = False

    @contextmanager
    def current(self) -> Iterator[None]:
        before, self.world[0] = self.world[0], self.index
        try:
            yield
        finally:
            self.world[0] = before

    def _note(self, *call: Any) -> None:
        assert self.world[0] == self.index, "a call to the driver on the wrong device"
        self.calls.append(call)

    def stream(self) -> int:
        return self.streams

    def capturing(self) -> bool:
        return self.in_capture

    def load(self, cubin: bytes, name: str) -> int:
        self._note("load", name)
        return 100 * (self.index + 1) + len(self.calls)

    def allow_smem(self, function: int, smem_bytes: int) -> None:
        self._note("allow_smem", function, smem_bytes)

    def launch(self, function: int, grid: int, block: int, smem: int, stream: int, parameters: int) -> None:
        self._note("launch", function, grid, block, smem, stream, parameters)

    def synchronize(self) -> None:
        self.calls.append(("synchronize",))

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


def spec_of(kernel: KernelName, sm: int = 80) -> KernelSpec:
    return KernelSpec.of(kernel, PROBLEM, default_tile(kernel, PROBLEM, GPU), sm)


def binary(kernel: KernelName = "forward", sm: int = 80) -> Binary:
    """A Binary that nobody compiled."""
    source = Source(spec_of(kernel, sm), "")
    return Binary(
        source=source, cubin=f"cubin of {kernel}".encode(), ptx="", log="", registers=0, spill_bytes=0,
        static_smem_bytes=0, seconds=0.0, cached=False,
    )  # fmt: skip


def inputs(engine: CudaEngine) -> tuple[Tensor, Tensor, Tensor]:
    queries, keys = np.zeros((2, 4, 37, 64), np.uint16), np.zeros((2, 2, 50, 64), np.uint16)
    return engine.tensor(queries), engine.tensor(keys), engine.tensor(keys)


def test_two_devices_each_load_their_own_module() -> None:
    """Tensors on 1, on 0, on 1 again, while the current device stays 0 (BUG-15)."""
    world = [0]
    engines = [CudaEngine(FakeDriver(world, index)) for index in range(2)]
    compiled = binary()
    for index in (1, 0, 1):
        run_forward(engines[index], {"forward": compiled}, *inputs(engines[index]), 0.125)
        assert world == [0]
    drivers = [engine.driver for engine in engines]
    assert [len(d.of("load")) for d in drivers] == [1, 1]
    assert [len(d.of("launch")) for d in drivers] == [1, 2]
    assert {call[0] for call in drivers[0].of("launch")}.isdisjoint(call[0] for call in drivers[1].of("launch"))
    assert {call[4] for call in drivers[1].of("launch")} == {7001}


def test_every_launch_asks_for_the_stream_anew() -> None:
    """Forward and backward, and the stream of the moment, not of the first call (BUG-16)."""
    engine = CudaEngine(FakeDriver([0]))
    q, k, v = inputs(engine)
    seen = []
    for stream in (0, 0x7F00, 0x7F80):
        engine.driver.streams = stream
        out = run_forward(engine, {"forward": binary()}, q, k, v, 0.125)
        kernels = {name: binary(name) for name in ("delta", "fused", "convert")}
        run_backward(engine, kernels, q, k, v, Forward(out.O, out.m, out.l), q, 0.125)
        seen += [stream] * 4
    assert [call[4] for call in engine.driver.of("launch")] == seen


def test_tensors_of_two_devices_are_a_value_error() -> None:
    with pytest.raises(ValueError, match="a tensor is on meta, and the kernel runs on cpu"):
        CudaEngine(FakeDriver([0])).given(torch.empty(2, device="meta"))


@pytest.mark.parametrize("smem", [0, 16, 49151, 49152, 49153, 166912])
def test_shared_memory_is_asked_for_once_a_function(smem: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its size: 48 KiB exactly need the permission as soon as anything static is added (BUG-26)."""
    monkeypatch.setattr(Source, "smem_bytes", smem)
    engine, compiled = CudaEngine(FakeDriver([0])), binary()
    q, k, v = inputs(engine)
    for _ in range(3):
        run_forward(engine, {"forward": compiled}, q, k, v, 0.125)
    assert [call[1] for call in engine.driver.of("allow_smem")] == [smem]
    assert {call[3] for call in engine.driver.of("launch")} == {smem}


def read_parameters(address: int, spec: KernelSpec) -> list[bytes]:
    """What a driver would copy, by the sizes of the signature."""
    pointers = (ctypes.c_void_p * len(spec.signature)).from_address(address)
    return [
        ctypes.string_at(p, ARG_BYTES[arg.type]) for p, arg in zip(pointers, spec.signature, strict=True) if p
    ]  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS)
def test_arguments_have_the_bytes_of_their_types(kernel: KernelName) -> None:
    """float32 and int32 by value, 64-bit pointers and strides, each aligned (BUG-27)."""
    spec = spec_of(kernel)
    view = Tensor(0x7F12_3456_7890, (2, 4, 37, 64), (2**33, 2**31, 64, 1), np.dtype(np.uint16))
    names = ("Q", "K", "V", "O", "dO", "dQ", "dK", "dV", "m", "l", "stats", "dQ_acc")
    scale = np.float64(0.3)
    values = pack(spec, dict.fromkeys(names, view), Sizes(B=2, Hq=4, Hk=2, Nq=37, Nk=50), scale)
    pointers, _buffer = packed(CudaKernel(1, spec.key, spec.signature), values)
    data = read_parameters(ctypes.addressof(pointers), spec)
    for arg, got in zip(spec.signature, data, strict=True):
        assert len(got) == ARG_BYTES[arg.type]
        if arg.type.startswith("View"):
            assert struct.unpack("<Qqqq", got) == (view.address, 2**33, 2**31, 64)
        elif arg.type in ("float*", "const float*"):
            assert struct.unpack("<Q", got) == (view.address if arg.name in names else 0,)  # null: not there
        elif arg.name == "scale":
            assert got == np.float32(0.3).tobytes()
        elif arg.name == "Nq":
            assert struct.unpack("<i", got) == (37,)
    assert all(p % 16 == 0 for p in pointers if p)


def test_tensor_maps_reach_the_kernel_whole() -> None:
    """128 bytes each, as the engine encoded them, of the tensor that the parameter is named after."""

    class Encoder(CudaEngine):
        def tensor_map(self, boxes: Boxes) -> bytes:
            return bytes([boxes.address % 256, boxes.box[1]]) * 64

    H100 = find_gpu("h100-sxm")
    spec = KernelSpec.of("forward90", PROBLEM, default_tile("forward90", PROBLEM, H100), 90)
    tensors = {
        name: Tensor(16 * n, (2, 4, 37, 64), (9472, 2368, 64, 1), np.dtype(np.uint16))
        for n, name in enumerate("QKVOml")
    }
    engine = Encoder(FakeDriver([0], sm=90))
    values = pack(spec, tensors, Sizes(B=2, Hq=4, Hk=2, Nq=37, Nk=50), 0.3, engine=engine)
    pointers, _buffer = packed(CudaKernel(1, spec.key, spec.signature), values)
    data = read_parameters(ctypes.addressof(pointers), spec)
    rows = (spec.tile.Br, spec.tile.Bc, spec.tile.Bc)  # type: ignore[union-attr]
    assert data[:3] == [bytes([16 * n, box]) * 64 for n, box in enumerate(rows)]
    assert [len(each) for each in data[3:]] == [32, 8, 8, 4, 4, 4, 4, 4, 4, 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v[:-1], "takes 14 arguments; 13 were given"),
        (lambda v: (*v[:8], 2**31, *v[9:]), "Hq=2147483648 is no int"),
        (lambda v: (*v[:8], 0.5, *v[9:]), "Hq=0.5 is no int"),
        (lambda v: (b"short", *v[1:]), "Q is a View<const T> of 32 B"),
        (lambda v: (None, *v[1:]), "Q is a View<const T> of 32 B; None was given"),
    ],
    ids=["too few", "too large", "a float for an int", "too short", "unknown type"],
)
def test_a_value_that_does_not_fit_is_refused(change: Any, message: str) -> None:
    spec = spec_of("forward")
    view = Tensor(16, (2, 4, 37, 64), (64, 64, 64, 1), np.dtype(np.uint16))
    values = pack(spec, dict.fromkeys("QKVOml", view), Sizes(B=2, Hq=4, Hk=2, Nq=37, Nk=50), 1.0)
    with pytest.raises(LaunchError, match=message):
        packed(CudaKernel(1, spec.key, spec.signature), change(values))


@pytest.mark.parametrize(
    ("made_for", "device", "runs"),
    [(80, 80, True), (80, 86, True), (86, 89, True), (89, 86, False), (90, 100, False), (80, 90, False)],
)
def test_machine_code_runs_on_its_own_kind(made_for: int, device: int, runs: bool) -> None:
    """And a message names both where it does not (BUG-25)."""
    engine = CudaEngine(FakeDriver([0], sm=device))
    if runs:
        engine.load(binary(sm=made_for))
    else:
        with pytest.raises(LaunchError, match=f"machine code for sm_{made_for}; fake 0 is sm_{device}"):
            engine.load(binary(sm=made_for))


def test_a_cold_call_inside_a_graph_capture_says_so_and_breaks_nothing() -> None:
    """The driver is not asked to load; a kernel that is loaded launches into the capture (BUG-17)."""
    engine = CudaEngine(FakeDriver([0]))
    engine.driver.in_capture = True
    with pytest.raises(LaunchError, match="Run the call once before the capture"):
        engine.load(binary())
    assert engine.driver.calls == []
    engine.driver.in_capture = False
    engine.load(binary())
    engine.driver.in_capture = True
    run_forward(engine, {"forward": binary()}, *inputs(engine), 0.125)
    assert len(engine.driver.of("load")) == 1 and len(engine.driver.of("launch")) == 1


def test_a_refused_launch_names_the_kernel_and_its_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: FakeDriver, *call: Any) -> None:
        raise LaunchError("CUDA_ERROR_INVALID_VALUE")

    monkeypatch.setattr(FakeDriver, "launch", refuse)
    engine = CudaEngine(FakeDriver([0]))
    with pytest.raises(LaunchError, match=r"forward_bf16_d64_causal.* blocks of 128 threads.*INVALID_VALUE"):
        run_forward(engine, {"forward": binary()}, *inputs(engine), 0.125)


BASE = np.arange(2 * 3 * 4 * 8, dtype=np.uint16).reshape(2, 3, 4, 8)


@pytest.mark.parametrize(
    "view",
    [BASE, BASE[:, 1:], BASE[..., ::2], BASE.transpose(0, 2, 1, 3), np.broadcast_to(BASE[:1], BASE.shape), BASE[:0],
     BASE[::-1], BASE[:, :, 1:3].view(np.float32)],
    ids=["whole", "slice", "every second", "transposed", "broadcast", "empty", "reversed", "float32"],
)  # fmt: skip
def test_arrays_and_tensors_keep_elements_and_strides(view: np.ndarray[Any, Any]) -> None:
    engine = CudaEngine(FakeDriver([0]))
    tensor = engine.tensor(view)
    np.testing.assert_array_equal(engine.read(tensor), view)
    if min(view.strides) >= 0:
        assert tensor.strides == tuple(s // view.itemsize for s in view.strides)
    copy = engine.contiguous(tensor)
    np.testing.assert_array_equal(engine.read(copy), view)
    assert copy.address != tensor.address or not view.size
    assert engine.driver.of("synchronize")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_pytorchs_tensors_go_in_and_out_without_a_copy(dtype: torch.dtype) -> None:
    engine = CudaEngine(FakeDriver([0]))
    x = torch.randn(2, 5, 4, 8).to(dtype).transpose(1, 2).requires_grad_()
    given = engine.given(x)
    assert (given.address, given.shape, given.strides) == (x.data_ptr(), tuple(x.shape), x.stride())
    part = replace(given, shape=(2, 4, 2, 8), address=given.address + 3 * given.strides[2] * x.element_size())
    assert torch.equal(engine.torch(part).view(dtype), x[:, :, 3:])


def test_new_memory_is_poisoned_on_request() -> None:
    engine = CudaEngine(FakeDriver([0]), poison=True)
    assert np.isnan(engine.read(engine.empty((3, 4), np.float32))).all()
    bits = torch.from_numpy(engine.read(engine.empty((3, 4), np.uint16)).copy())
    assert bits.view(torch.bfloat16).isnan().all() and bits.view(torch.float16).isnan().all()
    assert not engine.read(engine.zeros((3,), np.float32)).any()


class Refused(RuntimeError):
    """Stands for CuPy's error, which asks the driver library for its text."""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """PyTorch and CuPy as on a machine with two H100: what they are asked is written down."""
    state = SimpleNamespace(torch=0, runtime=0, streams={0: 0, 1: 0xABC0}, calls=[], fail="")

    @contextmanager
    def guard(index: int) -> Iterator[None]:
        before, state.torch = state.torch, index
        yield
        state.torch = before

    def call(name: str) -> Any:
        def asked(*args: Any) -> int:
            state.calls.append((name, state.torch, *args))
            if state.fail == name:
                raise Refused("CUDA_ERROR_INVALID_VALUE: no")
            return 4711

        return asked

    properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "device", guard)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda index=None: SimpleNamespace(cuda_stream=state.streams[index])
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cupy.cuda.runtime, "setDevice", lambda index: state.calls.append(("setDevice", index)))
    monkeypatch.setattr(cupy.cuda.driver, "CUDADriverError", Refused)
    for name in ("moduleLoadData", "moduleGetFunction", "funcSetAttribute", "launchKernel"):
        monkeypatch.setattr(cupy.cuda.driver, name, call(name))
    return state


def test_the_driver_asks_cupy_under_pytorchs_guard(machine: SimpleNamespace) -> None:
    """Device 1, its stream, while device 0 stays current: CuPy's calls in the order that CUDA wants."""
    driver = CudaDriver(1)
    with driver.current():
        function = driver.load(b"cubin", "forward")
        driver.allow_smem(function, 49152)
        driver.launch(function, 9, 128, 49152, driver.stream(), 0x1000)
    attribute = cupy.cuda.driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert machine.calls == [
        ("setDevice", 1),
        ("moduleLoadData", 1, b"cubin"),
        ("moduleGetFunction", 1, 4711, "forward"),
        ("funcSetAttribute", 1, 4711, attribute, 49152),
        ("launchKernel", 1, 4711, 9, 1, 1, 128, 1, 1, 49152, 0xABC0, 0x1000, 0),
    ]
    assert machine.torch == 0 and (driver.sm, driver.memory) == (90, torch.device("cuda", 1))


@pytest.mark.parametrize("name", ["moduleLoadData", "funcSetAttribute", "launchKernel"])
def test_what_cuda_refuses_is_a_launch_error(name: str, machine: SimpleNamespace) -> None:
    machine.fail, driver = name, CudaDriver(0)
    with pytest.raises(LaunchError, match="H100"):
        driver.load(b"", "forward")
        driver.allow_smem(1, 300_000)
        driver.launch(1, 1, 32, 0, 0, 0)


def test_one_engine_a_device_and_none_after_a_fork(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr("flashsmith.engines.torch_tensors.cuda_engine", lambda index: CudaEngine(CudaDriver(index)))
    monkeypatch.setattr(torch_tensors, "_on_cuda", {})
    first = [torch_tensors.torch_engine(torch.device("cuda", n)) for n in (0, 1)]
    again = [torch_tensors.torch_engine(torch.device("cuda", n)) for n in (0, 1)]
    assert first == again and first[0] is not first[1] and first[0].gpu == "h100-sxm"
    pid = os.fork()
    if pid == 0:
        os._exit(len(torch_tensors._on_cuda))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_stand_in_must_be_of_the_devices_own_sm(machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHSMITH_GPU", "h200")
    assert torch_tensors._known_as(CudaDriver(0)) == "h200"
    monkeypatch.setenv("FLASHSMITH_GPU", "a100")
    with pytest.raises(UsageError, match=r"FLASHSMITH_GPU=a100 is sm_80, and NVIDIA H100 80GB HBM3 is sm_90"):
        torch_tensors._known_as(CudaDriver(0))


def test_without_cuda_the_message_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UsageError, match="built without CUDA"):
        cuda_device()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="no CUDA device is here"):
        cuda_device()


def test_the_command_line_says_so_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert main(["check", "forward", "--gpu", "a100", "--d", "64", "--engine", "cuda"]) == 2
    assert "built without CUDA" in capsys.readouterr().err


UNTOUCHED = """
import sys
import flashsmith.engines.torch_tensors, flashsmith.tune, flashsmith.measuring.trial, flashsmith.measuring.process
import torch
assert not torch.cuda.is_initialized() and "cupy" not in sys.modules
"""


def test_importing_the_engine_touches_no_driver() -> None:
    """So that a process forked later can use the GPU (BUG-22)."""
    subprocess.run([sys.executable, "-c", UNTOUCHED], check=True)
