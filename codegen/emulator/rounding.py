"""Round as the hardware does: fused multiply-add once, flushes of subnormals, directed rounding, saturation."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"

_F4, _F8 = np.dtype("f4"), np.dtype("f8")
_ONE = np.array(1, "u4")  # arrays without dimensions are cheaper operands than Python's numbers
_SMALLEST_NORMAL = np.float32(2.0**-126)
# f32 drops the low 29 bits of a float64 significand; shifted left by 35 a tie has exactly its top bit set
_TIE_SHIFT = np.array(35, "u8")
_TIE = np.iinfo("i8").min
_SPLITTER = 2.0**27 + 1


def fma_f32(a: Array, b: Array, c: Array, out: Array) -> None:
    """out = a * b + c, rounded once.

    The product of two float32 is exact in float64. The sum is rounded to 53 bits and then to 24, which differs from
    one rounding only if the first rounding made or hid a tie, or if the result is subnormal: those lanes, rare, are
    done again with the first rounding to odd.
    """
    total = a.astype(_F8)
    total = np.multiply(total, b.astype(_F8))
    total = np.add(total, c.astype(_F8))
    if not total.ndim:
        total = np.full(out.shape, total)
    rounded = total.astype(_F4)
    shifted = np.left_shift(total.view("u8"), _TIE_SHIFT).view("i8")
    small = np.left_shift(rounded.view("u4"), _ONE)
    if shifted.min() == _TIE or small.min() <= 0x01000000:
        small = np.subtract(small, _ONE)  # zero becomes the largest number
        again = np.flatnonzero((shifted == _TIE) | (small < 0x01000000))
        if again.size:
            x, y, z = (np.broadcast_to(value, rounded.shape)[again].astype(_F8) for value in (a, b, c))
            rounded[again] = sum_to_odd(x * y, z).astype(_F4)
    np.copyto(out, rounded)


def sum_to_odd(p: Array, c: Array) -> Array:
    """p + c rounded to odd: an inexact sum gets its last bit set, which keeps every later rounding correct."""
    total = p + c
    back = total - p
    error = (p - (total - back)) + (c - back)
    bits = total.view("i8")
    inexact = (error != 0) & np.isfinite(total) & (bits & 1 == 0)
    outward = (error > 0) == (total > 0)
    return np.where(inexact, np.where(outward, bits + 1, bits - 1), bits).view("f8")


def fma_f64(a: Array, b: Array, c: Array, out: Array) -> None:
    """out = a * b + c in float64, rounded once (products that over- or underflow in their error term excepted)."""
    product = a * b
    upper_a, upper_b = a * _SPLITTER, b * _SPLITTER
    high_a, high_b = upper_a - (upper_a - a), upper_b - (upper_b - b)
    low_a, low_b = a - high_a, b - high_b
    low = ((high_a * high_b - product) + high_a * low_b + low_a * high_b) + low_a * low_b
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    corrected = total + sum_to_odd(np.atleast_1d(error), np.atleast_1d(low))
    np.copyto(out, np.where(np.isfinite(corrected), corrected, total))


def has_subnormal(x: Array) -> bool:
    """Whether a float32 array holds a subnormal number."""
    bits = np.left_shift(x.view("u4"), _ONE)
    bits = np.subtract(bits, _ONE)  # zero becomes the largest number
    return bool(bits.min() < 0x00FFFFFF)


def flush(x: Array) -> None:
    """Replace subnormal float32 by zeros of the same sign, in place."""
    if has_subnormal(x):
        np.multiply(x, np.abs(x) >= _SMALLEST_NORMAL, x)


def flushed(x: Array) -> Array:
    """The array with its subnormals replaced; itself if there are none."""
    return np.multiply(x, np.abs(x) >= _SMALLEST_NORMAL) if has_subnormal(x) else x


def exp2_flushed(x: Array, out: Array) -> None:
    """2^x without subnormal results."""
    normal = bool(x.min() >= -126.0)  # NaN is not; asked first because x may be out
    np.exp2(x, out)
    if not normal:
        flush(out)


def round_f64_to_f32(x: Array, out: Array, mode: str) -> None:
    """Directed rounding: rz towards zero, rm down, rp up."""
    nearest = np.atleast_1d(x).astype("f4")
    back = nearest.astype("f8")
    down = np.nextafter(nearest, np.float32(-np.inf))
    up = np.nextafter(nearest, np.float32(np.inf))
    lower = np.where(back > x, down, nearest)
    upper = np.where(back < x, up, nearest)
    np.copyto(out, {"rm": lower, "rp": upper, "rz": np.where(np.asarray(x) > 0, lower, upper)}[mode])


def float_to_integer(x: Array, low: int, high: int, out: Array) -> None:
    """An integral float as an integer; out of range saturates, NaN becomes 0 (the largest negative for 64 bits)."""
    inside = np.clip(np.atleast_1d(x).astype("f8"), float(low), float(high))
    missing = np.isnan(inside)
    wide = np.where(missing | (inside >= float(high)), 0.0, inside)
    # float(high) of a 64-bit type is 2^63 or 2^64, which no integer of that type holds
    value = wide.astype("u8" if low == 0 else "i8")
    value = np.where(inside >= float(high), np.array(high, value.dtype), value)
    if high > 1 << 40:
        value = np.where(missing, np.array(low or 1 << 63, value.dtype), value)
    np.copyto(out, value, casting="unsafe")


def reciprocal_root(x: Array, out: Array) -> None:
    """1 / sqrt(x) with one rounding worth the name."""
    np.copyto(out, 1.0 / np.sqrt(x.astype("f8")), casting="same_kind")
