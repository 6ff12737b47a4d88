"""List the tiles that fp32 inputs are tried with, best first: rows are twice as long, and sums as wide as ever."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from .tile import ForwardTile, KeyBlockTile, QueryBlockTile

# Br, warps, min_blocks. In a warp of 32 rows what was split of K and V is multiplied twice. With wide heads eight warps
# spill.
_FORWARDS = ((128, 4, 2), (64, 4, 2), (128, 8, 1))
_WIDE_FORWARDS = ((64, 4, 1),)


def forwards_of_fp32(d: int, fast: bool) -> Iterator[ForwardTile]:
    """Tiles of `forward`. All of Q is read again for each tile of keys: it would have to be split again anyway."""
    for least, (Br, warps, min_blocks) in product((48, 32, 16), _FORWARDS if d <= 128 else _WIDE_FORWARDS):
        for Bc in range(64, least - 1, -32 if warps == 8 else -16):
            yield ForwardTile(Br=Br, Bc=Bc, warps=warps, lazy=fast, min_blocks=min_blocks)


def key_blocks_of_fp32(d: int, fast: bool) -> Iterator[KeyBlockTile]:
    """Tiles of `dkdv`: from d = 72 on the registers of a warp hold half of the columns of dK and dV, or few keys."""

    def tile(Br: int, Bc: int, warps: int, row_split: int = 1, stages: int = 1, min_blocks: int = 1) -> KeyBlockTile:
        return KeyBlockTile(
            Br=Br, Bc=Bc, warps=warps, row_split=row_split, stages=stages, weave=False, min_blocks=min_blocks
        )  # fmt: skip

    if d <= 64:
        yield tile(32, 64, 4, stages=2, min_blocks=2)
        yield tile(32, 64, 4, stages=2)
    if fast:
        yield tile(32, 64, 8, row_split=2, stages=2)
        yield tile(32, 32, 4, row_split=2, min_blocks=2)
    if d <= 128:
        yield tile(16, 64, 4)
    yield tile(32, 32, 4, row_split=2)
    yield tile(32, 16, 2, row_split=2)


def query_blocks_of_fp32() -> Iterator[QueryBlockTile]:
    """Tiles of `dq`: two blocks an SM, or two buffers."""
    for Br, Bc, warps, stages, min_blocks in (
        (64, 32, 4, 1, 2), (64, 32, 4, 2, 1), (64, 16, 4, 2, 2), (64, 16, 4, 2, 1), (64, 16, 4, 1, 1),
        (32, 16, 2, 1, 1),
    ):  # fmt: skip
        yield QueryBlockTile(Br=Br, Bc=Bc, warps=warps, stages=stages, weave=False, min_blocks=min_blocks)
