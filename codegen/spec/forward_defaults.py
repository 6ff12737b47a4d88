"""Choose a ForwardTile by arithmetic, and hold the tiles that others have published."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ..errors import NoTunedKernel
from .feature_shape import feature_registers
from .forward_shape import forward_registers
from .fp32_defaults import forwards_of_fp32
from .gpu import Gpu
from .kernel import KernelSpec
from .limits import why_illegal
from .problem import ELEMENT_BYTES, Problem
from .spills import spills
from .tile import GROUPED, ForwardTile

SHORT = 64  # query rows of a head up to which their number decides the tile
KEEP = 3 / 4  # packing heads must leave at most this share of the tiles of rows that read K and V

SAFE_REGISTERS = 217  # by the estimate of forward_shape: above it, ptxas begins to spill in loops of causal kernels
SAFE_REGISTERS_OF_TURING = 197  # its two conversions for each pair of P, and products in two halves, take more
SMALL_SMEM_KB = 100  # an SM of the GeForce and graphics parts

# Br, warps, min_blocks, best first. Two blocks cover each other's barriers; in a warp of 32 rows each K and V fragment
# that is read from shared memory feeds two mma. From d = 144 on, that takes too many registers.
_SHAPES = ((128, 4, 2), (64, 4, 2), (128, 8, 1))

# Blocks of 64 rows read K and V twice as often: parts with faster tensor cores would wait for the L2 cache.
_SHAPES_OF_FAST_PARTS = ((128, 4, 2), (128, 8, 1))

# Shared memory of sm_75 is half as wide: what matters most is that a fragment of K or V feeds two mma, or many warps.
_SHAPES_OF_TURING = ((128, 4, 2), (128, 8, 1), (64, 4, 1))


def packs(problem: Problem) -> bool:
    """Whether the heads of a group share tiles: where their few rows fit into markedly fewer tiles together.

    >>> packs(Problem(dtype="bf16", d=128, Hq=32, Hk=8, Nq=1)), packs(Problem(dtype="bf16", d=128, Hq=32, Hk=8, Nq=64))
    (True, False)
    """
    if not problem.features.plain or problem.dv:
        return False
    group = problem.Hq // problem.kv_heads if problem.kv_heads else 1
    return group > 1 and 0 < problem.Nq <= SHORT and -(-problem.Nq * group // SHORT) <= KEEP * group


def short_forward(problem: Problem, gpu: Gpu) -> ForwardTile | None:
    """The tile for at most SHORT query rows of a head: the least rows that hold them, in warps of 16; else None.

    Such a block waits for K and V, of which a tile is 32 KB where that fits, and empty rows would cost it shared memory
    and tensor cores that others could use.

    >>> from .gpu import find_gpu
    >>> short_forward(Problem(dtype="bf16", d=128, Nq=1), find_gpu("a100"))
    ForwardTile(Br=16, Bc=64, warps=1)
    """
    if not 0 < problem.Nq <= SHORT:
        return None
    packed = packs(problem)
    rows = problem.Nq * (problem.Hq // problem.kv_heads if packed else 1)
    warps = next((warps for warps in (1, 2) if rows <= 16 * warps), 4)
    keys_of_32_kb = 32768 // (2 * ELEMENT_BYTES[problem.dtype] * problem.d)
    for Bc in range(min(128, max(16, keys_of_32_kb // 16 * 16)), 0, -16):
        tile = ForwardTile(Br=16 * warps, Bc=Bc, warps=warps, packed=packed)
        spec = KernelSpec.of("forward", problem, tile, gpu.sm)
        if why_illegal(spec, gpu) is None:
            return tile
    return None


def of_partial(tile: ForwardTile) -> ForwardTile:
    """A tile of `forward` as `partial` takes it, which knows one order and one direction."""
    return replace(tile, order=GROUPED, ascending=False)


def default_forward(problem: Problem, gpu: Gpu, *, spilling: bool = False) -> ForwardTile:
    """The first shape with a K/V tile of 48 keys or more that fits and needs no spills; else with fewer keys.

    Of the keys, as many as prove useful; then as much of Q in registers as there is room for. With `spilling` the first
    that fits, though ptxas may spill a little outside the loop.

    >>> from .gpu import find_gpu
    >>> default_forward(Problem(dtype="bf16", d=128), find_gpu("rtx4090"))
    ForwardTile(Br=64, Bc=48, warps=4, q_steps=8, lazy=False, min_blocks=2)
    """
    d, fast = max(problem.d, problem.value_dim), gpu.smem_sm_kb > SMALL_SMEM_KB
    fp32 = problem.dtype == "fp32"
    tightest: tuple[int, ForwardTile] | None = None  # how many registers it lacks
    for tile in _of_turing(d) if gpu.sm < 80 else forwards_of_fp32(d, fast) if fp32 else _by_preference(d, fast):
        spec = KernelSpec.of("forward", problem, tile, gpu.sm)
        if why_illegal(spec, gpu) is not None:
            continue
        safe = SAFE_REGISTERS_OF_TURING if gpu.sm < 80 else SAFE_REGISTERS
        spare = safe - forward_registers(spec, tile) - feature_registers(spec)
        if spare < 0:
            tightest = min(tightest or (-spare, tile), (-spare, tile), key=lambda each: each[0])
            continue
        a_step = forward_registers(spec, replace(tile, q_steps=1)) - forward_registers(spec, tile)
        for q_steps in range(0 if fp32 else min(problem.d // spec.depth, spare // a_step), -1, -1):
            best = replace(tile, q_steps=q_steps)
            if spilling or not spills(replace(spec, tile=best)):
                return best
    if tightest and not problem.features.plain:
        return tightest[1]
    raise NoTunedKernel(f"no forward tile fits {gpu.key} for {problem.text}")


def _by_preference(d: int, fast: bool) -> Iterator[ForwardTile]:
    for least, (Br, warps, min_blocks) in product((48, 32, 16), _SHAPES_OF_FAST_PARTS if fast else _SHAPES):
        # 8 warps copy 32 rows a pass, and an incomplete pass costs as much as a whole one.
        most, step = (96, 32) if warps == 8 else (128 if d <= 32 else 64, 16)
        for Bc in range(most, least - 1, -step):
            for lazy in (True, False) if fast else (False,):
                yield ForwardTile(Br=Br, Bc=Bc, warps=warps, lazy=lazy, min_blocks=min_blocks)


def _of_turing(d: int) -> Iterator[ForwardTile]:
    for Br, warps, min_blocks in _SHAPES_OF_TURING:
        for Bc in (48, 32, 16) if d > 48 else (32, 16):
            yield ForwardTile(Br=Br, Bc=Bc, warps=warps, min_blocks=min_blocks)


# d up to which it holds, Br, Bc, warps, all of Q in registers. FlashAttention-2: flash_fwd_launch_template.h, without
# dropout; FlashAttention-3: its mma.sync kernels, hopper/tile_size.h.
_Published = tuple[int, int, int, int, bool]

_FA2: tuple[_Published, ...] = (
    (64, 128, 128, 4, False), (128, 128, 64, 4, False), (256, 128, 64, 8, False),
)  # fmt: skip
_FA2_SMALL: tuple[_Published, ...] = (
    (64, 128, 128, 4, False), (96, 128, 64, 4, False), (128, 128, 32, 4, False), (192, 128, 64, 8, False),
    (256, 64, 64, 4, False),
)  # fmt: skip
_FA2_SMALL_CAUSAL: tuple[_Published, ...] = (
    (64, 128, 128, 4, False), (128, 64, 64, 4, False), (192, 128, 64, 8, False), (256, 64, 64, 4, False),
)  # fmt: skip
_FA3: tuple[_Published, ...] = (
    (64, 128, 112, 4, False), (128, 128, 64, 4, False), (192, 128, 96, 8, True), (256, 128, 96, 8, False),
)  # fmt: skip
_FA3_SMALL: tuple[_Published, ...] = (
    (64, 128, 112, 4, False), (96, 128, 64, 4, False), (128, 128, 128, 8, True), (192, 128, 96, 8, True),
    (256, 128, 64, 8, True),
)  # fmt: skip


def published_forward(d: int, causal: bool, gpu: Gpu) -> tuple[ForwardTile, ...]:
    """What FlashAttention-2 and the mma.sync kernels of FlashAttention-3 use, in our fields. They may not fit.

    >>> from .gpu import find_gpu
    >>> published_forward(128, False, find_gpu("a100"))
    (ForwardTile(Br=128, Bc=64, warps=4, q_steps=0, lazy=False, min_blocks=2),)
    """
    if gpu.smem_sm_kb > SMALL_SMEM_KB:
        tables = (_FA2, _FA3)
    else:
        tables = (_FA2_SMALL_CAUSAL if causal else _FA2_SMALL, _FA3_SMALL)
    tiles: list[ForwardTile] = []
    for table in tables:
        _, Br, Bc, warps, q_regs = next(row for row in table if d <= row[0])
        tile = ForwardTile(Br=Br, Bc=Bc, warps=warps, q_steps=d // 16 if q_regs else 0, min_blocks=1)
        two = replace(tile, min_blocks=2)
        spec = KernelSpec(kernel="forward", dtype="fp16", d=d, causal=causal, tile=two, sm=gpu.sm)
        tiles.append(two if why_illegal(spec, gpu) is None else tile)
    return tuple(dict.fromkeys(tiles))
