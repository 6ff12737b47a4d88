"""cvt, packing and unpacking: rounding of ties, overflow, NaN, saturation, order of packed operands."""

from __future__ import annotations

import math

import numpy as np
import pytest
from flashsmith.emulator import UnknownInstruction

from .conftest import apply, assert_same_floats, from_bf16, pack2, to_bf16, unpack2

i16, u16, i32, u32, i64, u64 = np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64
f16, f32, f64 = np.float16, np.float32, np.float64


def padded(values, dtype) -> np.ndarray:
    """Repeat values up to a multiple of 128 elements."""
    values = np.asarray(values, dtype)
    return np.resize(values, -(-len(values) // 128) * 128)


def around_midpoints(representable: np.ndarray, step: int = 1) -> np.ndarray:
    """Every step-th float32 tie between neighbours, and the numbers just beside the ties, of both signs."""
    middle = ((representable[1:].astype(f64) + representable[:-1]) / 2).astype(f32)[::step]
    beside = [np.nextafter(middle, f32(-np.inf)), middle, np.nextafter(middle, f32(np.inf))]
    return padded(np.concatenate([*beside, *(-x for x in beside)]), f32)


EDGES = np.array(
    [
        *(0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.996, 65520, -65520, 1e5, 3.4028235e38, 3.3895314e38),
        *(3.396e38, 1e-40, -1e-40, 6e-8, 2.9802322e-8, 2.9802326e-8, 1e-7, 1, 1 / 3),
    ],
    f32,
)


# ---- float32 <-> 16 bits -----------------------------------------------------------------------------------------


def test_float32_to_half_rounds_ties_to_even():
    """Midpoints between neighbouring halves, subnormal ones too, and their float32 neighbours."""
    finite = np.arange(0x7C00, dtype=u16).view(f16)
    x = np.concatenate([around_midpoints(finite, 23), around_midpoints(finite[:200]), padded(EDGES, f32)])
    with np.errstate(over="ignore"):
        assert_same_floats(apply("cvt.rn.f16.f32 %d, %a;", x, out=f16), x.astype(f16))


def test_float32_to_bfloat16_rounds_ties_to_even():
    """Including the step from the greatest finite number to infinity; NaN stays NaN."""
    finite = np.arange(0x7F80, dtype=u16)
    x = np.concatenate([around_midpoints(from_bf16(finite), 37), around_midpoints(from_bf16(finite[-20:]))])
    x = np.concatenate([x, padded(EDGES, f32)])
    result = apply("cvt.rn.bf16.f32 %d, %a;", x, out=u16)
    assert_same_floats(from_bf16(result), from_bf16(to_bf16(x)))


@pytest.mark.parametrize("payload", [0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F80FFFF, 0xFF80FFFF])
def test_nan_of_any_payload_stays_nan(payload):
    """A sloppy rounding carries such a NaN into infinity or zero."""
    x = np.full(32, payload, u32).view(f32)
    assert np.isnan(apply("cvt.rn.f16.f32 %d, %a;", x, out=f16)).all()
    assert np.isnan(from_bf16(apply("cvt.rn.bf16.f32 %d, %a;", x, out=u16))).all()


def test_packed_conversion_puts_its_first_operand_on_top():
    """cvt.rn.f16x2.f32 d, a, b: a to the upper half, b to the lower."""
    a, b = padded(np.arange(128) + 1 / 3, f32), padded(-np.arange(128) - 1 / 7, f32)
    a[:21], b[-21:] = EDGES, EDGES
    with np.errstate(over="ignore"):
        low, high = unpack2(apply("cvt.rn.f16x2.f32 %d, %a, %b;", a, b, out=u32), f16)
        assert_same_floats(high, a.astype(f16))
        assert_same_floats(low, b.astype(f16))
    low, high = unpack2(apply("cvt.rn.bf16x2.f32 %d, %a, %b;", a, b, out=u32))
    assert_same_floats(from_bf16(high), from_bf16(to_bf16(a)))
    assert_same_floats(from_bf16(low), from_bf16(to_bf16(b)))


def test_every_half_comes_back_exactly():
    """All 65536 bit patterns: subnormals, infinities, NaN."""
    x = np.arange(65536, dtype=np.uint32).astype(u16).view(f16)
    assert_same_floats(apply("cvt.f32.f16 %d, %a;", x, out=f32), x.astype(f32))


def test_bfloat16_comes_back_exactly():
    """By a shift as sm_80 does it, and by the cvt of sm_90."""
    x = np.arange(0, 65536, 3, dtype=np.uint32).astype(u16)
    x = padded(x, u16)
    shifted = "cvt.u32.u16 %r3, %a; shl.b32 %r3, %r3, 16; mov.b32 %d, %r3;"
    packed = "mov.b16 %h0, 0; mov.b32 %d, {%h0, %a};"
    for code in (shifted, packed):
        assert_same_floats(apply(code, x, out=f32), from_bf16(x))
    assert_same_floats(apply("cvt.f32.bf16 %d, %a;", x, out=f32, target="sm_90"), from_bf16(x))


def test_round_to_zero_to_bfloat16_or_refused():
    """cvt.rz cuts the low bits off; it must not round as cvt.rn does."""
    x = padded(np.random.default_rng(0).standard_normal(128), f32)
    try:
        result = apply("cvt.rz.bf16.f32 %d, %a;", x, out=u16)
    except UnknownInstruction:
        return
    np.testing.assert_array_equal(result, (x.view(u32) >> 16).astype(u16))


def test_relu_while_packing_or_refused():
    """The .relu of cvt clamps negatives to zero; ignored it would be silently wrong."""
    a, b = (padded(np.random.default_rng(i).standard_normal(128), f32) for i in (1, 2))
    try:
        low, high = unpack2(apply("cvt.rn.relu.f16x2.f32 %d, %a, %b;", a, b, out=u32), f16)
    except UnknownInstruction:
        return
    np.testing.assert_array_equal(high, np.maximum(a, 0).astype(f16))
    np.testing.assert_array_equal(low, np.maximum(b, 0).astype(f16))


# ---- moves that pack ---------------------------------------------------------------------------------------------


def test_mov_packs_and_unpacks():
    """Vector operands list the least significant part first."""
    a, b = (padded(np.random.default_rng(i).integers(0, 65536, 128), u16) for i in (3, 4))
    np.testing.assert_array_equal(apply("mov.b32 %d, {%a, %b};", a, b, out=u32), pack2(a, b))
    np.testing.assert_array_equal(
        apply("mov.b32 {%h0, %h1}, %a; mov.b32 %d, {%h1, %h0};", pack2(a, b), out=u32), pack2(b, a)
    )
    x, y = (padded(np.random.default_rng(i).integers(0, 2**32, 128), u32) for i in (5, 6))
    both = x.astype(u64) | y.astype(u64) << u64(32)
    np.testing.assert_array_equal(apply("mov.b64 %d, {%a, %b};", x, y, out=u64), both)
    np.testing.assert_array_equal(apply("mov.b64 {%r3, %r4}, %a; sub.s32 %d, %r4, %r3;", both, out=u32), y - x)


def test_mov_between_float_and_bits_keeps_the_bits():
    """A NaN's payload survives, as in __float_as_uint."""
    x = padded([0x7F800001, 0x80000000, 0x00000001, 0xFFC12345], u32)
    np.testing.assert_array_equal(apply("mov.b32 %f0, %a; mov.b32 %d, %f0;", x, out=u32), x)


# ---- integers <-> floats -----------------------------------------------------------------------------------------

NUMBERS = padded(
    [
        *(0, -0.0, 0.5, -0.5, 1.5, -1.5, 2.5, -2.5, 0.49999997, 0.99999994, -0.99999994, 8388607.5, 16777217),
        *(3e9, -3e9, 2147483520, 2147483648, -2147483648, 4294967040, 4294967296, 1e10, -1),
        *(np.inf, -np.inf, np.nan, 100.7, -100.7),
    ],
    f32,
)
ROUND = {"rzi": math.trunc, "rni": round, "rmi": math.floor, "rpi": math.ceil}


@pytest.mark.parametrize("mode", ROUND)
@pytest.mark.parametrize("dtype", [i32, u32, i64, u64], ids=["s32", "u32", "s64", "u64"])
def test_float_to_integer_saturates(mode, dtype):
    """Out of range goes to the nearest end, NaN to 0."""
    info = np.iinfo(dtype)
    numbers = padded(NUMBERS[~np.isnan(NUMBERS)], f32) if info.bits == 64 else NUMBERS  # NaN to 64 bits: not tested

    def convert(x: float) -> int:
        if math.isnan(x):
            return 0
        if math.isinf(x):
            return info.max if x > 0 else info.min
        return min(max(ROUND[mode](x), info.min), info.max)

    expected = np.array([convert(float(x)) for x in numbers], dtype)
    name = f"{'s' if info.min < 0 else 'u'}{info.bits}"
    np.testing.assert_array_equal(apply(f"cvt.{mode}.{name}.f32 %d, %a;", numbers, out=dtype), expected)


@pytest.mark.parametrize("mode", ROUND)
def test_float_to_integral_float(mode):
    """Stays a float: infinities, NaN and the sign of zero survive."""
    function = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}[mode]
    assert_same_floats(apply(f"cvt.{mode}.f32.f32 %d, %a;", NUMBERS, out=f32), function(NUMBERS))


@pytest.mark.parametrize("name", ["s32", "u32", "s64", "u64"])
def test_integer_to_float_rounds_to_nearest(name):
    """Above 2^24 ties go to even; unsigned stays positive."""
    bits, dtype = int(name[1:]), {"s32": i32, "u32": u32, "s64": i64, "u64": u64}[name]
    rng = np.random.default_rng(7)
    info = np.iinfo(dtype)
    x = rng.integers(info.min, info.max, 256, dtype, endpoint=True) >> rng.integers(0, bits, 256).astype(dtype)
    x[:6] = [16777217, 16777219, 16777218, 33554434, 33554438, 0]
    x[6:8] = [info.min, info.max]
    expected = np.array([nearest(int(v)) for v in x], f32)
    np.testing.assert_array_equal(apply(f"cvt.rn.f32.{name} %d, %a;", x, out=f32), expected)


def nearest(value: int) -> np.float32:
    """The float32 next to an integer, ties to even, without a detour over float64."""
    shift = max(abs(value).bit_length() - 24, 0)
    kept, rest, half = abs(value) >> shift, abs(value) & (1 << shift) - 1, (1 << shift) >> 1
    kept += shift > 0 and (rest > half or (rest == half and kept & 1))
    return f32(math.copysign(float(kept << shift), value))


def test_saturation_to_the_unit_interval_or_refused():
    """cvt.sat.f32.f32 clamps to [0, 1]; NaN becomes 0."""
    x = padded([-1, 0, 0.25, 1, 2, np.inf, -np.inf, np.nan], f32)
    try:
        result = apply("cvt.sat.f32.f32 %d, %a;", x, out=f32)
    except UnknownInstruction:
        return
    np.testing.assert_array_equal(result, padded([0, 0, 0.25, 1, 1, 1, 0, 0], f32))


def test_half_and_integers():
    """An index to a half and back."""
    x = padded(np.arange(-1024, 1024), i32)
    half = apply("cvt.rn.f16.s32 %d, %a;", x, out=f16)
    np.testing.assert_array_equal(half, x.astype(f16))
    np.testing.assert_array_equal(apply("cvt.rzi.s32.f16 %d, %a;", half, out=i32), x)


# ---- integers <-> integers ---------------------------------------------------------------------------------------

WIDTH = {
    "cvt.s64.s32": (i32, i64, lambda x: x.astype(i64)),
    "cvt.u64.u32": (u32, u64, lambda x: x.astype(u64)),
    "cvt.s64.u32": (u32, i64, lambda x: x.astype(i64)),
    "cvt.u32.u64": (u64, u32, lambda x: x.astype(u32)),
    "cvt.s32.s64": (i64, i32, lambda x: x.astype(i32)),
    "cvt.s32.s16": (i16, i32, lambda x: x.astype(i32)),
    "cvt.u32.u16": (u16, u32, lambda x: x.astype(u32)),
    "cvt.u16.u32": (u32, u16, lambda x: x.astype(u16)),
    "cvt.s32.s8": (u32, i32, lambda x: x.astype(np.int8).astype(i32)),
    "cvt.u32.u8": (u32, u32, lambda x: x.astype(np.uint8).astype(u32)),
    "cvt.s32.s16 of a 32-bit register": (u32, i32, lambda x: x.astype(i16).astype(i32)),
    "cvt.u64.u16": (u16, u64, lambda x: x.astype(u64)),
    "cvt.s64.s16": (i16, i64, lambda x: x.astype(i64)),
}


@pytest.mark.parametrize("case", WIDTH)
def test_integer_widths(case):
    """Sign extension by the source's type, truncation by the destination's, narrow types in wide registers."""
    source, target, meaning = WIDTH[case]
    info = np.iinfo(source)
    x = np.random.default_rng(8).integers(info.min, info.max, 128, source, endpoint=True)
    x[:4] = [info.min, info.max, 0x80 if info.max > 0x80 else 0, info.max // 2]
    np.testing.assert_array_equal(apply(f"{case.split()[0]} %d, %a;", x, out=target), meaning(x))


def test_saturating_narrowing_or_refused():
    """cvt.sat clamps where plain cvt would cut bits off."""
    x = padded([-300, -128, 0, 127, 128, 300], i32)
    try:
        result = apply("cvt.sat.s8.s32 %r5, %a; cvt.s32.s8 %d, %r5;", x, out=i32)
    except UnknownInstruction:
        return
    np.testing.assert_array_equal(result, np.clip(x, -128, 127))
