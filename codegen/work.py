"""Count what one launch does: tiles that its blocks walk over, FLOPs, bytes."""

from __future__ import annotations

from .run import Sizes, dq_accumulator_floats, row_tiles, tiles_in_clusters
from .spec.backward_shape import padded_columns, value_columns
from .spec.kernel import CONVERTS, HOPPER, STATS, KernelName, KernelSpec
from .spec.order import head_by_head, heads_together, launch_order
from .spec.problem import ELEMENT_BYTES
from .spec.tile import (
    ForwardTile,
    KeyBlockTile,
    QueryBlockTile,
    WarpgroupKeyTile,
    WarpgroupQueryTile,
    WarpgroupTile,
    WarpgroupWideTile,
)
from .spec.warpgroup_shape import PANEL, panels

# Tiles by what their blocks own: query rows, so that they walk the keys, or keys.
OwnsQueries = ForwardTile | QueryBlockTile | WarpgroupTile | WarpgroupQueryTile
OwnsKeys = KeyBlockTile | WarpgroupKeyTile | WarpgroupWideTile

# Matrix products of a kernel, with d and with dv columns: S, P V forward; S, dK, dQ, dP, dV backward, S and dP twice
# when it is split.
PRODUCTS: dict[KernelName, tuple[int, int]] = {
    "forward": (1, 1), "partial": (1, 1), "fused": (3, 2), "dkdv": (2, 2), "dq": (2, 1),
    "forward90": (1, 1), "fused90": (3, 2), "dkdv90": (2, 2), "dkdv90_wide": (2, 2), "dq90": (2, 1),
}  # fmt: skip


def tile_flops(spec: KernelSpec) -> float:
    """FLOPs that the tensor cores execute for one tile, masked or not.

    forward and partial end an odd d / 8 with a half step; the others pad d to whole blocks, and the kernels of
    warpgroups to what each product needs. A product of fp32 is three of TF32.
    """
    of_d, of_dv = PRODUCTS[spec.kernel]
    if spec.kernel in HOPPER:
        columns = _columns_of_warpgroups(spec)
    elif isinstance(spec.tile, ForwardTile):
        columns = of_d * spec.d + of_dv * spec.dv
    else:
        columns = of_d * padded_columns(spec) + of_dv * value_columns(spec)
    times = 3 if spec.fp32 else 1
    return columns * times * 2.0 * spec.tile.Br * spec.tile.Bc  # type: ignore[union-attr]


def _columns_of_warpgroups(spec: KernelSpec) -> int:
    """Columns of d and dv of all products: whole steps of 16 where they are added up; of a result, whole multiples of
    the 64 that a warpgroup computes where they are its rows."""
    d, dv = (_ceil(columns, spec.depth) * spec.depth for columns in (spec.d, spec.dv))  # of S and dP
    if isinstance(spec.tile, WarpgroupTile):
        return d + spec.dv
    if isinstance(spec.tile, WarpgroupQueryTile):
        return d + dv + spec.d
    if isinstance(spec.tile, WarpgroupWideTile):
        together = PANEL * spec.tile.consumers
        return d + dv + sum(_ceil(columns, together) * together for columns in (spec.d, spec.dv))
    return d + dv + spec.d + spec.dv + (PANEL * panels(spec.d) if spec.kernel == "fused90" else 0)


def tiles_per_block(spec: KernelSpec, sizes: Sizes) -> tuple[int, ...]:
    """Tiles that each block walks over, in launch order: of one head, or of all if their blocks are mixed."""
    return tuple(tiles for tiles, _ in _walks(spec, sizes))


def masked_share(spec: KernelSpec, sizes: Sizes) -> float:
    """Share of the tiles that hold a pair of query and key that is not visible, or not there."""
    walks = _walks(spec, sizes)
    return sum(masked for _, masked in walks) / max(1, sum(tiles for tiles, _ in walks))


