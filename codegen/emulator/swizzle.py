"""Swizzle shared addresses: 16-byte chunks within a span are permuted by the number of their 128-byte line."""

from __future__ import annotations

from typing import Any, TypeAlias

from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"

SPANS = (0, 32, 64, 128)
"""Bytes within which chunks are permuted; 0 stands for no swizzle."""


def swizzled(address: Array, span: int) -> Array:
    """Where bytes that belong at these shared addresses really lie.

    >>> import numpy as np
    >>> swizzled(np.array([0, 128, 144, 1024]), 128).tolist()
    [0, 144, 128, 1024]
    """
    if not span:
        return address
    return address ^ ((address >> 7 & (span // 16 - 1)) << 4)
