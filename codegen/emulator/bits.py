"""Integer and bit functions that NumPy does not have, with PTX's rules for odd arguments."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"


def widened(mask: Array, code: str) -> Array:
    """Booleans as integers of all ones or zero."""
    all_ones: Array = np.negative(mask.astype(code))
    return all_ones


def merge4(new: Array, old: Array, mask: Array) -> None:
    """Write 4-byte `new` into `old` where the mask is all ones. Three passes of integer logic beat copyto(where=)."""
    _merge(new.view("u4"), old.view("u4"), mask)


def merge8(new: Array, old: Array, mask: Array) -> None:
    """The same for 8 bytes."""
    _merge(new.view("u8"), old.view("u8"), mask)


def _merge(new: Array, old: Array, mask: Array) -> None:
    np.bitwise_xor(new, old, new)
    np.bitwise_and(new, mask, new)
    np.bitwise_xor(old, new, old)


def select(condition: Array, a: Array, b: Array, out: Array) -> None:
    """out = a where the condition holds, else b, for bits."""
    difference = np.bitwise_xor(a, b)
    mask = np.negative(condition.view("u1").astype(out.dtype) if condition.ndim else out.dtype.type(bool(condition)))
    np.bitwise_xor(b, np.bitwise_and(difference, mask), out)


def split(value: Array, n: int, code: str, parts: int) -> Array:
    """An array [n, parts] of the pieces of each value, low bits first."""
    whole = np.ascontiguousarray(np.broadcast_to(value, n))
    pieces: Array = whole.view(code).reshape(n, parts).copy()
    return pieces


def put(register: Array, lanes: Array | None, value: Array) -> None:
    """Write loaded values to a register, extended to its width; only the given lanes if not all are active."""
    if lanes is None:
        np.copyto(register, value, casting="unsafe")
    else:
        register[lanes] = value


def unordered(a: Array, b: Array) -> Array:
    """Where one of both is NaN."""
    return np.logical_or(np.isnan(a), np.isnan(b))


def multiply_high(a: Array, b: Array, out: Array) -> None:
    """The upper half of the double-width product."""
    bits = 8 * out.dtype.itemsize
    signed = out.dtype.kind == "i"
    if bits < 64:
        wide = np.dtype("i8" if signed else "u8")
        product = np.multiply(a.astype(wide), b.astype(wide))
        np.copyto(out, np.right_shift(product, wide.type(bits)), casting="unsafe")
        return
    x, y = a.view("u8"), b.view("u8")
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    x1, x0, y1, y0 = x >> half, x & low, y >> half, y & low
    middle = x1 * y0 + (x0 * y0 >> half)
    high = x1 * y1 + (middle >> half) + ((middle & low) + x0 * y1 >> half)
    if signed:  # two's complement: each negative factor counted 2^64 too much of the other
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    out.view("u8")[...] = high


def divide_integers(a: Array, b: Array, out: Array) -> None:
    """Quotient towards zero. By zero: all ones, as the hardware's routine gives."""
    zero = b == 0
    divisor = np.where(zero, b.dtype.type(1), b)
    if out.dtype.kind == "u":
        quotient = a // divisor
    else:
        floor = np.floor_divide(a, divisor)
        inexact = floor * divisor != a
        quotient = floor + (inexact & ((a < 0) != (divisor < 0)))
    np.copyto(out, np.where(zero, np.array(-1).astype(out.dtype), quotient), casting="unsafe")


def remainder_integers(a: Array, b: Array, out: Array) -> None:
    """Remainder with the sign of the dividend; by zero: the dividend."""
    zero = b == 0
    np.copyto(out, np.where(zero, a, np.fmod(a, np.where(zero, b.dtype.type(1), b))), casting="unsafe")


def shift_left(a: Array, amount: Array, out: Array) -> None:
    """a << amount; 0 from the width on."""
    bits = 8 * out.dtype.itemsize
    inside = np.minimum(amount, np.uint32(bits - 1)).astype(out.dtype)
    np.copyto(out, np.where(amount >= bits, out.dtype.type(0), np.left_shift(a, inside)))


def shift_right(a: Array, amount: Array, out: Array) -> None:
    """a >> amount; from the width on 0, or the sign."""
    bits = 8 * out.dtype.itemsize
    shifted = np.right_shift(a, np.minimum(amount, np.uint32(bits - 1)).astype(out.dtype))
    if out.dtype.kind == "i":
        np.copyto(out, shifted)
    else:
        np.copyto(out, np.where(amount >= bits, out.dtype.type(0), shifted))


def funnel_shift(low: Array, high: Array, amount: Array, out: Array, left: bool, wrap: bool) -> None:
    """Shift the 64 bits high:low; the upper half of a left shift, the lower half of a right shift."""
    both = np.bitwise_or(np.left_shift(high.astype("u8"), np.uint64(32)), low.astype("u8"))
    count = (amount & np.uint32(31) if wrap else np.minimum(amount, np.uint32(32))).astype("u8")
    result = np.right_shift(np.left_shift(both, count), np.uint64(32)) if left else np.right_shift(both, count)
    np.copyto(out, result, casting="unsafe")


def popc(a: Array, out: Array) -> None:
    """Number of ones."""
    octets = np.ascontiguousarray(np.broadcast_to(a, out.shape)).view("u1").reshape(out.size, -1)
    np.copyto(out, np.unpackbits(octets, axis=1).sum(1, dtype="u4"))