def skipped_tiles(spec: KernelSpec, sizes: Sizes) -> tuple[int, int]:
    """Tiles of a head that no block walks over, because no query of theirs sees a key of theirs; and all of them.

    Of one K/V head in kernels that own keys. Sequences of different lengths count as long as the longest.
    """
    tile = spec.tile
    if spec.kernel not in PRODUCTS:
        return 0, 0
    if isinstance(tile, OwnsKeys):
        group = sizes.Hq // sizes.Hk
        walks = [_walk_queries(spec, sizes, tile, j) for j in range(_ceil(sizes.Nk, tile.Bc))]
        every = _ceil(sizes.Nk, tile.Bc) * _ceil(sizes.Nq, tile.Br) * group
    elif isinstance(tile, OwnsQueries):
        rows = _tiles_of_rows(tile, sizes)
        walks = [_walk_keys(spec, sizes, tile, i) for i in range(rows)]
        every = rows * _ceil(sizes.Nk, tile.Bc)
    else:
        return 0, 0
    return every - sum(tiles for tiles, _ in walks), every


def moved_bytes(spec: KernelSpec, sizes: Sizes) -> float:
    """Bytes that a kernel without matrix products reads and writes; that a forward does if it reads K and V once."""
    rows, row_bytes = sizes.B * sizes.Hq * sizes.Nq, ELEMENT_BYTES[spec.dtype] * spec.d
    value_bytes = ELEMENT_BYTES[spec.dtype] * spec.dv  # of a row of V or O
    O, parts = rows * (value_bytes + 8), rows * sizes.parts * (4 * spec.d + 8)  # with m and l
    if spec.kernel in ("forward", "partial", "forward90"):
        read = rows * row_bytes + sizes.B * sizes.Hk * sizes.Nk * (row_bytes + value_bytes)
        return read + (parts if spec.kernel == "partial" else O)
    if spec.kernel == "combine":
        return parts + O
    if spec.kernel == "delta":
        return rows * (2 * row_bytes + 8) + sizes.stats_rows * STATS * 4
    return dq_accumulator_floats(spec, sizes) * 4 + rows * row_bytes  # convert


def cleared_bytes(spec: KernelSpec, sizes: Sizes) -> float:
    """Bytes that are set to zero before the launch: the dQ accumulator of `fused`."""
    return dq_accumulator_floats(spec, sizes) * 4.0 if spec.kernel in CONVERTS.values() else 0.0


def loaded_bytes(spec: KernelSpec, tiles: int) -> float:
    """Bytes that TMA reads from L2 for so many tiles: of rows of K and V, or of Q and dO. Of others 0.

    Of a tile of K or V each block of a cluster reads its share.
    """
    return _copied_bytes(spec, tiles) / _cluster(spec)


def multicast_bytes(spec: KernelSpec, tiles: int) -> float:
    """Bytes that so many tiles bring to shared memory besides, which the other block of a cluster has read."""
    return _copied_bytes(spec, tiles) - loaded_bytes(spec, tiles)


def _copied_bytes(spec: KernelSpec, tiles: int) -> float:
    if spec.kernel not in HOPPER:
        return 0.0
    tile = spec.tile
    rows = tile.Bc if isinstance(tile, OwnsQueries) else tile.Br  # type: ignore[union-attr]
    return float(tiles * rows * (spec.d + spec.dv) * ELEMENT_BYTES[spec.dtype])


def _cluster(spec: KernelSpec) -> int:
    return spec.tile.cluster if isinstance(spec.tile, WarpgroupTile) else 1


def first_bytes(spec: KernelSpec) -> float:
    """Bytes that TMA reads before the first product of a block: its own rows, and those that they meet first."""
    if spec.kernel not in HOPPER:
        return 0.0
    rows = spec.tile.Br + spec.tile.Bc / _cluster(spec)  # type: ignore[union-attr]
    return float(ELEMENT_BYTES[spec.dtype] * spec.d * rows)


def reduced_bytes(spec: KernelSpec, tiles: int) -> float:
    """Bytes that bulk copies add to the sums of dQ in global memory for so many tiles of queries. Of others 0."""
    if spec.kernel != "fused90" or not spec.tile.bulk_sums:  # type: ignore[union-attr]
        return 0.0
    return 4.0 * tiles * spec.tile.Br * padded_columns(spec)  # type: ignore[union-attr]


