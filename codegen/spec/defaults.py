"""Give every kernel a tile by arithmetic, and the tiles that others have published."""

from __future__ import annotations

from typing import Literal

from .backward_defaults import default_key_block, default_query_block, published_key_block
from .forward_defaults import default_forward, published_forward, short_forward
from .gpu import Gpu
from .kernel import KernelName
from .limits import check_dtype
from .problem import Problem
from .tile import RowTile, Tile
from .warpgroup_defaults import (
    default_warpgroup,
    default_warpgroup_keys,
    default_warpgroup_query,
    default_warpgroup_wide,
)


def default_tile(kernel: KernelName, problem: Problem, gpu: Gpu, *, spilling: bool = False) -> Tile:
    """A tile that fits `gpu`, chosen without compiling anything.

    With `spilling` the best by the same arithmetic, even where ptxas is known to spill a few registers: it may be
    faster all the same, so a search tries it.

    Raises BadProblem for a dtype that the GPU does not multiply, NoTunedKernel where no tile fits it.
    """
    check_dtype(problem.dtype, gpu)
    if kernel in ("forward", "partial"):
        return short_forward(problem, gpu) or default_forward(problem, gpu, spilling=spilling)
    if kernel == "forward90":
        return default_warpgroup(problem, gpu)
    if kernel in ("fused90", "convert90", "dkdv90"):
        return default_warpgroup_keys("dkdv90" if kernel == "dkdv90" else "fused90", problem, gpu)
    if kernel == "dkdv90_wide":
        return default_warpgroup_wide(problem, gpu)
    if kernel == "dq90":
        return default_warpgroup_query(problem, gpu)
    if kernel == "dq":
        return default_query_block(problem, gpu, spilling=spilling)
    if kernel in ("delta", "combine"):
        return RowTile()
    of: Literal["fused", "dkdv"] = "dkdv" if kernel == "dkdv" else "fused"  # convert reads what fused accumulates
    return default_key_block(of, problem, gpu, spilling=spilling)


def published_tiles(kernel: KernelName, problem: Problem, gpu: Gpu) -> tuple[Tile, ...]:
    """Tiles that FlashAttention-2 and -3 use, as far as this kernel can express them; they may not fit."""
    if kernel == "forward":
        return tuple(published_forward(problem.d, problem.causal, gpu))
    if kernel in ("fused", "dkdv"):
        return tuple(published_key_block(problem.d, gpu))
    return ()
