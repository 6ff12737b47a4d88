"""Count what one launch does: tiles that its blocks walk over, FLOPs, bytes."""

from __future__ import annotations

from .run import Sizes, dq_accumulator_floats, row_tiles
from .spec.backward_shape import padded_columns
from .spec.kernel import STATS, KernelName, KernelSpec
from .spec.order import head_by_head, heads_together, launch_order
from .spec.tile import ForwardTile, KeyBlockTile, QueryBlockTile

# Matrix products of a kernel: S, P V forward; S, dP, dV, dK, dQ backward, S and dP twice when it is split.
PRODUCTS: dict[KernelName, int] = {"forward": 2, "partial": 2, "fused": 5, "dkdv": 4, "dq": 3}


def tile_flops(spec: KernelSpec) -> float:
    """FLOPs that the tensor cores execute for one tile, masked or not.

    forward and partial end an odd d / 8 with a half step; the others pad d to whole blocks.
    """
    columns = spec.d if isinstance(spec.tile, ForwardTile) else padded_columns(spec)
    return PRODUCTS[spec.kernel] * 2.0 * spec.tile.Br * spec.tile.Bc * columns  # type: ignore[union-attr]


def tiles_per_block(spec: KernelSpec, sizes: Sizes) -> tuple[int, ...]:
    """Tiles that each block walks over, in launch order: of one head, or of all if their blocks are mixed."""
    return tuple(tiles for tiles, _ in _walks(spec, sizes))


def masked_share(spec: KernelSpec, sizes: Sizes) -> float:
    """Share of the tiles that hold a pair of query and key that is not visible, or not there."""
    walks = _walks(spec, sizes)
    return sum(masked for _, masked in walks) / max(1, sum(tiles for tiles, _ in walks))


def moved_bytes(spec: KernelSpec, sizes: Sizes) -> float:
    """Bytes that a kernel without matrix products reads and writes; that a forward does if it reads K and V once."""
    rows = sizes.B * sizes.Hq * sizes.Nq
    O, parts = rows * (2 * spec.d + 8), rows * sizes.parts * (4 * spec.d + 8)  # with m and l
    if spec.kernel in ("forward", "partial"):
        read = rows * 2 * spec.d + sizes.B * sizes.Hk * sizes.Nk * 2 * 2 * spec.d
        return read + (O if spec.kernel == "forward" else parts)
    if spec.kernel == "combine":
        return parts + O
    if spec.kernel == "delta":
        return rows * (2 * 2 * spec.d + 8) + sizes.stats_rows * STATS * 4
    return dq_accumulator_floats(spec, sizes) * 4 + rows * spec.d * 2  # convert


def cleared_bytes(spec: KernelSpec, sizes: Sizes) -> float:
    """Bytes that are set to zero before the launch: the dQ accumulator of `fused`."""
    return dq_accumulator_floats(spec, sizes) * 4.0 if spec.kernel == "fused" else 0.0


def _walks(spec: KernelSpec, sizes: Sizes) -> list[tuple[int, int]]:
    """(tiles, masked ones among them) of each block, in launch order."""
    tile = spec.tile
    if isinstance(tile, KeyBlockTile):
        heads, walks = sizes.Hk, [_walk_queries(spec, sizes, tile, j) for j in range(_ceil(sizes.Nk, tile.Bc))]
    elif spec.kernel == "partial" and isinstance(tile, ForwardTile):
        return _walks_of_parts(spec, sizes, tile)
    elif isinstance(tile, ForwardTile):
        heads, walks = sizes.Hq, [_walk_keys(spec, sizes, tile, i) for i in range(row_tiles(tile, sizes))]
    elif isinstance(tile, QueryBlockTile):
        heads, walks = sizes.Hq, [_walk_keys(spec, sizes, tile, i) for i in range(_ceil(sizes.Nq, tile.Br))]
    else:
        return [(1, 0)]
    if head_by_head(spec):  # one is like the other
        return [walks[i] for _, i in launch_order(spec, 1, 1, len(walks))]
    together = heads_together(spec, sizes.Hq, sizes.Hk, max(1, sizes.Nq), max(1, sizes.Nk))
    return [walks[i] for _, i in launch_order(spec, sizes.B * heads, together, len(walks))]


def _walk_keys(spec: KernelSpec, sizes: Sizes, tile: ForwardTile | QueryBlockTile, i: int) -> tuple[int, int]:
    """Of the block that owns Q tile i: from the last tile that it sees to the first."""
    offset = sizes.Nk - sizes.Nq
    heads = sizes.Hq // sizes.Hk if isinstance(tile, ForwardTile) and tile.packed else 1  # rows of a query
    first, end = i * tile.Br // heads, _ceil((i + 1) * tile.Br, heads)  # of its queries
    seen = max(0, min(sizes.Nk, end + offset)) if spec.causal else sizes.Nk
    in_full = max(0, min(sizes.Nk, first + 1 + offset)) if spec.causal else sizes.Nk  # by its first row
    tiles = _ceil(seen, tile.Bc)
    return tiles, tiles - in_full // tile.Bc


def _walks_of_parts(spec: KernelSpec, sizes: Sizes, tile: ForwardTile) -> list[tuple[int, int]]:
    """Of `partial`: part by part, all heads; the tiles that a block's rows see are shared out from the first on."""
    heads = sizes.B * (sizes.Hk if tile.packed else sizes.Hq)
    in_head = [_walk_keys(spec, sizes, tile, i) for i in reversed(range(row_tiles(tile, sizes)))]
    walks = []
    for part in range(sizes.parts):
        for seen, masked in in_head * heads:
            share = _ceil(seen, sizes.parts)
            first = min(part * share, seen)
            tiles = min(share, seen - first)
            walks.append((tiles, max(0, first + tiles - max(first, seen - masked))))
    return walks


def _walk_queries(spec: KernelSpec, sizes: Sizes, tile: KeyBlockTile, j: int) -> tuple[int, int]:
    """Of the block that owns K/V tile j: from the first Q tile that sees it to the last, for each head of the group."""
    group, rows, offset = sizes.Hq // sizes.Hk, _ceil(sizes.Nq, tile.Br), sizes.Nk - sizes.Nq
    first = min(rows, max(0, j * tile.Bc - offset) // tile.Br) if spec.causal else 0
    last_key = (j + 1) * tile.Bc - 1
    if last_key >= sizes.Nk:
        masked = rows - first
    else:  # tiles whose first row does not see the last key
        in_full = min(rows, max(0, _ceil(last_key - offset, tile.Br))) if spec.causal else 0
        masked = max(0, in_full - first)
    return group * (rows - first), group * masked


def _ceil(n: int, step: int) -> int:
    return -(-n // step)
