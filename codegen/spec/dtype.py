"""Round to the 16-bit floats of tensors, and widen them again. NumPy has no bf16, so both travel as uint16 bits."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .problem import Dtype

EPSILON: dict[Dtype, float] = {"bf16": 2.0**-8, "fp16": 2.0**-11}  # largest relative error of rounding to nearest


def round_to(values: ArrayLike, dtype: Dtype) -> NDArray[np.uint16]:
    """The bits of `values` rounded to nearest even.

    >>> hex(round_to(1.0, "bf16").item())
    '0x3f80'
    """
    single = np.asarray(values, np.float32)
    if dtype == "fp16":
        with np.errstate(over="ignore"):
            return single.astype(np.float16).view(np.uint16)
    bits = single.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(single), 0x7FC0, rounded).astype(np.uint16)


def widen(bits: NDArray[np.uint16], dtype: Dtype) -> NDArray[np.float64]:
    """The values of 16-bit floats, exactly.

    >>> widen(round_to([1.5, -2.0], "bf16"), "bf16").tolist()
    [1.5, -2.0]
    """
    if dtype == "fp16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
