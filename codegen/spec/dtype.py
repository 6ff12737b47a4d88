"""Round to the floats of tensors, and widen them again.

NumPy has no bf16, so that both 16-bit floats travel as uint16 bits; fp32 travels as itself.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .problem import Dtype

Bits = NDArray[np.uint16 | np.float32]  # how a tensor of a dtype travels

# Largest relative error of rounding to nearest.
EPSILON: dict[Dtype, float] = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}


def stored_as(dtype: Dtype) -> np.dtype[np.uint16 | np.float32]:
    """The NumPy type in which tensors of `dtype` travel.

    >>> stored_as("bf16"), stored_as("fp32")
    (dtype('uint16'), dtype('float32'))
    """
    return np.dtype(np.float32 if dtype == "fp32" else np.uint16)


def round_to(values: ArrayLike, dtype: Dtype) -> Bits:
    """`values` rounded to nearest even, 16-bit floats as their bits.

    >>> hex(round_to(1.0, "bf16").item())
    '0x3f80'
    """
    single = np.asarray(values, np.float32)
    if dtype == "fp32":
        return single
    if dtype == "fp16":
        with np.errstate(over="ignore"):
            return single.astype(np.float16).view(np.uint16)
    bits = single.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(single), 0x7FC0, rounded).astype(np.uint16)


def widen(bits: Bits, dtype: Dtype) -> NDArray[np.float64]:
    """The values of what `round_to` gave, exactly.

    >>> widen(round_to([1.5, -2.0], "bf16"), "bf16").tolist()
    [1.5, -2.0]
    """
    if dtype == "fp32":
        return bits.astype(np.float64)
    if dtype == "fp16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
