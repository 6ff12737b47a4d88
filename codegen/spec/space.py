"""Name the tiles that a search may choose from: the values of each field, and the combinations that fit a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from typing import Any

from .backward_shape import slice_columns
from .defaults import default_tile
from .forward_defaults import SHORT, packs
from .gpu import Gpu
from .kernel import TILE_OF, KernelName, KernelSpec
from .limits import why_illegal
from .problem import Problem
from .tile import ALL_HEADS, GROUPED, HEAD_BY_HEAD, KeyBlockTile, QueryBlockTile, Tile
from .warpgroup_defaults import pairs

Choices = Mapping[str, Sequence[int]]  # of each field of a tile; a flag is 0 or 1


def choices(kernel: KernelName, problem: Problem, gpu: Gpu, *, measured: bool = False) -> Choices:
    """The values that each field of a kernel's tile may take, the default tile's among them.

    With `measured` also those that only a GPU can judge: what the L2 cache holds when the blocks of all heads are mixed
    is not predicted, and the direction of the walk changes what is by less than the error of a prediction.

    Sources: the tiles that FlashAttention-2 and -3, FlexAttention and Triton's tutorial publish or search, with Bc in
    steps of 16, since 80, 96, 112, 144 and 176 win on real parts.
    """
    default = default_tile(kernel, problem, gpu)
    allowed = {**_choices(kernel, problem), **_unseen_choices(kernel, problem, measured)}
    return {name: sorted({*values, int(getattr(default, name))}) for name, values in allowed.items()}


def _choices(kernel: KernelName, problem: Problem) -> Choices:
    steps = problem.d // 16
    if kernel == "forward":
        few = 0 < problem.Nq <= SHORT
        return {
            "Br": (16, 32, 64) if few else (64, 128, 192, 256), "Bc": tuple(range(16, 193, 16)),
            "warps": (1, 2, 4) if few else (4, 8, 12), "packed": (0, 1) if packs(problem) else (0,),
            "q_steps": tuple(sorted({0, steps // 2, steps})), "lazy": (0, 1), "min_blocks": (1, 2, 3),
        }  # fmt: skip
    if kernel == "forward90":
        return {
            "Br": (64, 128, 192), "Bc": tuple(range(32, 257, 16)), "p_smem": (0, 1),
            "cluster": (1, 2) if pairs(problem) else (1,),
        }  # fmt: skip
    if kernel == "dq90":
        return {"Br": (64, 128, 192), "Bc": tuple(range(16, 129, 16)), "overlap": (0, 1)}
    if kernel == "dkdv90_wide":
        return {"Bc": tuple(range(16, 129, 16)), "consumers": (2, 3), "overlap": (0, 1)}
    if kernel in ("fused90", "dkdv90"):
        fused = kernel == "fused90"
        return {
            "Br": tuple(range(16, 129, 16)), "Bc": (128,), "dS_stages": (1, 2) if fused else (),
            "bulk_sums": (0, 1) if fused else (),
        }  # fmt: skip
    if kernel == "dq":
        return {
            "Br": (32, 64, 128, 192, 256), "Bc": tuple(range(16, 129, 16)), "warps": (4, 8), "slice": (0, 16, 32),
            "stages": (1, 2), "q_regs": (0, 1), "weave": (0, 1), "min_blocks": (1, 2),
        }  # fmt: skip
    return {
        "Br": (32, 64, 128), "Bc": tuple(range(32, 161, 16)), "warps": (4, 8), "row_split": (1, 2, 4),
        "slice": (0, 16, 32), "stages": (1, 2), "v_regs": (0, 1), "weave": (0, 1), "min_blocks": (1, 2),
    }  # fmt: skip


def _unseen_choices(kernel: KernelName, problem: Problem, measured: bool) -> Choices:
    """The choices of fields whose effect a prediction sees in part, or not at all.

    Of kernels of warpgroups it does not see who waits for a copy: how many buffers there are is for a GPU to say.
    """
    orders: tuple[int, ...] = ()  # without a mask there is one, the default's
    if problem.ends:
        orders = (HEAD_BY_HEAD, GROUPED, ALL_HEADS) if measured else (GROUPED,)
    either = (0, 1) if measured else ()
    buffers = (1, 2) if measured else ()
    if kernel == "forward":
        return {"order": orders, "ascending": either}
    if kernel in ("fused90", "dkdv90"):
        return {"order": orders, "stages": buffers}
    if kernel == "dkdv90_wide":
        return {"order": orders, "stages": buffers, "dO_stages": buffers}
    if kernel == "dq90":
        return {"order": orders, "stages": buffers, "v_stages": buffers}
    if kernel == "forward90":
        stages = (*buffers, 3) if measured else ()
        return {"order": orders, "stages": stages, "pingpong": either, "early_k_wait": either, "overlap": either}
    return {"order": orders}


def legal_tiles(kernel: KernelName, problem: Problem, gpu: Gpu, *, measured: bool = False) -> tuple[Tile, ...]:
    """Every tile of the choices that breaks no limit, in the order of the choices; of two with one text, the first."""
    allowed = choices(kernel, problem, gpu, measured=measured)
    tiles = (tile_of(kernel, dict(zip(allowed, values, strict=True))) for values in product(*allowed.values()))
    return tuple(
        tile
        for tile in tiles
        if not _says_twice(tile) and not why_illegal(KernelSpec.of(kernel, problem, tile, gpu.sm), gpu)
    )


def _says_twice(tile: Tile) -> bool:
    """Whether a slice is all that a warp has, which slice=0 says too."""
    if not isinstance(tile, KeyBlockTile | QueryBlockTile) or not tile.slice:
        return False
    return tile.slice == slice_columns(replace(tile, slice=0))


def tile_of(kernel: KernelName, values: Mapping[str, int]) -> Tile:
    """The tile with these values; a flag may be given as 0 or 1."""
    kind = TILE_OF[kernel]
    flags = {f.name for f in fields(kind) if f.type in (bool, "bool")}
    exact: dict[str, Any] = {name: bool(value) if name in flags else value for name, value in values.items()}
    return kind(**exact)
