"""Say which block works on what: the order in which the blocks of a masked kernel start, and why there is a choice."""

from __future__ import annotations

from .gpu import GPUS
from .kernel import MASKED, KernelSpec
from .problem import ELEMENT_BYTES
from .tile import ALL_HEADS, GROUPED, HEAD_BY_HEAD, KeyBlockTile, RowTile, WarpgroupKeyTile, WarpgroupWideTile

_OF_KEYS = (KeyBlockTile, WarpgroupKeyTile, WarpgroupWideTile)  # tiles of kernels whose blocks own keys


def head_by_head(spec: KernelSpec) -> bool:
    """Whether the blocks of a head are neighbours. Without a mask they always are: they then share K and V best."""
    return not spec.causal or in_line(spec) or getattr(spec.tile, "order", HEAD_BY_HEAD) == HEAD_BY_HEAD


def in_line(spec: KernelSpec) -> bool:
    """Whether a kernel has one order, head by head: `partial`, and the forward that packs heads."""
    return spec.kernel == "partial" or getattr(spec.tile, "packed", False)


def cached_keys(spec: KernelSpec) -> int:
    """Keys whose K and V fill half of the L2 cache: what the blocks of `forward` and `dq` share."""
    return _half_l2(spec) // _row_bytes(spec)


def cached_queries(spec: KernelSpec) -> int:
    """Query rows whose Q and dO fill half of the L2 cache, if need be their sums of dQ too: what key blocks share."""
    return _half_l2(spec) // (_row_bytes(spec) + (4 * spec.d if spec.kernel in ("fused", "fused90") else 0))


def _row_bytes(spec: KernelSpec) -> int:
    """Bytes of a row of K and of V, or of Q and of dO."""
    return ELEMENT_BYTES[spec.dtype] * (spec.d + spec.dv)


def _half_l2(spec: KernelSpec) -> int:
    """Bytes, of the part with that `sm` whose L2 cache is smallest."""
    return int(min((gpu.l2_mb for gpu in GPUS.values() if gpu.sm == spec.sm), default=4) * 2**20) // 2


def heads_together(spec: KernelSpec, Hq: int, Hk: int, Nq: int, Nk: int) -> int:
    """Heads whose blocks are launched tile by tile when they are grouped: those that share half of the L2 cache.

    Query heads in forward and dq; key heads, whose blocks read all query heads of their group, in fused and dkdv.
    """
    if isinstance(spec.tile, _OF_KEYS):
        return max(1, cached_queries(spec) // (Nq * (Hq // Hk)))
    return max(1, cached_keys(spec) // Nk) * (Hq // Hk)


def launch_order(spec: KernelSpec, heads: int, group: int, tiles: int) -> list[tuple[int, int]]:
    """(head of all, tile) of each block, as `place` in the text: with a mask the longest loops of a group come first.

    `heads` in all batches, and `group` of them together; `tiles` of a head.

    >>> from .tile import ForwardTile
    >>> tile = ForwardTile(Br=64, Bc=64, warps=4)
    >>> spec = KernelSpec(kernel="forward", dtype="bf16", d=64, causal=True, tile=tile, sm=80)
    >>> launch_order(spec, heads=3, group=1, tiles=2)
    [(0, 1), (0, 0), (1, 1), (1, 0), (2, 1), (2, 0)]
    >>> launch_order(spec, heads=3, group=2, tiles=2)
    [(0, 1), (1, 1), (2, 1), (0, 0), (1, 0), (2, 0)]
    """
    # Late queries see most keys; early keys are seen by most queries.
    in_head = range(tiles)[:: -1 if spec.causal and not isinstance(spec.tile, _OF_KEYS) else 1]
    if head_by_head(spec):
        return [(head, tile) for head in range(heads) for tile in in_head]
    together = heads if spec.tile.order == ALL_HEADS else min(group, heads)  # type: ignore[union-attr]
    first_heads = range(0, heads - heads % together, together)
    ends = (*first_heads[1:], heads)  # the last group takes the rest as well
    groups = (range(first, end) for first, end in zip(first_heads, ends, strict=True))
    return [(head, tile) for members in groups for tile in in_head for head in members]


def deal(tiles: int, blocks: int) -> list[list[int]]:
    """The tiles of each block that works on one after another, by their numbers: `dealt` in the text.

    >>> deal(tiles=7, blocks=3)
    [[0, 5, 6], [1, 4], [2, 3]]
    """
    rounds = [range(first, first + blocks)[:: -1 if n % 2 else 1] for n, first in enumerate(range(0, tiles, blocks))]
    return [[tile for tile in places if tile < tiles] for places in zip(*rounds, strict=True)]


def why_bad_order(spec: KernelSpec) -> str | None:
    """The rule that a tile's order breaks, as a sentence; None if it breaks none."""
    tile = spec.tile
    if isinstance(tile, RowTile):
        return None
    if tile.order not in (HEAD_BY_HEAD, GROUPED, ALL_HEADS):
        return f"order={tile.order}: must be {HEAD_BY_HEAD}, {GROUPED} or {ALL_HEADS}."
    usual = type(tile).__dataclass_fields__["order"].default
    if spec.kernel in MASKED and not spec.causal and tile.order != usual:
        return f"order={tile.order}: without a mask all loops are equally long. Leave order={usual}."
    if in_line(spec) and tile.order != usual:
        return f"order={tile.order}: where heads are packed or keys are parted there is one order. Leave order={usual}."
    return None
