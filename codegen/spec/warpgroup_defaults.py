"""Give the kernels of warpgroups a tile by arithmetic."""

from __future__ import annotations

from ..errors import NoTunedKernel
from .gpu import Gpu
from .kernel import KernelSpec
from .limits import why_illegal
from .problem import Problem
from .tile import WarpgroupTile

WIDEST = 176  # keys of a tile; a mask wastes half of the tiles on the diagonal, so that there they are narrower
WIDEST_CAUSAL = 128


def default_warpgroup(problem: Problem, gpu: Gpu) -> WarpgroupTile:
    """Two warpgroups that take turns, two buffers, and the widest tile of keys that fits.

    At d = dv = 128 and 256 without a mask these are the tiles of FlashAttention-3.

    Raises NoTunedKernel where none fits, as on every part but those of sm_90.
    """
    reason = None
    for Bc in range(WIDEST_CAUSAL if problem.causal else WIDEST, 0, -16):
        tile = WarpgroupTile(Br=128, Bc=Bc, pingpong=True)
        reason = why_illegal(KernelSpec.of("forward90", problem, tile, gpu.sm), gpu)
        if reason is None:
            return tile
    raise NoTunedKernel(f"no forward90 tile fits {gpu.key} for {problem.text}: {reason}")
