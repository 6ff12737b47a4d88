"""Compute the special registers of PTX for all threads of a batch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .batch import Batch

Array: TypeAlias = "NDArray[Any]"

_OF_CLUSTERS = ("clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")

SPECIAL = frozenset(
    [f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid", *_OF_CLUSTERS) for axis in "xyz"]
    + [f"%lanemask_{relation}" for relation in ("eq", "lt", "le", "gt", "ge")]
    + ["%cluster_ctarank", "%cluster_nctarank"]
    + ["%laneid", "%warpid", "%nwarpid", "%dynamic_smem_size", "%total_smem_size"]
)
"""The ones that are implemented; clocks and processor numbers are not."""


def special_register(batch: Batch, name: str) -> Array:
    """Values of one of `SPECIAL` as unsigned 32-bit integers."""
    thread = batch.thread_in_block
    x, y, _ = batch.block_size
    base, _, axis = name.partition(".")
    if axis:
        index = "xyz".index(axis)
        if base == "%tid":
            return (thread % x, thread // x % y, thread // (x * y))[index].astype("u4")
        if base == "%ctaid":
            return batch.block_ids[batch.block_of, index].astype("u4")
        if "cluster" in base:
            return _of_cluster(batch, base, index)
        return _filled(batch, (batch.block_size if base == "%ntid" else batch.grid)[index])
    if base == "%cluster_ctarank":
        return (batch.block_of % batch.cluster_blocks).astype("u4")
    if base == "%cluster_nctarank":
        return _filled(batch, batch.cluster_blocks)
    if base.startswith("%lanemask"):
        return _lane_mask(thread & np.uint32(31), base[-2:])
    if base == "%laneid":
        return thread & np.uint32(31)
    if base == "%warpid":
        return thread >> np.uint32(5)
    if base == "%nwarpid":
        return _filled(batch, -(-math.prod(batch.block_size) // 32))
    total = batch.shared_bytes
    return _filled(batch, total if base == "%total_smem_size" else total - batch.program.shared.dynamic_offset)


def _of_cluster(batch: Batch, base: str, index: int) -> Array:
    """Registers that speak of the cluster along one axis."""
    size = batch.cluster[index]
    if base == "%clusterid":
        return (batch.block_ids[batch.block_of, index] // size).astype("u4")
    if base == "%cluster_ctaid":
        return (batch.block_ids[batch.block_of, index] % size).astype("u4")
    return _filled(batch, size if base == "%cluster_nctaid" else batch.grid[index] // size)


def _filled(batch: Batch, value: int) -> Array:
    return np.full(batch.threads, max(value, 0), "u4")


def _lane_mask(lane: Array, relation: str) -> Array:
    one = np.left_shift(np.uint32(1), lane)
    below = one - np.uint32(1)
    return {"eq": one, "lt": below, "le": one | below, "gt": ~(one | below), "ge": ~below}[relation]
