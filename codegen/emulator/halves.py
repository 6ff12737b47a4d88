"""Convert between float32 and tf32 or 16-bit floats, and compute with 16-bit floats alone or in pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .rounding import sum_to_odd

Array: TypeAlias = "NDArray[Any]"

F16_TO_F32: Array = np.arange(1 << 16, dtype="u2").view("f2").astype("f4")
_SIXTEEN = np.array(16, "u4")
_ONE = np.array(1, "u4")
_BELOW_HALF = np.array(0x7FFF, "u4")
_UPPER = np.array(0xFFFF0000, "u4")
_HALF_OF_TF32 = np.array(0x1000, "u4")
_TF32 = np.array(0xFFFFE000, "u4")
_NAN = np.array(0x7FFFFFFF, "u4")


def widened_half(bits: Array, brain: bool) -> Array:
    """float32 values of 16-bit floats given as bits."""
    if brain:
        wide: Array = np.left_shift(bits.astype("u4"), 16)
        return wide.view("f4")
    return F16_TO_F32.take(bits)


def _f16_bits(x: Array) -> Array:
    return x.astype("f2").view("u2")


def _bf16_bits(x: Array) -> Array:
    return np.right_shift(_rounded_bf16(x), _SIXTEEN).astype("u2")


def _rounded_bf16(x: Array) -> Array:
    """float32 bits rounded to nearest even at bit 16; the lower half is left to be cut off."""
    bits = x.view("u4")
    rounded = np.right_shift(bits, _SIXTEEN)
    rounded = np.bitwise_and(rounded, _ONE)
    rounded = np.add(rounded, _BELOW_HALF)
    rounded = np.add(rounded, bits)
    missing = np.isnan(x)
    return np.where(missing, np.uint32(0x7FFF0000), rounded) if missing.any() else rounded


def pack_f16(high: Array, low: Array, out: Array) -> None:
    """Two float32 as a pair of fp16."""
    low_bits, high_bits = _f16_bits(low), _f16_bits(high)  # before anything is written: out may be one of both
    pair = out.view("u2").reshape(-1, 2)
    pair[:, 0] = low_bits
    pair[:, 1] = high_bits


def pack_bf16(high: Array, low: Array, out: Array) -> None:
    """Two float32 as a pair of bf16."""
    upper = np.bitwise_and(_rounded_bf16(high), _UPPER)
    np.bitwise_or(upper, np.right_shift(_rounded_bf16(low), _SIXTEEN), out)


def to_f16(x: Array, out: Array) -> None:
    """float32 or float64 to fp16 bits, to nearest even."""
    np.copyto(out, _f16_bits(x))


def to_bf16(x: Array, out: Array) -> None:
    """float32 to bf16 bits, to nearest even."""
    np.copyto(out, _bf16_bits(x))


def to_tf32(x: Array, out: Array) -> None:
    """float32 to tf32 bits in the upper 19 of 32: to nearest, ties away from zero. The others become 0.

    The PTX manual leaves them open; a kernel that wants tf32 as a float32 clears them itself.
    """
    rounded = np.bitwise_and(np.add(x.view("u4"), _HALF_OF_TF32), _TF32)
    finite = np.isfinite(x)
    np.copyto(out, rounded if finite.all() else np.where(finite, rounded, np.where(np.isnan(x), _NAN, x.view("u4"))))


def to_f16_rz(x: Array, out: Array) -> None:
    """float32 to fp16 bits, towards zero; what is too large becomes the largest finite number."""
    x = np.atleast_1d(x)
    nearest = x.astype("f2")
    beyond = np.abs(nearest.astype("f8")) > np.abs(x.astype("f8"))
    np.copyto(out, np.where(beyond, nearest.view("u2") - np.uint16(1), nearest.view("u2")))


def to_bf16_rz(x: Array, out: Array) -> None:
    """float32 to bf16 bits, towards zero."""
    x = np.atleast_1d(x)
    cut = np.right_shift(x.view("u4"), _SIXTEEN)
    np.copyto(out, np.where(np.isnan(x), np.uint32(0x7FFF), cut), casting="unsafe")


def pack_f16_rz(high: Array, low: Array, out: Array) -> None:
    """Two float32 as a pair of fp16, towards zero."""
    _pack_with(to_f16_rz, high, low, out)


def pack_bf16_rz(high: Array, low: Array, out: Array) -> None:
    """Two float32 as a pair of bf16, towards zero."""
    _pack_with(to_bf16_rz, high, low, out)


def _pack_with(convert: Callable[[Array, Array], None], high: Array, low: Array, out: Array) -> None:
    pair = np.empty((out.size, 2), "u2")
    convert(low, pair[:, 0])
    convert(high, pair[:, 1])
    np.copyto(out, pair.view("u4").reshape(-1))


def integer_to_f16(x: Array, out: Array) -> None:
    """An integer to fp16 bits: float64 holds every integer that fp16 does not already round to infinity."""
    np.copyto(out, _f16_bits(np.atleast_1d(x).astype("f8")))


# ---- arithmetic


def _spread(value: Array, out: Array) -> Array:
    """16-bit pieces of an operand, one for each piece of the result."""
    return np.ascontiguousarray(np.broadcast_to(value, out.shape)).view("u2")


def _half_operation(operation: Callable[..., Array]) -> Callable[..., None]:
    def compute(out: Array, brain: bool, *values: Array) -> None:
        wide = [widened_half(_spread(value, out), brain) for value in values]
        result = np.asarray(operation(*wide))
        # for one rounding in all, what float64 knows beyond float32 is folded into an odd last bit
        bits = _bf16_bits(_to_f32_odd(result)) if brain else _f16_bits(result)
        np.copyto(out, bits.view(out.dtype))

    return compute


def _to_f32_odd(x: Array) -> Array:
    if x.dtype == np.float32:
        return x
    nearest = x.astype("f4")
    back = nearest.astype("f8")
    bits = nearest.view("i4")
    inexact = (back != x) & np.isfinite(back) & (bits & 1 == 0)
    step = np.where((np.abs(x) > np.abs(back)), 1, -1).astype("i4")
    return np.where(inexact, bits + step, bits).astype("i4").view("f4")


def _fma(a: Array, b: Array, c: Array) -> Array:
    return sum_to_odd(a.astype("f8") * b.astype("f8"), c.astype("f8"))


half_add = _half_operation(np.add)
half_sub = _half_operation(np.subtract)
half_mul = _half_operation(np.multiply)
half_fma = _half_operation(_fma)
half_mad = half_fma
half_min = _half_operation(np.minimum)
half_max = _half_operation(np.maximum)
half_number_min = _half_operation(np.fmin)
half_number_max = _half_operation(np.fmax)
half_exp2 = _half_operation(np.exp2)
half_tanh = _half_operation(np.tanh)


def half_flushed(function: Callable[..., None], out: Array, *values: Array) -> None:
    """An fp16 operation with .ftz: subnormal operands and results become zeros of their sign."""
    function(out, False, *[_flushed_f16(_spread(value, out)).view(out.dtype) for value in values])
    out.view("u2")[...] = _flushed_f16(np.ascontiguousarray(out).view("u2"))


def _flushed_f16(bits: Array) -> Array:
    return np.where(bits & np.uint16(0x7C00), bits, bits & np.uint16(0x8000))
