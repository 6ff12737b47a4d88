"""Grids, arguments and shapes of the launches, on an engine that records its calls."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flashsmith import run
from flashsmith.engines.emulated import EmulatedEngine
from flashsmith.engines.engine import Tensor
from flashsmith.errors import LaunchError
from flashsmith.run import Sizes, blocks_of, grid, pack, run_backward, run_forward
from flashsmith.spec import limits
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import ARG_BYTES, KERNELS, KernelName, KernelSpec
from flashsmith.spec.problem import Problem
from flashsmith.spec.tile import ForwardTile, WarpgroupTile

PROBLEM = Problem(dtype="bf16", d=64, causal=True, B=2, Hq=6, Hk=2, Nq=200, Nk=333)
SIZES = Sizes(B=2, Hq=6, Hk=2, Nq=200, Nk=333)
SHAPES = {"Q": (2, 6, 200, 64), "K": (2, 2, 333, 64), "V": (2, 2, 333, 64), "O": (2, 6, 200, 64), "dO": (2, 6, 200, 64),
          "dQ": (2, 6, 200, 64), "dK": (2, 2, 333, 64), "dV": (2, 2, 333, 64)}  # fmt: skip


def spec_of(kernel: KernelName) -> KernelSpec:
    gpu = find_gpu("a100")
    return KernelSpec.of(kernel, PROBLEM, default_tile(kernel, PROBLEM, gpu), gpu.sm)


def tensor(shape: tuple[int, ...], address: int = 1 << 40, row: int | None = None) -> Tensor:
    row = row or shape[-1]
    strides = (shape[1] * shape[2] * row, shape[2] * row, row, 1)
    return Tensor(address, shape, strides, np.dtype(np.uint16))


def tensors() -> dict[str, Tensor]:
    named = {name: tensor(shape, address=(n + 1) << 40) for n, (name, shape) in enumerate(SHAPES.items())}
    return named | {name: tensor((2, 6, 200, 1), 1 << 50) for name in ("m", "l", "dlse", "stats", "dQ_acc")}


@pytest.mark.parametrize("kernel", KERNELS)
def test_arguments_follow_the_signature(kernel: KernelName) -> None:
    """One value a parameter, of its width: structures as bytes, pointers and lengths as whole numbers (BUG-27)."""
    spec = spec_of(kernel)
    values = pack(spec, tensors(), SIZES, 0.3)
    assert len(values) == len(spec.signature)
    for arg, value in zip(spec.signature, values, strict=True):
        if arg.type.startswith(("View", "Walk")):
            assert isinstance(value, bytes) and len(value) == ARG_BYTES[arg.type]
        else:
            assert isinstance(value, float if arg.type == "float" else int)


def test_strides_travel_as_64_bit() -> None:
    """A sequence-major view passes 2^31 elements long before the element count does (BUG-09)."""
    wide = Tensor(16, (700, 1, 24000, 128), (128, 128, 700 * 128, 1), np.dtype(np.uint16))
    far = Tensor(16, (3, 6, 200, 64), (2**33, 2**31, 64, 1), np.dtype(np.uint16))
    values = dict(zip((a.name for a in spec_of("forward").signature), pack(
        spec_of("forward"), tensors() | {"K": wide, "Q": far}, SIZES, 1.0), strict=True))  # fmt: skip
    assert struct.unpack("<Qqqq", values["K"]) == (16, 128, 128, 89600)
    assert struct.unpack("<Qqqq", values["Q"]) == (16, 2**33, 2**31, 64)
    spec = spec_of("forward")
    rows = limits.copy_rows(spec), spec.tile.Bc
    assert struct.unpack("<qq", values["K_walk"]) == (rows[0] * 89600 * 2, rows[1] * 89600 * 2)


@pytest.mark.parametrize("kernel", KERNELS)
def test_grids_are_flat_and_cover_everything(kernel: KernelName) -> None:
    """65536 batches or heads are no more special than 65535: nothing lies in y or z (BUG-08)."""
    spec = spec_of(kernel)
    one = grid(spec, Sizes(B=1, Hq=1, Hk=1, Nq=4, Nk=4))
    assert one >= 1
    for B, H in ((65536, 1), (1, 65536), (8192, 9)):
        assert grid(spec, Sizes(B=B, Hq=H, Hk=H, Nq=4, Nk=4)) == one * B * H


def test_a_grid_past_the_hardwares_limit_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"2147483647"):
        grid(spec_of("forward"), Sizes(B=2**16, Hq=2**15, Hk=1, Nq=4, Nk=4))
    packed = replace(spec_of("forward"), tile=ForwardTile(Br=64, Bc=64, warps=4, packed=True))
    with pytest.raises(LaunchError, match=r"4294967296 rows of a group, .* Use packed=0"):
        grid(packed, Sizes(B=1, Hq=4, Hk=1, Nq=2**30, Nk=4))


@pytest.mark.parametrize(
    ("fields", "aligned"),
    [({}, True), ({"address": 8}, False), ({"row": 68}, False), ({"row": 72}, True)],
    ids=["plain", "address", "row of 136 B", "row of 144 B"],
)
def test_what_cp_async_can_reach(fields: dict[str, int], aligned: bool) -> None:
    assert tensor((2, 6, 200, 64), **{"address": 16, **fields}).aligned is aligned


class Recorder:
    """An Engine that computes nothing and remembers every launch."""

    name = "recorder"
    sms = 132

    def __init__(self) -> None:
        self.launches: list[tuple[str, int, int, int]] = []
        self.copies = 0

    def tensor(self, array: np.ndarray[Any, Any]) -> Tensor:
        return self.empty(array.shape, array.dtype)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        strides = tuple(int(np.prod(shape[n + 1 :])) for n in range(len(shape)))
        return Tensor(1 << 40, shape, strides, np.dtype(dtype))

    zeros = empty

    def contiguous(self, tensor: Tensor) -> Tensor:
        self.copies += 1
        return self.empty(tensor.shape, tensor.dtype)

    def read(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        return np.zeros(tensor.shape, tensor.dtype)

    def load(self, binary: Any) -> str:
        return str(binary.spec.kernel)

    def launch(self, kernel: str, *, grid: int, block: int, smem: int, args: Any) -> None:
        self.launches.append((kernel, grid, block, smem))


class Compiled:
    """A stand-in for a Binary: its spec and its shared memory."""

    def __init__(self, kernel: KernelName) -> None:
        self.spec = spec_of(kernel)
        self.smem_bytes = limits.smem_bytes(self.spec)


def binaries(*kernels: KernelName) -> dict[KernelName, Any]:
    return {kernel: Compiled(kernel) for kernel in kernels}


@pytest.mark.parametrize("kernels", [("delta", "fused", "convert"), ("delta", "dkdv", "dq")], ids=["fused", "split"])
def test_a_backward_is_three_launches(kernels: tuple[KernelName, ...]) -> None:
    engine, t = Recorder(), tensors()
    run_backward(
        engine, binaries(*kernels), t["Q"], t["K"], t["V"], run.Forward(t["O"], t["m"], t["l"]), t["dO"], 0.125
    )
    assert [launch[0] for launch in engine.launches] == list(kernels)
    for name, blocks, threads, smem in engine.launches:
        spec = spec_of(name)  # type: ignore[arg-type]
        assert (blocks, threads, smem) == (grid(spec, SIZES), spec.threads, limits.smem_bytes(spec))


@pytest.mark.parametrize(("sms", "blocks"), [(2, 2), (23, 23), (132, 24)])
def test_blocks_that_share_tiles_are_no_more_than_the_multiprocessors(sms: int, blocks: int) -> None:
    """And the kernel is told how many tiles there are: 2 of each of 12 heads."""
    gpu = find_gpu("h100-sxm")
    spec = KernelSpec.of("forward90", PROBLEM, default_tile("forward90", PROBLEM, gpu), gpu.sm)
    assert grid(spec, SIZES) == 24 and blocks_of(spec, SIZES, sms) == blocks
    engine = EmulatedEngine(sms=sms)
    values = pack(spec, tensors(), SIZES, 0.3, engine=engine)
    assert dict(zip((arg.name for arg in spec.signature), values, strict=True))["tiles"] == 24
    assert blocks_of(spec_of("forward"), SIZES, sms) == grid(spec_of("forward"), SIZES)


@pytest.mark.parametrize(("sms", "blocks"), [(1, 2), (2, 2), (23, 22), (132, 48)])
def test_blocks_of_clusters_come_in_pairs(sms: int, blocks: int) -> None:
    """A head of three tiles has four, the last past the end, and no multiprocessor is left alone with half a pair."""
    tile = WarpgroupTile(Br=64, Bc=64, cluster=2)
    problem, sizes = replace(PROBLEM, causal=False), replace(SIZES, Nq=150)
    spec = KernelSpec.of("forward90", problem, tile, 90)
    heads = sizes.B * sizes.Hq
    assert grid(spec, sizes) == 4 * heads and blocks_of(spec, sizes, sms) == blocks
    alone = KernelSpec.of("forward90", problem, replace(tile, cluster=1), 90)
    assert grid(alone, sizes) == 3 * heads


@pytest.mark.parametrize("zero", ["B", "Hq", "Nq", "Nk"])
def test_nothing_is_launched_for_nothing(zero: str) -> None:
    """An empty dimension gives zeros of the right shapes and no launch (BUG-12)."""
    n = {"B": 2, "Hq": 6, "Nq": 5, "Nk": 7, zero: 0}
    q = tensor((n["B"], n["Hq"], n["Nq"], 64))
    k = tensor((n["B"], n["Hq"], n["Nk"], 64))
    engine = Recorder()
    out = run_forward(engine, binaries("forward"), q, k, k, 0.125)
    gradients = run_backward(engine, binaries("delta", "fused", "convert"), q, k, k, out, q, 0.125)
    assert engine.launches == []
    assert out.O.shape == q.shape and out.m.shape == q.shape[:3]
    assert (gradients.dQ.shape, gradients.dK.shape, gradients.dV.shape) == (q.shape, k.shape, k.shape)


def test_only_inputs_that_cannot_be_reached_are_copied() -> None:
    engine, t = Recorder(), tensors()
    odd = Tensor(8, t["K"].shape, t["K"].strides, t["K"].dtype)
    run_forward(engine, binaries("forward"), t["Q"], odd, t["V"], 0.125)
    assert engine.copies == 1
