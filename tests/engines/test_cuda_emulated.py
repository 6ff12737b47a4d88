"""The CUDA engine on a driver that runs each launch on the emulator, from the very bytes that CUDA would be given."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from datetime import date
from typing import Any

import numpy as np
import pytest
import torch
from flashsmith.check import check
from flashsmith.compile import Binary, compile_source
from flashsmith.emulator import GlobalMemory, launch, parse
from flashsmith.engines.cuda import CudaEngine, CudaKernel
from flashsmith.engines.engine import Tensor
from flashsmith.errors import WrongResult
from flashsmith.measure import Again, Timing, Try
from flashsmith.measuring import trial
from flashsmith.render import Source
from flashsmith.run import run_forward
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import ARG_BYTES, FORWARD, FUSED, SPLIT, KernelName, KernelSpec
from flashsmith.spec.problem import Pass, Problem
from flashsmith.verify import of_tile

from tests.engines.test_cuda import FakeDriver

GPU = find_gpu("a100")
PROBLEM = Problem(dtype="bf16", d=72, causal=True, B=2, Hq=4, Hk=2, Nq=70, Nk=90)


class EmulatingDriver(FakeDriver):
    """Host memory stands for the device's: it is copied to the emulator and back around each launch."""

    sms = 108

    def __init__(self) -> None:
        super().__init__([1], index=0)
        self.binaries: dict[bytes, Binary] = {}
        self.loaded: list[tuple[Any, KernelSpec]] = []
        self.storages: dict[int, int] = {}  # bytes by address
        self.held: list[object] = []  # nothing is freed, so that no address comes to mean something else

    def load(self, cubin: bytes, name: str) -> int:
        binary = self.binaries[cubin]
        self.loaded.append((parse(binary.ptx).kernels[name], binary.spec))
        return len(self.loaded) - 1

    def launch(self, function: int, grid: int, block: int, smem: int, stream: int, parameters: int) -> None:
        super().launch(function, grid, block, smem, stream, parameters)
        kernel, spec = self.loaded[function]
        memory = GlobalMemory()
        moved: dict[int, int] = {}

        def there(address: int) -> int:
            """The emulator's address for one of the host's."""
            if not address:
                return 0
            start = next(s for s, size in self.storages.items() if s <= address < s + size)
            if start not in moved:
                moved[start] = memory.upload(np.frombuffer(ctypes.string_at(start, self.storages[start]), np.uint8))
            return moved[start] + address - start

        args: list[Any] = []
        pointers = (ctypes.c_void_p * len(spec.signature)).from_address(parameters)
        for pointer, arg in zip(pointers, spec.signature, strict=True):
            data = ctypes.string_at(pointer or 0, ARG_BYTES[arg.type])
            if arg.type.startswith("View"):
                address, *strides = struct.unpack("<Qqqq", data)
                args.append(struct.pack("<Qqqq", there(address), *strides))
            elif arg.type.endswith("float*"):
                args.append(there(struct.unpack("<Q", data)[0]))
            else:
                args.append(data if arg.type == "Walk" else struct.unpack("<i" if arg.type == "int" else "<f", data)[0])
        launch(kernel, grid, block, args, memory=memory, shared_bytes=smem)
        for start, at in moved.items():
            ctypes.memmove(start, memory.read(at, (self.storages[start],), np.uint8).tobytes(), self.storages[start])


class Watched(CudaEngine):
    """Tells the driver which memory is the engine's: a launch that points elsewhere fails."""

    driver: EmulatingDriver

    def load(self, binary: Binary) -> CudaKernel:
        self.driver.binaries[binary.cubin] = binary
        return super().load(binary)

    def given(self, x: torch.Tensor) -> Tensor:
        return self._known(super().given(x))

    def tensor(self, array: np.ndarray[Any, Any]) -> Tensor:
        return self._known(super().tensor(array))

    def _known(self, tensor: Tensor) -> Tensor:
        storage = tensor.owner.untyped_storage()  # type: ignore[attr-defined]
        self.driver.storages[storage.data_ptr()] = storage.nbytes()
        self.driver.held.append(storage)
        return tensor