def _walks(spec: KernelSpec, sizes: Sizes) -> list[tuple[int, int]]:
    """(tiles, masked ones among them) of each block, in launch order."""
    tile = spec.tile
    if isinstance(tile, OwnsKeys):
        heads, walks = sizes.Hk, [_walk_queries(spec, sizes, tile, j) for j in range(_ceil(sizes.Nk, tile.Bc))]
    elif spec.kernel == "partial" and isinstance(tile, ForwardTile):
        return _walks_of_parts(spec, sizes, tile)
    elif isinstance(tile, OwnsQueries):
        heads, walks = sizes.Hq, [_walk_keys(spec, sizes, tile, i) for i in range(_tiles_of_rows(tile, sizes))]
    else:
        return [(1, 0)]
    if head_by_head(spec):  # one is like the other
        return [walks[i] for _, i in launch_order(spec, 1, 1, len(walks))]
    together = heads_together(spec, sizes.Hq, sizes.Hk, max(1, sizes.Nq), max(1, sizes.Nk))
    return [walks[i] for _, i in launch_order(spec, sizes.B * heads, together, len(walks))]


def _tiles_of_rows(tile: OwnsQueries, sizes: Sizes) -> int:
    if isinstance(tile, WarpgroupTile):
        return tiles_in_clusters(tile, sizes)
    return row_tiles(tile, sizes) if isinstance(tile, ForwardTile) else _ceil(sizes.Nq, tile.Br)


def _walk_keys(spec: KernelSpec, sizes: Sizes, tile: OwnsQueries, i: int) -> tuple[int, int]:
    """Of the block that owns Q tile i: from the last tile that it sees to the first."""
    offset = _offset(spec, sizes)
    heads = sizes.Hq // sizes.Hk if isinstance(tile, ForwardTile) and tile.packed else 1  # rows of a query
    first, end = i * tile.Br // heads, _ceil((i + 1) * tile.Br, heads)  # of its queries
    seen = max(0, min(sizes.Nk, end + offset)) if spec.causal else sizes.Nk
    in_full = max(0, min(sizes.Nk, first + 1 + offset)) if spec.causal else sizes.Nk  # by its first row
    tiles = _ceil(seen, tile.Bc)
    if not spec.features.left:
        return tiles, tiles - in_full // tile.Bc
    far = offset - (sizes.right if spec.features.shifted else 0) - sizes.left  # row i sees keys from i + far on
    start, whole = max(0, first + far) // tile.Bc, max(0, _ceil(min(end, sizes.Nq) - 1 + far, tile.Bc))
    walked = max(0, tiles - start)
    return walked, walked - max(0, in_full // tile.Bc - max(start, whole))


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


def _walk_queries(spec: KernelSpec, sizes: Sizes, tile: OwnsKeys, j: int) -> tuple[int, int]:
    """Of the block that owns K/V tile j: from the first Q tile that sees it to the last, for each head of the group."""
    group, rows, offset = sizes.Hq // sizes.Hk, _ceil(sizes.Nq, tile.Br), _offset(spec, sizes)
    first = min(rows, max(0, j * tile.Bc - offset) // tile.Br) if spec.causal else 0
    last_key = (j + 1) * tile.Bc - 1
    if last_key >= sizes.Nk:
        masked = rows - first
    else:  # tiles whose first row does not see the last key
        in_full = min(rows, max(0, _ceil(last_key - offset, tile.Br))) if spec.causal else 0
        masked = max(0, in_full - first)
    if not spec.features.left:
        return group * (rows - first), group * masked
    far = offset - (sizes.right if spec.features.shifted else 0) - sizes.left  # row i sees keys from i + far on
    stop = min(rows, max(0, last_key - far + tile.Br) // tile.Br)  # the first tile without a row that sees the last key
    whole = max(0, j * tile.Bc - far + 1) // tile.Br  # tiles before it see the first key with every row
    walked = max(0, stop - first)
    return group * walked, group * (walked - max(0, min(stop, whole) - first - masked))


def _offset(spec: KernelSpec, sizes: Sizes) -> int:
    """The last key that query 0 sees, where a diagonal bounds what queries see: see features."""
    corner = 0 if spec.features.top_left else sizes.Nk - sizes.Nq
    return corner + (sizes.right if spec.features.shifted else 0)


def _ceil(n: int, step: int) -> int:
    return -(-n // step)
