"""Give the kernels of warpgroups a tile by arithmetic."""

from __future__ import annotations

from typing import Literal

from ..errors import NoTunedKernel
from . import warpgroup_key_shape, warpgroup_query_shape, warpgroup_wide_shape
from .feature_shape import reads_pairs, warpgroup_feature_registers
from .gpu import Gpu
from .kernel import KernelSpec
from .limits import why_illegal
from .problem import Problem
from .tile import WarpgroupKeyTile, WarpgroupQueryTile, WarpgroupTile, WarpgroupWideTile
from .warpgroup_key_shape import MOST_ROWS
from .warpgroup_shape import HELD, PANEL, held_registers
from .warpgroup_wide_shape import MOST_KEYS

WIDEST = 176  # keys of a tile; a mask wastes half of the tiles on the diagonal, so that there they are narrower
WIDEST_CAUSAL = 128
WIDEST_DROPOUT = 128  # random numbers for more spill registers,
WIDEST_DROPOUT_READS = 80  # and for still less beside entries of a table that are another for each pair
NARROWEST = 32
WIDEST_DQ = 128
NARROWEST_BACKWARD = 32  # with features
PAIRED = 128  # head dimensions whose tiles L2 cannot deliver to every block by itself
SMALL = 64  # head dimensions whose sums leave room for a third warpgroup

# Registers of a consumer's thread that sums, scores and features may take in the backward before ptxas spills, by the
# number of warpgroups that compute: read off kernels of d = 64, 128, 192 and 256.
KEYS_WITH_FEATURES = 224
QUERIES_WITH_FEATURES = 224
WIDE_WITH_FEATURES: dict[int, int] = {2: 224, 3: 144}


def pairs(problem: Problem) -> bool:
    """Whether two blocks may load K and V for each other: see `unmasked` of warpgroup_shape."""
    return problem.bounds == (None, None) and problem.lengths == "uniform"


def default_warpgroup(problem: Problem, gpu: Gpu) -> WarpgroupTile:
    """Two warpgroups that take turns, two buffers, and the widest tile of keys that fits.

    At d = dv = 128 and 256 without a mask these are the tiles of FlashAttention-3, and blocks load for each other in
    pairs as its do; up to 64 too, where there are three warpgroups. What features take of the registers is left free if
    that can be.

    Raises NoTunedKernel where none fits, as on every part but those of sm_90.
    """
    wide = max(problem.d, problem.value_dim)
    tile = WarpgroupTile(Br=192, Bc=128, pingpong=True)
    bare = not warpgroup_feature_registers(KernelSpec.of("forward90", problem, tile, gpu.sm))
    if wide <= SMALL and gpu.sm == 90 and bare:
        return tile
    cluster = 2 if wide >= PAIRED and pairs(problem) and bare else 1
    reason: str | None = None
    narrowest: WarpgroupTile | None = None
    for Bc in range(_widest(problem), NARROWEST - 1, -16):
        tile = WarpgroupTile(Br=128, Bc=Bc, pingpong=True, cluster=cluster)
        spec = KernelSpec.of("forward90", problem, tile, gpu.sm)
        reason = why_illegal(spec, gpu)
        if reason is None and held_registers(spec, tile) + warpgroup_feature_registers(spec) <= HELD[tile.consumers]:
            return tile
        narrowest = tile if reason is None else narrowest
    if narrowest is not None:
        return narrowest
    raise NoTunedKernel(f"no forward90 tile fits {gpu.key} for {problem.text}: {reason}")


def default_warpgroup_keys(
    kernel: Literal["fused90", "dkdv90"], problem: Problem, gpu: Gpu
) -> WarpgroupKeyTile:  # fmt: skip
    """The most query rows in a tile that fit, with two buffers of everything; with a mask no more than 64 at d = 128.

    At d = dv = 64 and 128 these are the tiles of FlashAttention-3. What features take of the registers is left free.

    Raises NoTunedKernel where none fits, as on every part but those of sm_90.
    """
    reason, fewest = None, None
    for Br in range(MOST_ROWS, 0, -16):
        if problem.causal and Br % 64 and Br > 64:
            continue  # tiles on the diagonal are computed in vain by half
        if fewest is not None and Br < NARROWEST_BACKWARD:
            break
        tile = WarpgroupKeyTile(Br=Br)
        spec = KernelSpec.of(kernel, problem, tile, gpu.sm)
        reason = why_illegal(spec, gpu)
        if reason is None:
            if _leaves_registers(spec, warpgroup_key_shape.held_registers(spec, tile), KEYS_WITH_FEATURES):
                return tile
            fewest = tile
    if fewest is not None:
        return fewest
    raise NoTunedKernel(f"no {kernel} tile fits {gpu.key} for {problem.text}: {reason}")


def default_warpgroup_query(problem: Problem, gpu: Gpu) -> WarpgroupQueryTile:
    """Two warpgroups, two buffers, of V one if need be, and the widest tile of keys that fits.

    What features take of the registers is left free.

    Raises NoTunedKernel where none fits, as on every part but those of sm_90.
    """
    reason, narrowest = None, None
    for Bc in range(WIDEST_DQ, 0, -16):
        if narrowest is not None and Bc < NARROWEST_BACKWARD:
            break
        for v_stages in (2, 1):
            tile = WarpgroupQueryTile(Br=128, Bc=Bc, v_stages=v_stages)
            spec = KernelSpec.of("dq90", problem, tile, gpu.sm)
            reason = why_illegal(spec, gpu)
            if reason is None:
                if _leaves_registers(spec, warpgroup_query_shape.held_registers(spec, tile), QUERIES_WITH_FEATURES):
                    return tile
                narrowest = tile
    if narrowest is not None:
        return narrowest
    raise NoTunedKernel(f"no dq90 tile fits {gpu.key} for {problem.text}: {reason}")


def default_warpgroup_wide(problem: Problem, gpu: Gpu) -> WarpgroupWideTile:
    """A warpgroup for each 64 columns up to three, two for four times 64, and the most keys that fit.

    What features take of the registers is left free.

    Raises NoTunedKernel where none fits, as on every part but those of sm_90.
    """
    consumers = 3 if max(problem.d, problem.value_dim) <= 3 * PANEL else 2
    reason, fewest = None, None
    for Bc in range(MOST_KEYS, 0, -16):
        if fewest is not None and Bc < NARROWEST_BACKWARD:
            break
        tile = WarpgroupWideTile(Bc=Bc, consumers=consumers)
        spec = KernelSpec.of("dkdv90_wide", problem, tile, gpu.sm)
        reason = why_illegal(spec, gpu)
        if reason is None:
            held = warpgroup_wide_shape.held_registers(spec, tile)
            if _leaves_registers(spec, held, WIDE_WITH_FEATURES[consumers]):
                return tile
            fewest = tile
    if fewest is not None:
        return fewest
    raise NoTunedKernel(f"no dkdv90_wide tile fits {gpu.key} for {problem.text}: {reason}")


def _leaves_registers(spec: KernelSpec, held: int, given: int) -> bool:
    """Whether the features of a kernel, if it has some that need registers, find them."""
    need = warpgroup_feature_registers(spec)
    return not need or held + need <= given


def _widest(problem: Problem) -> int:
    widest = WIDEST_CAUSAL if problem.causal else WIDEST
    if problem.dropout:
        reads = problem.score_mod is not None and reads_pairs(problem.score_mod)
        return min(widest, WIDEST_DROPOUT_READS if reads else WIDEST_DROPOUT)
    return widest
