"""Choose the backward's tiles by arithmetic: the first of a list, best first, that fits the GPU without spills."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Literal, TypeVar

from ..errors import NoTunedKernel
from .backward_shape import spare_registers
from .feature_shape import feature_registers
from .fp32_defaults import key_blocks_of_fp32, query_blocks_of_fp32
from .gpu import Gpu
from .kernel import KernelSpec
from .limits import why_illegal
from .problem import Problem
from .spills import spills
from .tile import GROUPED, KeyBlockTile, QueryBlockTile

KeyBlockKernel = Literal["fused", "dkdv"]
Tile = TypeVar("Tile", KeyBlockTile, QueryBlockTile)

_LARGE_SMEM = 144 * 1024  # bytes of a block: data-centre parts have more, the others 99 KB


def default_key_block(
    kernel: KeyBlockKernel, problem: Problem, gpu: Gpu, *, spilling: bool = False
) -> KeyBlockTile:  # fmt: skip
    """A tile of `fused` or `dkdv` that fits `gpu`, chosen without compiling anything; it may spill if `spilling`."""
    d = max(problem.d, problem.value_dim)
    tiles = _key_blocks_of_turing(kernel, d) if gpu.sm < 80 else _key_blocks(kernel, d, gpu)
    if problem.dtype == "fp32":
        tiles = key_blocks_of_fp32(d, fast=gpu.smem_block_bytes >= _LARGE_SMEM)
    return _first_legal(kernel, problem, gpu, tiles, spilling)


def default_query_block(problem: Problem, gpu: Gpu, *, spilling: bool = False) -> QueryBlockTile:
    """A tile of `dq` that fits `gpu`, chosen without compiling anything; it may spill if `spilling`."""
    d = max(problem.d, problem.value_dim)
    tiles = _query_blocks_of_turing(d) if gpu.sm < 80 else _query_blocks(d)
    if problem.dtype == "fp32":
        tiles = query_blocks_of_fp32()
    return _first_legal("dq", problem, gpu, tiles, spilling)


def published_key_block(d: int, gpu: Gpu) -> tuple[KeyBlockTile, ...]:
    """FlashAttention-2's backward tiles (flash_bwd_launch_template.h) in our fields; they may not fit.

    Its AtomLayoutMSdP is the number of warps that share keys, hence our row_split. Its V_in_regs is our v_regs, which
    needs more registers here, so the same tile without it follows.
    """
    large = gpu.smem_block_bytes >= _LARGE_SMEM
    if d <= 32:
        tile = KeyBlockTile(Br=128, Bc=128, warps=8, row_split=4, v_regs=True)
    elif d <= 64:
        tile = KeyBlockTile(Br=128, Bc=128, warps=8, row_split=4) if large else _fa2(64, 128, row_split=2, v_regs=True)
    elif d <= 96:
        tile = _fa2(64, 128, row_split=2, v_regs=True)
    elif d <= 128:
        tile = _fa2(64, 128, row_split=2) if large else _fa2(64, 64, row_split=4, v_regs=True)
    elif d <= 192:
        tile = _fa2(64, 64, row_split=4) if large else _fa2(64, 64, row_split=4, v_regs=True, stages=1)
    elif large:
        tile = _fa2(64, 64, row_split=4, stages=2 if gpu.smem_block_bytes >= 176 * 1024 else 1)
    else:
        tile = _fa2(64, 32, row_split=4, v_regs=True, stages=1)
    return (tile, replace(tile, v_regs=False)) if tile.v_regs else (tile,)


def _fa2(Br: int, Bc: int, *, row_split: int, v_regs: bool = False, stages: int = 2) -> KeyBlockTile:
    return KeyBlockTile(Br=Br, Bc=Bc, warps=8, row_split=row_split, v_regs=v_regs, stages=stages)


def _first_legal(
    kernel: Literal["fused", "dkdv", "dq"], problem: Problem, gpu: Gpu, tiles: Iterable[Tile], spilling: bool
) -> Tile:  # fmt: skip
    """The first tile that breaks no limit. Raises NoTunedKernel where none does: of wide heads in little shared memory.

    With a mask loops differ in length, and grouped heads are predicted 1 to 12% faster than head by head.
    """
    reason: str | None = None
    tightest: tuple[int, Tile] | None = None  # how many registers it lacks
    for tile in tiles:
        spec = KernelSpec.of(kernel, problem, tile, gpu.sm)
        if spec.causal:
            tile = replace(tile, order=GROUPED)
            spec = replace(spec, tile=tile)
        reason = why_illegal(spec, gpu)
        if reason is not None or (spills(spec) and not spilling):
            continue
        lacking = 0 if spec.plain else feature_registers(spec) - spare_registers(spec)
        if lacking <= 0:
            return tile
        tightest = min(tightest or (lacking, tile), (lacking, tile), key=lambda each: each[0])
    if tightest:
        return tightest[1]
    raise NoTunedKernel(f"no tile of {kernel} for {problem.text} fits {gpu.key}; of the last that was tried: {reason}")


def _key_blocks(kernel: KeyBlockKernel, d: int, gpu: Gpu) -> Iterator[KeyBlockTile]:
    """Large Bc first (dQ is read and written once a K/V tile), then as many warps as its registers need."""
    stages = 2 if gpu.smem_block_bytes >= _LARGE_SMEM else 1
    if d <= 64 and kernel == "dkdv" and gpu.sm < 90:  # on sm_90 ptxas spills in their loops
        if stages == 2:
            yield KeyBlockTile(Br=64, Bc=128, warps=4, slice=32, v_regs=True, weave=False, min_blocks=2)
        yield KeyBlockTile(Br=64, Bc=128, warps=4, slice=32, stages=stages, weave=False, min_blocks=2)
    if d <= 64 and stages == 2 and gpu.sm >= 90:
        yield KeyBlockTile(Br=64, Bc=128, warps=4, slice=32, stages=1, weave=False, min_blocks=2)
    if d <= 64:  # V in registers leaves room for two blocks an SM
        yield KeyBlockTile(Br=64, Bc=128, warps=4, slice=16, stages=stages, v_regs=True, min_blocks=2)
        yield KeyBlockTile(Br=64, Bc=128, warps=4, slice=16, stages=stages, v_regs=True, weave=False, min_blocks=2)
        yield KeyBlockTile(Br=64, Bc=128, warps=4, slice=16, stages=1, v_regs=True, min_blocks=2)
        yield KeyBlockTile(Br=64, Bc=128, warps=4, slice=16, stages=1, v_regs=True, weave=False, min_blocks=2)
        yield KeyBlockTile(Br=64, Bc=128, warps=4, slice=16, stages=stages, min_blocks=2)
        yield KeyBlockTile(Br=64, Bc=128, warps=4, slice=16, stages=stages, weave=False, min_blocks=2)
    if d <= 96:
        if stages == 2:
            yield KeyBlockTile(Br=64, Bc=128, warps=8, stages=2, v_regs=True, weave=False)
            yield KeyBlockTile(Br=64, Bc=128, warps=8, stages=2, weave=False)
            yield KeyBlockTile(Br=64, Bc=128, warps=8, slice=32, stages=2)
        yield KeyBlockTile(Br=64, Bc=128, warps=8, stages=1, v_regs=True)
        yield KeyBlockTile(Br=64, Bc=128, warps=8, slice=16, stages=1, v_regs=True)
        yield KeyBlockTile(Br=64, Bc=64, warps=4, slice=32, stages=stages, min_blocks=2)
        yield KeyBlockTile(Br=64, Bc=64, warps=4, slice=32, stages=1)
    if d <= 128:
        if stages == 2 and kernel == "dkdv":  # no dS for dQ to share: V in registers saves more than shared keys
            yield KeyBlockTile(Br=64, Bc=128, warps=8, v_regs=True)
            yield KeyBlockTile(Br=64, Bc=128, warps=8, v_regs=True, weave=False)
        if stages == 2:
            yield KeyBlockTile(Br=64, Bc=128, warps=8, row_split=2, stages=2)
            yield KeyBlockTile(Br=64, Bc=128, warps=8, row_split=2, stages=2, weave=False)
            yield KeyBlockTile(Br=64, Bc=128, warps=8, row_split=2, stages=1)
            yield KeyBlockTile(Br=64, Bc=128, warps=8, row_split=2, slice=16, stages=2)
        yield KeyBlockTile(Br=64, Bc=128, warps=8, slice=16, stages=1, v_regs=True)
        yield KeyBlockTile(Br=64, Bc=128, warps=8, slice=16, stages=1, v_regs=True, weave=False)
        yield KeyBlockTile(Br=64, Bc=64, warps=8, row_split=2, stages=1, v_regs=True)
    if d <= 192 and kernel == "fused":
        yield KeyBlockTile(Br=64, Bc=96, warps=8, row_split=4, stages=2)
        if stages == 1:
            yield KeyBlockTile(Br=32, Bc=64, warps=8, row_split=2, stages=2, v_regs=True)
    if stages == 2:
        yield KeyBlockTile(Br=64, Bc=64, warps=8, row_split=4, stages=2)
        yield KeyBlockTile(Br=64, Bc=64, warps=8, row_split=4, stages=2, weave=False)
        if kernel == "fused":
            yield KeyBlockTile(Br=32, Bc=64, warps=8, row_split=2, stages=2)
            yield KeyBlockTile(Br=32, Bc=64, warps=8, row_split=2, stages=2, weave=False)
        yield KeyBlockTile(Br=64, Bc=64, warps=8, row_split=4, stages=1, weave=False)
    yield KeyBlockTile(Br=32, Bc=64, warps=8, row_split=2, stages=1)
    yield KeyBlockTile(Br=32, Bc=64, warps=8, row_split=2, stages=1, v_regs=True)
    yield KeyBlockTile(Br=64, Bc=32, warps=8, row_split=4, stages=1)  # slow, and the only ones that never spilled
    yield KeyBlockTile(Br=64, Bc=32, warps=8, row_split=4, stages=1, v_regs=True)


def _query_blocks(d: int) -> Iterator[QueryBlockTile]:
    """32 rows a warp and two blocks an SM where registers and shared memory allow them."""
    if d > 96:  # 32 rows a warp spill
        yield QueryBlockTile(Br=128, Bc=64, warps=8, q_regs=True, weave=False)
    yield QueryBlockTile(Br=128, Bc=48, warps=4, q_regs=True, weave=False, min_blocks=2)
    for Br, Bc, warps, stages, min_blocks in (
        (128, 48, 4, 2, 2), (128, 32, 4, 2, 2), (128, 32, 4, 1, 2), (128, 16, 4, 2, 2),  # 32 rows a warp
        (128, 48, 8, 2, 1), (128, 32, 8, 2, 1), (64, 48, 4, 2, 1), (64, 32, 4, 2, 1), (64, 16, 4, 2, 1),  # 16 rows
        (64, 32, 4, 1, 1), (64, 16, 4, 1, 1),
    ):  # fmt: skip
        yield QueryBlockTile(Br=Br, Bc=Bc, warps=warps, stages=stages, min_blocks=min_blocks)


def _key_blocks_of_turing(kernel: KeyBlockKernel, d: int) -> Iterator[KeyBlockTile]:
    """64 KB, half as wide as elsewhere, and no second buffer: V in registers makes room for two blocks or large ones.

    At d = 192 and 256 the fastest of them spill a little; from d = 200 on `fused` has none that fits.
    """

    def tile(
        Br: int, Bc: int, warps: int, row_split: int = 1, *, slice: int = 0, v_regs: bool = True, weave: bool = False,
        min_blocks: int = 1,
    ) -> KeyBlockTile:  # fmt: skip
        return KeyBlockTile(
            Br=Br, Bc=Bc, warps=warps, row_split=row_split, slice=slice, stages=1, v_regs=v_regs, weave=weave,
            min_blocks=min_blocks,
        )  # fmt: skip

    if d <= 32:
        if kernel == "dkdv":
            yield tile(64, 128, 4, slice=32)
        yield tile(64, 64, 4, min_blocks=2)
    if kernel == "dkdv" and d <= 96:
        yield tile(64, 128, 8)
    if d <= 48:
        yield tile(32, 32, 2, min_blocks=3)
    elif d <= 64:
        yield tile(32, 64, 4, 2, min_blocks=2)
    elif d <= 96:
        yield tile(32, 64, 4, min_blocks=2)
        yield tile(32, 32, 2, slice=16, weave=True)
    yield tile(32, 64, 8, 2, weave=kernel == "dkdv")
    yield tile(32, 32, 4, 2, v_regs=False)
    yield tile(32, 32, 4, 2)


def _query_blocks_of_turing(d: int) -> Iterator[QueryBlockTile]:
    """Q in registers, which shared memory would have to deliver again for each tile of keys."""
    if d <= 32:
        yield QueryBlockTile(Br=128, Bc=32, warps=4, stages=1, q_regs=True, weave=False, min_blocks=2)
    if d <= 64:
        yield QueryBlockTile(Br=64, Bc=64, warps=4, stages=1, q_regs=True, weave=False, min_blocks=2)
    for Br, Bc, warps in ((128, 32, 8), (128, 16, 8), (64, 48, 4), (64, 32, 4), (64, 16, 4)):
        yield QueryBlockTile(Br=Br, Bc=Bc, warps=warps, stages=1, q_regs=True, weave=False)
    yield QueryBlockTile(Br=64, Bc=16, warps=4, stages=1, weave=False)
    yield QueryBlockTile(Br=32, Bc=32, warps=2, stages=1, weave=False)
    yield QueryBlockTile(Br=32, Bc=16, warps=2, stages=1, weave=False)