def binaries(kernels: tuple[KernelName, ...]) -> dict[KernelName, Binary]:
    tile = default_tile("fused", PROBLEM, GPU)
    return {k: of_tile(k, PROBLEM, tile if k == "convert" else default_tile(k, PROBLEM, GPU), GPU) for k in kernels}


@pytest.mark.parametrize(("which", "kernels"), [("forward", FORWARD), ("backward", FUSED), ("backward", SPLIT)],
                         ids=["forward", "fused", "split"])  # fmt: skip
def test_every_pass_is_right(which: Pass, kernels: tuple[KernelName, ...]) -> None:
    """From arrays to poisoned outputs and back, ragged, causal, grouped heads, an odd d / 8."""
    made = binaries(kernels)
    engine = Watched(EmulatingDriver(), poison=True)
    verdict = check(PROBLEM, which, made, engine)
    assert verdict.ok, verdict.reason
    assert len(engine.driver.of("launch")) == len(kernels)


def test_pytorchs_strided_tensors_are_read_in_place() -> None:
    """Sequence-major views, one of them misaligned, and a result that lies as [B, N, H, d]."""
    made = binaries(FORWARD)
    engine, random = Watched(EmulatingDriver(), poison=True), torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, N, H, 72, generator=random).to(torch.bfloat16).transpose(1, 2)
        for N, H in ((70, 4), (90, 2), (90, 2))
    )
    shifted = torch.empty(2, 2, 90, 73, dtype=torch.bfloat16)[..., 1:].copy_(v)
    results = []
    for last in (v, shifted):
        given = [engine.given(x) for x in (q, k, last)]
        out = run_forward(engine, made, *given, 0.1, bnhd=True)
        results.append(engine.torch(out.O).view(torch.bfloat16))
    assert torch.equal(*results) and results[0].transpose(1, 2).is_contiguous()
    want = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), scale=0.1, enable_gqa=True,
        attn_mask=torch.ones(70, 90).tril(20).bool(),
    )  # fmt: skip
    assert (results[0].double() - want).abs().max() < 0.02 * want.abs().max()


@pytest.mark.parametrize("kernel", ["forward", "fused"])
def test_the_whole_work_of_a_measuring_process(kernel: KernelName, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened on a device that somebody else uses too: check, warm-up, times, and by whom; then a wrong kernel."""
    clocks: list[Any] = []

    class Clock:
        def __init__(self, engine: CudaEngine, l2_bytes: int) -> None:
            assert l2_bytes == 40 * 2**20
            clocks.append(engine)

        def seconds(self, launch: Callable[[], None], count: int) -> list[float]:
            launch()
            return [0.02] * count

        def clear(self, tensor: Tensor) -> None:
            clocks[0].torch(tensor).zero_()

    monkeypatch.setattr("flashsmith.engines.driver.cuda_device", lambda index: EmulatingDriver())
    monkeypatch.setattr("flashsmith.engines.cuda.CudaEngine", Watched)
    monkeypatch.setattr("flashsmith.engines.clock.CudaClock", Clock)
    monkeypatch.setattr(trial, "neighbours", lambda index: "1 other processes (4711)")
    monkeypatch.setattr(trial, "driver_version", lambda: "580.65")
    monkeypatch.setattr(trial, "MORE_SHAPES", ((70, 90),))
    with pytest.warns(UserWarning, match=r"shared with 1 other processes"):
        work = trial.on_device(kernel, PROBLEM, GPU, 0)
    good = binaries((kernel,))[kernel]
    timing = work(Try(good))
    assert isinstance(timing, Timing) and timing.seconds == 0.02
    assert timing.by == f"fake 0, driver 580.65, {date.today().isoformat()}, shared"
    assert work(Again(good, 3)) == [0.02] * 3
    old = "[e % 4] *= scale;" if kernel == "fused" else "inverse, O_rmem"
    assert old in good.source.text
    new = "[e % 4] *= 1.5f * scale;" if kernel == "fused" else f"1.5f * {old}"
    wrong = compile_source(Source(good.spec, good.source.text.replace(old, new)))
    with pytest.raises(WrongResult, match=r"Nq=70, Nk=90: (O|dK) is off by"):
        work(Try(wrong))
