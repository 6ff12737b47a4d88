"""Find the 16-byte chunks of shared memory that the matrix descriptor of a wgmma operand names.

Bits 0-13 of a descriptor are the start address, 16-29 the leading and 32-45 the stride offset, all in units of 16
bytes; bits 62-63 are the swizzle: 0 none, 1 128 bytes, 2 64, 3 32. An operand is MN x 16 numbers of 16 bits.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .swizzle import swizzled

Array: TypeAlias = "NDArray[Any]"

_SPANS = (0, 128, 64, 32)
_BASE_OFFSET = 49


def descriptor_is_plain(descriptors: Array) -> bool:
    """Whether all have the same swizzle and none a base offset, which is all that is implemented."""
    spans = descriptors >> np.uint64(62)
    return bool((spans == spans[0]).all()) and not bool((descriptors >> np.uint64(_BASE_OFFSET) & np.uint64(7)).any())


def starts_off_pattern(descriptors: Array) -> bool:
    """Whether one starts in the middle of the eight lines after which its swizzle repeats, and has no base offset."""
    span = _SPANS[int(descriptors[0] >> np.uint64(62))]
    lines = max(span // 16, 1) - 1
    return bool((descriptors >> np.uint64(3) & np.uint64(lines)).any())


def chunk_addresses(descriptors: Array, extent: int, transposed: bool) -> Array:
    """Shared addresses of the chunks of operands that are `extent` x 16.

    K-major operands have two chunks for each of their rows: [operands, extent, 2]. Transposed ones, whose numbers lie
    side by side along MN, have a row of chunks for each k: [operands, 16, extent / 8].
    """
    fields = [(descriptors >> np.uint64(shift) & np.uint64(0x3FFF)).astype("i8") << 4 for shift in (0, 16, 32)]
    start, leading, stride = (field[:, None, None] for field in fields)
    span = _SPANS[int(descriptors[0] >> np.uint64(62))]
    width = span or 16
    if transposed:
        k, chunk = np.arange(16)[:, None], np.arange(extent // 8)
        if span:
            # columns of `span` bytes, one after the other at the leading offset; the stride is between groups of 8 k
            per_span = span // 16
            address = start + k % 8 * width + k // 8 * stride + chunk % per_span * 16 + chunk // per_span * leading
        else:
            address = start + k % 8 * width + k // 8 * leading + chunk * stride
    else:
        row, chunk = np.arange(extent)[:, None], np.arange(2)
        address = start + row // 8 * stride + row % 8 * width + chunk * (16 if span else leading)
    return swizzled(address, span)