def _highest_bit(a: Array, shape: tuple[int, ...]) -> Array:
    """Position of the highest one, -1 if there is none."""
    octets = np.ascontiguousarray(np.broadcast_to(a, shape)).view("u1").reshape(shape[0], -1)[:, ::-1]
    bits = np.unpackbits(octets, axis=1)
    return np.where(bits.any(1), bits.shape[1] - 1 - bits.argmax(1), -1)


def clz(a: Array, out: Array) -> None:
    """Number of leading zeros."""
    np.copyto(out, 8 * a.dtype.itemsize - 1 - _highest_bit(a, out.shape), casting="unsafe")


def _find(a: Array, out: Array) -> Array:
    return _highest_bit(np.where(a < 0, ~a, a) if a.dtype.kind == "i" else a, out.shape)


def find_leading(a: Array, out: Array) -> None:
    """bfind: the highest bit that differs from the sign; all ones if there is none."""
    np.copyto(out, _find(a, out).astype("i4").view("u4"))


def find_leading_shift(a: Array, out: Array) -> None:
    """bfind.shiftamt: how far to shift left for that bit to become the highest."""
    position = _find(a, out)
    shift = np.where(position < 0, -1, 8 * a.dtype.itemsize - 1 - position)
    np.copyto(out, shift.astype("i4").view("u4"))


def brev(a: Array, out: Array) -> None:
    """Bits in reverse order."""
    octets = np.ascontiguousarray(np.broadcast_to(a, out.shape)).view("u1").reshape(out.size, -1)
    bits = np.unpackbits(octets, axis=1, bitorder="little")[:, ::-1]
    np.copyto(out, np.packbits(bits, axis=1, bitorder="little").reshape(-1).view(out.dtype))


def bfe(a: Array, position: Array, length: Array, out: Array) -> None:
    """Extract a bit field; a signed one is extended by its highest bit within the word."""
    bits = 8 * out.dtype.itemsize
    start = (position & np.uint32(0xFF)).astype("i8")
    count = (length & np.uint32(0xFF)).astype("i8")
    wide = a.astype("i8") if out.dtype.kind == "i" else a.astype("u8")
    one = np.uint64(1)
    field = np.where(start < bits, np.right_shift(wide, np.minimum(start, bits - 1).astype(wide.dtype)), 0)
    if out.dtype.kind == "i":
        field = np.where(start < bits, field, np.where(wide < 0, -1, 0))
        inside = np.minimum(count, bits)
        drop = 64 - inside
        signed = np.right_shift(np.left_shift(field, np.minimum(drop, 63)), np.minimum(drop, 63))
        sign = np.where(wide < 0, -1, 0)
        result = np.where(count == 0, 0, np.where(start + count > bits, np.where(start < bits, field, sign), signed))
    else:
        mask = np.where(count >= 64, ~np.uint64(0), np.left_shift(one, np.minimum(count, 63).astype("u8")) - one)
        result = field.astype("u8") & mask
    np.copyto(out, result, casting="unsafe")


def bfi(a: Array, b: Array, position: Array, length: Array, out: Array) -> None:
    """Insert the low bits of a into b."""
    kind = out.dtype.type
    bits = 8 * out.dtype.itemsize
    start = (position & np.uint32(0xFF)).astype("i8")
    count = np.minimum((length & np.uint32(0xFF)).astype("i8"), bits)
    ones = np.where(count >= bits, ~kind(0), np.left_shift(kind(1), np.minimum(count, bits - 1).astype(kind)) - kind(1))
    shift = np.minimum(start, bits - 1).astype(kind)
    mask = np.where(start < bits, np.left_shift(ones, shift), kind(0)).astype(kind)
    np.copyto(out, (np.left_shift(a, shift) & mask) | (b & ~mask))


def lop3(a: Array, b: Array, c: Array, table: int, out: Array) -> None:
    """The function of three bits whose value for (a, b, c) is bit 4a+2b+c of the table."""
    result = np.zeros(out.shape, "u4")
    for row in range(8):
        if table >> row & 1:
            result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    np.copyto(out, result)


def _eight_bytes(a: Array, b: Array, n: int) -> Array:
    pair = np.empty((n, 2), "u4")
    pair[:, 0], pair[:, 1] = a, b
    return pair.view("u1")


def permute_bytes_known(a: Array, b: Array, selector: int, out: Array) -> None:
    """prmt with a constant selector; bit 3 of a nibble replicates the sign of the chosen byte."""
    octets = _eight_bytes(a, b, out.size)
    result = np.empty((out.size, 4), "u1")
    for k in range(4):
        nibble = selector >> 4 * k & 15
        octet = octets[:, nibble & 7]
        result[:, k] = np.where(octet & 128, 255, 0) if nibble & 8 else octet
    np.copyto(out, result.view("u4").reshape(-1))


def permute_bytes(a: Array, b: Array, selector: Array, out: Array) -> None:
    """prmt with a selector per thread."""
    octets = _eight_bytes(a, b, out.size)
    chosen = np.broadcast_to(selector, out.shape)[:, None] >> np.array([0, 4, 8, 12], "u4") & np.uint32(15)
    result = np.take_along_axis(octets, (chosen & np.uint32(7)).astype("i8"), 1)
    result = np.where(chosen & np.uint32(8), np.where(result & 128, 255, 0), result).astype("u1")
    np.copyto(out, result.view("u4").reshape(-1))
