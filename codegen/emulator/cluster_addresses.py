"""Find what addresses in the shared memory of a cluster name: a block, and an offset in it."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .access import Access
from .addresses import OFFSET_MASK, RANK_SHIFT
from .errors import EmulatorError

Array: TypeAlias = "NDArray[Any]"


def map_to_rank(access: Access, address: Array, rank: Array, lanes: Array | None, at: int) -> Array:
    """mapa.shared::cluster: the same place in the shared memory of the block of a rank."""
    ranks = np.broadcast_to(rank, access.n).astype("i8")
    size = access.batch.cluster_blocks
    wrong = np.flatnonzero(ranks[access.active(lanes)] >= size)
    if wrong.size:
        number = int(ranks[access.active(lanes)][wrong[0]])
        access.fail(EmulatorError, at, lanes, int(wrong[0]), f"rank {number} in a cluster of {size} blocks")
    offset = np.broadcast_to(address, access.n).astype("i8") & OFFSET_MASK
    mapped: Array = (offset | ranks + 1 << RANK_SHIFT).astype("u4")
    return mapped


def blocks_of_mask(access: Access, mask: int, lane: int, at: int) -> list[int]:
    """The blocks that the bits of a multicast's mask name."""
    batch = access.batch
    own = int(batch.block_of[access.low + lane])
    if not mask or mask >> batch.cluster_blocks:
        text = f"the mask {mask:#x} does not name blocks of a cluster of {batch.cluster_blocks}"
        access.fail(EmulatorError, at, np.array([lane]), 0, text)
    first = own - own % batch.cluster_blocks
    return [first + rank for rank in range(batch.cluster_blocks) if mask >> rank & 1]


def check_alive(access: Access, blocks: Array, lanes: Array | None, at: int) -> None:
    """The shared memory of a block is gone when its last thread has exited."""
    own = access.batch.block_of[access.active(lanes) + access.low]
    for k in np.flatnonzero(blocks != own).tolist():
        if not access.batch.living_threads(int(blocks[k])):
            rank = int(blocks[k]) % access.batch.cluster_blocks
            access.fail(EmulatorError, at, lanes, k, f"block {rank} of the cluster has exited")
