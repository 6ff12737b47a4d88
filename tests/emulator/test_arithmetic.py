"""Integer and floating-point instructions, one at a time, against exact arithmetic in Python and NumPy."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from flashsmith.emulator import UnknownInstruction

from .conftest import (
    apply,
    assert_same_floats,
    assert_within_ulps,
    from_bf16,
    pack2,
    to_bf16,
    unpack2,
)

i16, u16, i32, u32, i64, u64 = np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64
f16, f32, f64 = np.float16, np.float32, np.float64
N = 384  # three blocks of 128: edge values against each other, then random ones


# ---- integers ----------------------------------------------------------------------------------------------------


def integers(dtype, seed: int) -> np.ndarray:
    """Edge values first (in another order for every seed), then values of all magnitudes."""
    info, rng = np.iinfo(dtype), np.random.default_rng(seed)
    edges = [0, 1, 2, 3, 7, info.max, info.max - 1, info.min, info.min + 1, info.max // 3]
    edges += [-1, -2, -7] if info.min < 0 else [info.max // 2 + 1]
    edges = rng.permutation(np.array(edges * 8, dtype))[:96]
    bits = 8 * np.dtype(dtype).itemsize
    wide = rng.integers(info.min, info.max, N - len(edges), dtype, endpoint=True)
    return np.concatenate([edges, wide >> rng.integers(0, bits, len(wide)).astype(dtype)])


def wrap(values, dtype) -> np.ndarray:
    """Python integers of any size to a type, keeping the low bits."""
    bits = 8 * np.dtype(dtype).itemsize
    return np.array([int(v) & (1 << bits) - 1 for v in values], f"u{bits // 8}").view(dtype)


def truncated_quotient(a: int, b: int) -> int:
    """C's division: towards zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def signed(value: int, bits: int) -> int:
    """The two's complement reading of the low bits of a value."""
    value &= (1 << bits) - 1
    return value - (value >> bits - 1 << bits)


INTEGER = {
    # instruction: (operand types, result type, meaning)
    "add.s32": (i32, i32, i32, lambda a, b: a + b),
    "sub.s32": (i32, i32, i32, lambda a, b: a - b),
    "add.u32": (u32, u32, u32, lambda a, b: a + b),
    "add.s64": (i64, i64, i64, lambda a, b: a + b),
    "sub.s64": (i64, i64, i64, lambda a, b: a - b),
    "add.s16": (i16, i16, i16, lambda a, b: a + b),
    "mul.lo.s32": (i32, i32, i32, lambda a, b: a * b),
    "mul.lo.u32": (u32, u32, u32, lambda a, b: a * b),
    "mul.hi.s32": (i32, i32, i32, lambda a, b: a * b >> 32),
    "mul.hi.u32": (u32, u32, u32, lambda a, b: a * b >> 32),
    "mul.wide.s32": (i32, i32, i64, lambda a, b: a * b),
    "mul.wide.u32": (u32, u32, u64, lambda a, b: a * b),
    "mul.wide.u16": (u16, u16, u32, lambda a, b: a * b),
    "mul.wide.s16": (i16, i16, i32, lambda a, b: a * b),
    "mul.lo.s16": (i16, i16, i16, lambda a, b: a * b),
    "mul.lo.s64": (i64, i64, i64, lambda a, b: a * b),
    "mul.hi.s64": (i64, i64, i64, lambda a, b: a * b >> 64),
    "mul.hi.u64": (u64, u64, u64, lambda a, b: a * b >> 64),
    "div.s32": (i32, i32, i32, truncated_quotient),
    "div.u32": (u32, u32, u32, truncated_quotient),
    "div.s64": (i64, i64, i64, truncated_quotient),
    "div.u64": (u64, u64, u64, truncated_quotient),
    "rem.s32": (i32, i32, i32, lambda a, b: a - truncated_quotient(a, b) * b),
    "rem.u32": (u32, u32, u32, lambda a, b: a % b),
    "rem.s64": (i64, i64, i64, lambda a, b: a - truncated_quotient(a, b) * b),
    "rem.u64": (u64, u64, u64, lambda a, b: a % b),
    "min.s32": (i32, i32, i32, min),
    "max.s32": (i32, i32, i32, max),
    "min.u32": (u32, u32, u32, min),
    "max.u32": (u32, u32, u32, max),
    "min.s64": (i64, i64, i64, min),
    "max.s64": (i64, i64, i64, max),
    "max.u64": (u64, u64, u64, max),
    "and.b32": (u32, u32, u32, lambda a, b: a & b),
    "or.b32": (u32, u32, u32, lambda a, b: a | b),
    "xor.b32": (u32, u32, u32, lambda a, b: a ^ b),
    "and.b64": (u64, u64, u64, lambda a, b: a & b),
    "or.b64": (u64, u64, u64, lambda a, b: a | b),
    "xor.b64": (u64, u64, u64, lambda a, b: a ^ b),
    "and.b16": (u16, u16, u16, lambda a, b: a & b),
}


@pytest.mark.parametrize("instruction", INTEGER)
def test_integer_instruction_of_two_operands(instruction):
    """Wraps, widens and rounds as PTX says, at the edges of the types too."""
    type_a, type_b, out, meaning = INTEGER[instruction]
    a, b = integers(type_a, 1), integers(type_b, 2)
    if instruction.startswith(("div", "rem")):
        b[(b == 0) | (b.astype(object) == -1)] = 5  # both are undefined for some dividends
    expected = wrap([meaning(x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)], out)
    np.testing.assert_array_equal(apply(f"{instruction} %d, %a, %b;", a, b, out=out), expected)


MULTIPLY_ADD = {
    "mad.lo.s32": (i32, i32, lambda a, b, c: a * b + c),
    "mad.lo.u32": (u32, u32, lambda a, b, c: a * b + c),
    "mad.hi.u32": (u32, u32, lambda a, b, c: (a * b >> 32) + c),
    "mad.wide.s32": (i32, i64, lambda a, b, c: a * b + c),
    "mad.wide.u32": (u32, u64, lambda a, b, c: a * b + c),
    "mad.lo.s64": (i64, i64, lambda a, b, c: a * b + c),
}


@pytest.mark.parametrize("instruction", MULTIPLY_ADD)
def test_integer_multiply_add(instruction):
    """The wide forms keep all bits of the product and add a 64-bit number."""
    factor, out, meaning = MULTIPLY_ADD[instruction]
    a, b, c = integers(factor, 3), integers(factor, 4), integers(out, 5)
    expected = wrap([meaning(*abc) for abc in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)], out)
    np.testing.assert_array_equal(apply(f"{instruction} %d, %a, %b, %c;", a, b, c, out=out), expected)


UNARY = {
    "neg.s32": (i32, i32, lambda a: -a),
    "neg.s64": (i64, i64, lambda a: -a),
    "abs.s32": (i32, i32, abs),
    "abs.s64": (i64, i64, abs),
    "not.b32": (u32, u32, lambda a: ~a),
    "not.b64": (u64, u64, lambda a: ~a),
    "popc.b32": (u32, u32, lambda a: a.bit_count()),
    "popc.b64": (u64, u32, lambda a: a.bit_count()),
    "clz.b32": (u32, u32, lambda a: 32 - a.bit_length()),
    "clz.b64": (u64, u32, lambda a: 64 - a.bit_length()),
    "brev.b32": (u32, u32, lambda a: int(f"{a:032b}"[::-1], 2)),
    "brev.b64": (u64, u64, lambda a: int(f"{a:064b}"[::-1], 2)),
}


@pytest.mark.parametrize("instruction", UNARY)
def test_integer_instruction_of_one_operand(instruction):
    """Negation wraps at the least number; counts know zero."""
    type_, out, meaning = UNARY[instruction]
    a = integers(type_, 6)
    expected = wrap([meaning(x) for x in a.tolist()], out)
    np.testing.assert_array_equal(apply(f"{instruction} %d, %a;", a, out=out), expected)


SHIFT = {
    "shl.b32": (u32, lambda a, n: a << min(n, 32)),
    "shr.u32": (u32, lambda a, n: a >> min(n, 32)),
    "shr.s32": (i32, lambda a, n: a >> min(n, 32)),
    "shl.b64": (u64, lambda a, n: a << min(n, 64)),
    "shr.u64": (u64, lambda a, n: a >> min(n, 64)),
    "shr.s64": (i64, lambda a, n: a >> min(n, 64)),
    "shl.b16": (u16, lambda a, n: a << min(n, 16)),
    "shr.u16": (u16, lambda a, n: a >> min(n, 16)),
}


@pytest.mark.parametrize("instruction", SHIFT)
def test_shift_counts_are_clamped_not_wrapped(instruction):
    """A count past the width empties the register or fills it with the sign; C would leave it undefined."""
    type_, meaning = SHIFT[instruction]
    a = integers(type_, 7)
    n = np.resize(np.array([0, 1, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 255, 0x7FFFFFFF], u32), N)
    expected = wrap([meaning(*an) for an in zip(a.tolist(), n.tolist(), strict=True)], type_)
    np.testing.assert_array_equal(apply(f"{instruction} %d, %a, %b;", a, n, out=type_), expected)


FUNNEL = {
    "shf.l.wrap.b32": lambda lo, hi, n: (hi << 32 | lo) << (n & 31) >> 32,
    "shf.r.wrap.b32": lambda lo, hi, n: (hi << 32 | lo) >> (n & 31),
    "shf.l.clamp.b32": lambda lo, hi, n: (hi << 32 | lo) << min(n, 32) >> 32,
    "shf.r.clamp.b32": lambda lo, hi, n: (hi << 32 | lo) >> min(n, 32),
}


@pytest.mark.parametrize("instruction", FUNNEL)
def test_funnel_shift(instruction):
    """The pair is %b:%a, the high word second; wrap takes the count modulo 32, clamp stops at 32."""
    a, b = integers(u32, 8), integers(u32, 9)
    n = np.resize(np.array([0, 1, 7, 31, 32, 33, 40, 64], u32), N)
    expected = wrap([FUNNEL[instruction](*x) for x in zip(a.tolist(), b.tolist(), n.tolist(), strict=True)], u32)
    np.testing.assert_array_equal(apply(f"{instruction} %d, %a, %b, %c;", a, b, n, out=u32), expected)


def extract_bits(a: int, position: int, length: int, bits: int, is_signed: bool) -> int:
    """The PTX manual's loop for bfe."""
    position, length, top = position & 255, length & 255, bits - 1
    sign = 0 if not is_signed or length == 0 else a >> min(position + length - 1, top) & 1
    chosen = [a >> position + i & 1 if i < length and position + i <= top else sign for i in range(bits)]
    return sum(bit << i for i, bit in enumerate(chosen))


def insert_bits(a: int, b: int, position: int, length: int, bits: int) -> int:
    """The PTX manual's loop for bfi."""
    position, length = position & 255, length & 255
    for i in range(length):
        if position + i < bits:
            b = b & ~(1 << position + i) | (a >> i & 1) << position + i
    return b


FIELDS = np.array([(p, n) for p in (0, 1, 8, 16, 31, 32, 40) for n in (0, 1, 5, 8, 16, 31, 32, 33, 64)], u32)


@pytest.mark.parametrize("instruction", ["bfe.u32", "bfe.s32", "bfe.u64", "bfe.s64"])
def test_bit_field_extract(instruction):
    """Fields that are empty, or reach past the register, follow the manual's loop."""
    bits = int(instruction[-2:])
    a = integers(f"u{bits // 8}", 10)
    position, length = (np.resize(x, N) for x in FIELDS.T)
    rows = zip(a.tolist(), position.tolist(), length.tolist(), strict=True)
    expected = wrap([extract_bits(*row, bits, instruction[4] == "s") for row in rows], a.dtype)
    result = apply(f"{instruction} %d, %a, %b, %c;", a, position, length, out=a.dtype)
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("bits", [32, 64])
def test_bit_field_insert(bits):
    """bfi puts the low bits of %a into %b."""
    a, b = integers(f"u{bits // 8}", 11), integers(f"u{bits // 8}", 12)
    position, length = (np.resize(x, N) for x in FIELDS.T)
    rows = zip(a.tolist(), b.tolist(), position.tolist(), length.tolist(), strict=True)
    expected = wrap([insert_bits(*row, bits) for row in rows], a.dtype)
    result = apply(f"bfi.b{bits} %d, %a, %b, %c, %e;", a, b, position, length, out=a.dtype)
    np.testing.assert_array_equal(result, expected)


def permute_bytes(a: int, b: int, selector: int) -> int:
    """The default mode of prmt: each nibble picks a byte of b:a; its top bit asks for the byte's sign instead."""
    result = 0
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = (b << 32 | a) >> 8 * (nibble & 7) & 255
        if nibble & 8:
            byte = 255 if byte & 128 else 0
        result |= byte << 8 * i
    return result


def test_byte_permute():
    """prmt picks bytes, or their signs, in any order."""
    a, b, selector = integers(u32, 13), integers(u32, 14), integers(u32, 15)
    selector[:4] = [0x3210, 0x7654, 0x5410, 0xFB32]
    expected = wrap([permute_bytes(*x) for x in zip(a.tolist(), b.tolist(), selector.tolist(), strict=True)], u32)
    np.testing.assert_array_equal(apply("prmt.b32 %d, %a, %b, %c;", a, b, selector, out=u32), expected)


@pytest.mark.parametrize("table", [0x00, 0x01, 0x80, 0x96, 0xE8, 0xCA, 0xFE, 0xC0, 0x3C, 0xFF])
def test_three_input_logic(table):
    """lop3's table is indexed by the bits of a, b and c, a the most significant."""
    a, b, c = integers(u32, 16), integers(u32, 17), integers(u32, 18)
    expected = np.zeros(N, u32)
    for row in range(8):
        matches = ~(a ^ u32(0xFFFFFFFF * (row >> 2 & 1)))
        matches &= ~(b ^ u32(0xFFFFFFFF * (row >> 1 & 1)))
        matches &= ~(c ^ u32(0xFFFFFFFF * (row & 1)))
        expected |= matches * u32(table >> row & 1)
    np.testing.assert_array_equal(apply(f"lop3.b32 %d, %a, %b, %c, {table};", a, b, c, out=u32), expected)


def test_immediates_of_every_spelling():
    """Decimal, negative, hexadecimal, octal, binary, unsigned; hexadecimal floats."""
    zero = np.zeros(32, u32)
    spelled = {"12": 12, "-12": -12, "0x1F": 31, "0X1f": 31, "017": 15, "0b101": 5, "7U": 7, "0xFFFFFFFF": -1}
    for text, value in spelled.items():
        assert apply(f"add.s32 %d, %a, {text};", zero, out=i32)[0] == value, text
    assert apply("mov.f32 %d, 0f3FC00000;", zero, out=f32)[0] == 1.5
    assert apply("mov.f32 %d, 0fFF800000;", zero, out=f32)[0] == -np.inf


# ---- floats: exact instructions ----------------------------------------------------------------------------------


def floats(seed: int, *, special: bool = True) -> np.ndarray:
    """Random float32 over many magnitudes; specials and subnormals first."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(N) * 2.0 ** rng.integers(-20, 20, N)).astype(f32)
    if special:
        edges = [0.0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 1e-40, -1e-45, 3.4e38, -3.4e38, 1.17549435e-38]
        values[:96] = rng.permutation(np.array(edges * 8, f32))
    return values


def nearest_float32(exact: Fraction) -> np.float32:
    """The float32 next to a rational number, ties to even."""
    guess = f32(float(exact))
    near = [np.nextafter(guess, f32(-np.inf)), guess, np.nextafter(guess, f32(np.inf))]
    return min(near, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(u32)) & 1))


FLOAT = {
    "add.f32": lambda a, b: a + b,
    "add.rn.f32": lambda a, b: a + b,
    "sub.f32": lambda a, b: a - b,
    "mul.f32": lambda a, b: a * b,
    "mul.rn.f32": lambda a, b: a * b,
    "div.rn.f32": lambda a, b: a / b,
    "max.f32": np.fmax,
    "min.f32": np.fmin,
    "max.NaN.f32": np.maximum,
    "min.NaN.f32": np.minimum,
}


@pytest.mark.parametrize("instruction", FLOAT)
def test_float_instruction_is_correctly_rounded(instruction):
    """Bit for bit what IEEE 754 says; without .ftz subnormals stay."""
    a, b = floats(1), floats(2)
    if instruction[:3] in ("max", "min"):
        b[(a == 0) & (b == 0)] = 1  # which zero wins is another question
    with np.errstate(all="ignore"):
        expected = FLOAT[instruction](a, b)
    assert_same_floats(apply(f"{instruction} %d, %a, %b;", a, b, out=f32), expected)


def test_max_drops_nan_unless_told_to_keep_it():
    """The fact that an online softmax leans on, said with plain numbers."""
    a, b = (np.resize(np.array(x, f32), 32) for x in ([np.nan, 2, np.nan, 1], [1, np.nan, np.nan, 3]))
    dropped = apply("max.f32 %d, %a, %b;", a, b, out=f32)
    kept = apply("max.NaN.f32 %d, %a, %b;", a, b, out=f32)
    np.testing.assert_array_equal(dropped[:4], np.array([1, 2, np.nan, 3], f32))
    np.testing.assert_array_equal(kept[:4], np.array([np.nan, np.nan, np.nan, 3], f32))


def test_negative_and_absolute_float():
    """Only the sign bit changes, of infinities and zeros too."""
    a = floats(3)
    assert_same_floats(apply("neg.f32 %d, %a;", a, out=f32), -a)
    assert_same_floats(apply("abs.f32 %d, %a;", a, out=f32), np.abs(a))


def test_square_root_and_reciprocal_rounded_to_nearest():
    """sqrt.rn and rcp.rn equal IEEE's."""
    a = floats(4)
    with np.errstate(all="ignore"):
        assert_same_floats(apply("sqrt.rn.f32 %d, %a;", a, out=f32), np.sqrt(a))
        assert_same_floats(apply("rcp.rn.f32 %d, %a;", a, out=f32), f32(1) / a)


def test_fma_rounds_once():
    """Random products plus nearly cancelling addends, against exact rationals."""
    a, b = floats(5, special=False), floats(6, special=False)
    noise = np.random.default_rng(7).integers(-2, 3, N)
    c = -(a * b)  # rounded, so that what is left is the rounding error of the product
    c = (c + np.spacing(np.abs(c)) * noise).astype(f32)
    exact = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)]
    expected = np.array([nearest_float32(x) for x in exact], f32)
    assert (expected != a * b + c).mean() > 0.5  # the inputs tell one rounding from two
    np.testing.assert_array_equal(apply("fma.rn.f32 %d, %a, %b, %c;", a, b, c, out=f32), expected)


def test_fma_rounds_once_where_float64_would_round_to_a_tie():
    """1 + 2^-24 + 2^-60 lies just above a float32 tie; float64 loses the last term, and ties go to even."""
    a = np.full(32, 1774001 * 2.0**-30, f32)
    b = np.full(32, 38737 * 2.0**-30, f32)  # the product is 2^-24 + 2^-60
    c = np.ones(32, f32)
    result = apply("fma.rn.f32 %d, %a, %b, %c;", a, b, c, out=f32)
    np.testing.assert_array_equal(result, np.full(32, 1 + 2.0**-23, f32))


def test_fma_of_special_values():
    """0 * inf is NaN; an infinite addend wins over a finite product that overflows float32."""
    a, b, c = (
        np.resize(np.array(x, f32), 32) for x in ([0, 2, 3e38, -np.inf], [np.inf, 3, 3e38, 1], [1, np.inf, -np.inf, 5])
    )
    result = apply("fma.rn.f32 %d, %a, %b, %c;", a, b, c, out=f32)[:4]
    assert_same_floats(result, np.array([np.nan, np.inf, -np.inf, -np.inf], f32))


def test_bug_03_a_fused_exponent_is_not_one_at_the_maximum():
    """ex2(fma(x, c, -round(x * c))) sees the rounding of x * c; multiplying first gives exactly 1."""
    x = np.full(32, 133120.0**2 * 64, f32)
    c = np.full(32, 0.125 * math.log2(math.e), f32)
    residue = float(Fraction(float(x[0])) * Fraction(float(c[0])) - Fraction(float(x[0] * c[0])))
    assert abs(residue) > 100  # so that 2^residue is 0 or infinite, far from 1
    fused = "mul.f32 %f0, %a, %b; neg.f32 %f0, %f0; fma.rn.f32 %f0, %a, %b, %f0; ex2.approx.ftz.f32 %d, %f0;"
    plain = "mul.f32 %f0, %a, %b; mul.f32 %f1, %a, %b; sub.f32 %f0, %f1, %f0; ex2.approx.ftz.f32 %d, %f0;"
    np.testing.assert_array_equal(apply(fused, x, c, out=f32), np.full(32, np.inf if residue > 0 else 0, f32))
    np.testing.assert_array_equal(apply(plain, x, c, out=f32), np.ones(32, f32))


# ---- floats: subnormals ------------------------------------------------------------------------------------------

TINY = np.resize(np.array([1e-40, -1e-40, 1.1754944e-38, -1.1754944e-38, 1.0, 3e-39], f32), 96)


def flushed(x) -> np.ndarray:
    """Subnormals become zeros of the same sign."""
    x = np.asarray(x, f32)
    return np.where(np.abs(x) < np.finfo(f32).tiny, np.copysign(f32(0), x), x)


FLUSH = {
    "add{}.f32 %d, %a, %b;": lambda a, b: a + b,
    "sub{}.f32 %d, %a, %b;": lambda a, b: a - b,
    "mul{}.f32 %d, %a, %b;": lambda a, b: a * b,
    "fma.rn{}.f32 %d, %a, %b, %a;": lambda a, b: a * b + a,
    "max{}.f32 %d, %a, %b;": np.maximum,
    "neg{}.f32 %d, %a;": lambda a, b: -a,
    "abs{}.f32 %d, %a;": lambda a, b: np.abs(a),
}


@pytest.mark.parametrize("code", FLUSH, ids=lambda code: code.split("{")[0])
def test_ftz_flushes_operands_and_results(code):
    """.ftz reads subnormals as zeros and writes zeros for them; without it they stay."""
    a, b = TINY, np.resize(np.array([0.5, 1.0, 0.5, 2.0, 1e-39], f32), len(TINY))
    meaning = FLUSH[code]
    kept, gone = meaning(a, b), flushed(meaning(flushed(a), flushed(b)))
    assert (kept != gone).sum() > 10
    assert_same_floats(apply(code.format(""), a, b, out=f32), kept)
    assert_same_floats(apply(code.format(".ftz"), a, b, out=f32), gone)


def test_ftz_of_exponentials_and_comparisons():
    """ex2 flushes a subnormal result, lg2 and setp a subnormal operand; the plain forms do not."""
    x = np.resize(np.array([-130.0, -140.0, -126.0, -149.0], f32), 32)
    assert_within_ulps(apply("ex2.approx.f32 %d, %a;", x, out=f32), np.exp2(x.astype(f64)), 2)
    assert_within_ulps(apply("ex2.approx.ftz.f32 %d, %a;", x, out=f32), np.where(x < -126, 0, np.exp2(x)), 2)
    y = np.full(32, 2.0**-140, f32)
    np.testing.assert_array_equal(apply("lg2.approx.f32 %d, %a;", y, out=f32), np.full(32, -140, f32))
    np.testing.assert_array_equal(apply("lg2.approx.ftz.f32 %d, %a;", y, out=f32), np.full(32, -np.inf, f32))
    code = "setp.gt{}.f32 %p0, %a, 0f00000000; selp.b32 %d, 1, 0, %p0;"
    assert apply(code.format(""), y, out=i32).all()
    assert not apply(code.format(".ftz"), y, out=i32).any()


# ---- floats: approximations --------------------------------------------------------------------------------------

APPROXIMATE = {
    "ex2.approx.f32": (np.exp2, np.linspace(-140, 127.9, N)),
    "ex2.approx.ftz.f32": (np.exp2, np.linspace(-125, 127.9, N)),
    "rcp.approx.f32": (lambda x: 1 / x, np.geomspace(1e-30, 1e30, N)),
    "rcp.approx.ftz.f32": (lambda x: 1 / x, -np.geomspace(1e-30, 1e30, N)),
    "sqrt.approx.f32": (np.sqrt, np.geomspace(1e-30, 1e30, N)),
    "sqrt.approx.ftz.f32": (np.sqrt, np.geomspace(1e-30, 1e30, N)),
    "rsqrt.approx.f32": (lambda x: x**-0.5, np.geomspace(1e-30, 1e30, N)),
    "rsqrt.approx.ftz.f32": (lambda x: x**-0.5, np.geomspace(1e-30, 1e30, N)),
    "lg2.approx.f32": (np.log2, np.geomspace(4, 1e30, N)),
    "lg2.approx.ftz.f32": (np.log2, np.geomspace(1e-30, 0.25, N)),
}


@pytest.mark.parametrize("instruction", APPROXIMATE)
def test_approximation_is_within_three_ulps(instruction):
    """The hardware promises about two units in the last place; so do we."""
    function, values = APPROXIMATE[instruction]
    x = values.astype(f32)
    assert_within_ulps(apply(f"{instruction} %d, %a;", x, out=f32), function(x.astype(f64)), 3)


def test_logarithm_near_one_is_close_in_absolute_terms():
    """lg2.approx promises 2^-22 absolute there."""
    x = np.linspace(0.5, 2, N).astype(f32)
    error = apply("lg2.approx.f32 %d, %a;", x, out=f32) - np.log2(x.astype(f64))
    assert np.abs(error).max() <= 2.0**-22


@pytest.mark.parametrize("instruction", ["div.full.f32", "div.approx.f32", "div.full.ftz.f32", "div.approx.ftz.f32"])
def test_fast_division_is_within_three_ulps(instruction):
    """Two units by the manual."""
    rng = np.random.default_rng(8)
    a, b = ((rng.standard_normal(N) * 2.0 ** rng.integers(-15, 15, N)).astype(f32) for _ in "ab")
    assert_within_ulps(apply(f"{instruction} %d, %a, %b;", a, b, out=f32), a.astype(f64) / b.astype(f64), 3)


SPECIAL = {
    "ex2.approx.f32": ([-np.inf, np.inf, np.nan, 0, -0.0, 128, -200], [0, np.inf, np.nan, 1, 1, np.inf, 0]),
    "ex2.approx.ftz.f32": ([-np.inf, np.inf, np.nan, 0, 3, 128, -200], [0, np.inf, np.nan, 1, 8, np.inf, 0]),
    "lg2.approx.f32": ([0, -0.0, -1, np.inf, np.nan, 1, 8], [-np.inf, -np.inf, np.nan, np.inf, np.nan, 0, 3]),
    "rcp.approx.ftz.f32": ([0, -0.0, np.inf, -np.inf, np.nan, 4], [np.inf, -np.inf, 0, -0.0, np.nan, 0.25]),
    "rcp.rn.f32": ([0, -0.0, np.inf, -np.inf, np.nan, 4], [np.inf, -np.inf, 0, -0.0, np.nan, 0.25]),
    "rsqrt.approx.f32": ([0, np.inf, -1, np.nan, 4], [np.inf, 0, np.nan, np.nan, 0.5]),
    "sqrt.approx.f32": ([0, -0.0, np.inf, -1, np.nan, 4], [0, -0.0, np.inf, np.nan, np.nan, 2]),
}


@pytest.mark.parametrize("instruction", SPECIAL)
def test_special_values(instruction):
    """Infinities, zeros and NaN go where the manual's tables send them: ex2(-inf) = 0 is a masked score."""
    x, expected = (np.resize(np.array(v, f32), 32) for v in SPECIAL[instruction])
    assert_same_floats(apply(f"{instruction} %d, %a;", x, out=f32), expected)


# ---- sixteen bits ------------------------------------------------------------------------------------------------


def halves(seed: int) -> np.ndarray:
    """Float32 numbers near one, signs mixed."""
    return np.random.default_rng(seed).standard_normal(N).astype(f32)


PACKED = {
    "add{}.{}x2 %d, %a, %b;": lambda a, b, c: a + b,
    "sub{}.{}x2 %d, %a, %b;": lambda a, b, c: a - b,
    "mul{}.{}x2 %d, %a, %b;": lambda a, b, c: a * b,
    "fma.rn{}.{}x2 %d, %a, %b, %c;": lambda a, b, c: a * b + c,
    "max{}.{}x2 %d, %a, %b;": lambda a, b, c: np.maximum(a, b),
    "min{}.{}x2 %d, %a, %b;": lambda a, b, c: np.minimum(a, b),
    "neg{}.{}x2 %d, %a;": lambda a, b, c: -a,
    "abs{}.{}x2 %d, %a;": lambda a, b, c: np.abs(a),
}


@pytest.mark.parametrize("code", PACKED, ids=lambda code: code.split("{")[0])
def test_packed_half(code):
    """Both halves of a register, each rounded once: float64 holds these sums and products exactly."""
    operands = [[halves(10 * i + j).astype(f16) for j in (0, 1)] for i in (1, 2, 3)]
    result = unpack2(apply(code.format("", "f16"), *(pack2(*pair) for pair in operands), out=u32), f16)
    for half in (0, 1):
        expected = PACKED[code](*(pair[half].astype(f64) for pair in operands)).astype(f16)
        assert_same_floats(result[half], expected)


@pytest.mark.parametrize("code", PACKED, ids=lambda code: code.split("{")[0])
def test_packed_bfloat16(code):
    """The same of bfloat16; plain add, sub and mul of it need sm_90."""
    operands = [[to_bf16(halves(10 * i + j)) for j in (4, 5)] for i in (1, 2, 3)]
    code_bf16 = code.format("", "bf16")
    target = "sm_90" if code_bf16[:3] in ("add", "sub", "mul") else "sm_80"
    result = unpack2(apply(code_bf16, *(pack2(*pair) for pair in operands), out=u32, target=target))
    for half in (0, 1):
        exact = PACKED[code](*(from_bf16(pair[half]).astype(f64) for pair in operands))
        np.testing.assert_array_equal(result[half], to_bf16(exact.astype(f32)))


@pytest.mark.parametrize("code", [c for c in PACKED if c[:3] not in ("neg", "abs")], ids=lambda c: c.split("{")[0])
def test_scalar_half(code):
    """The unpacked forms in 16-bit registers."""
    a, b, c = (halves(i).astype(f16) for i in (20, 21, 22))
    expected = PACKED[code](*(x.astype(f64) for x in (a, b, c))).astype(f16)
    assert_same_floats(apply(code.format("", "f16").replace("f16x2", "f16"), a, b, c, out=f16), expected)


def test_packed_half_overflow_and_subnormals():
    """60000 + 60000 is infinite; subnormal halves are numbers."""
    a = np.resize(np.array([60000, 6e-8, 1e-7], f16), 96)
    low, high = unpack2(apply("add.f16x2 %d, %a, %a;", pack2(a, -a), out=u32), f16)
    with np.errstate(over="ignore"):
        assert_same_floats(low, a + a)
        assert_same_floats(high, -(a + a))


# ---- what is rare must be right or refused -----------------------------------------------------------------------

RARE = {
    "add.sat.s32 %d, %a, %b;": (i32, lambda a, b: np.clip(a.astype(i64) + b, -(2**31), 2**31 - 1).astype(i32)),
    "sub.sat.s32 %d, %a, %b;": (i32, lambda a, b: np.clip(a.astype(i64) - b, -(2**31), 2**31 - 1).astype(i32)),
    "mul24.lo.s32 %d, %a, %b;": (
        i32,
        lambda a, b: wrap([signed(x, 24) * signed(y, 24) for x, y in zip(a.tolist(), b.tolist(), strict=True)], i32),
    ),
    "sad.s32 %d, %a, %b, 3;": (i32, lambda a, b: wrap(np.abs(a.astype(i64) - b) + 3, i32)),
    "add.sat.f32 %d, %a, %b;": (f32, lambda a, b: np.clip(a + b, 0, 1)),
    "mul.sat.f32 %d, %a, %b;": (f32, lambda a, b: np.clip(a * b, 0, 1)),
    "fma.rn.sat.f32 %d, %a, %b, %a;": (f32, lambda a, b: np.clip(a * b + a, 0, 1)),
    "add.rz.f32 %d, %a, %b;": (f32, lambda a, b: truncated(a.astype(f64) + b)),
    "mul.rz.f32 %d, %a, %b;": (f32, lambda a, b: truncated(a.astype(f64) * b)),
    "add.rm.f32 %d, %a, %b;": (f32, lambda a, b: floored(a.astype(f64) + b)),
    "min.xorsign.abs.f32 %d, %a, %b;": (
        f32,
        lambda a, b: np.copysign(np.minimum(np.abs(a), np.abs(b)), np.sign(a) * np.sign(b)).astype(f32),
    ),
}


def truncated(exact: np.ndarray) -> np.ndarray:
    """Float64 to the float32 next to it on the side of zero."""
    near = exact.astype(f32)
    return np.where(np.abs(near.astype(f64)) > np.abs(exact), np.nextafter(near, f32(0)), near)


def floored(exact: np.ndarray) -> np.ndarray:
    """Float64 to the float32 below it."""
    near = exact.astype(f32)
    return np.where(near.astype(f64) > exact, np.nextafter(near, f32(-np.inf)), near)


@pytest.mark.parametrize("code", RARE, ids=lambda code: code.split(" ")[0])
def test_rare_variant_is_right_or_refused(code):
    """A modifier that changes the result may be unknown, never ignored."""
    dtype, meaning = RARE[code]
    rng = np.random.default_rng(30)
    if dtype is i32:
        a, b = (rng.integers(-(2**31), 2**31, N).astype(i32) for _ in "ab")
    else:
        a, b = (rng.standard_normal(N).astype(f32) for _ in "ab")
    try:
        result = apply(code, a, b, out=dtype, target="sm_86")
    except UnknownInstruction as refusal:
        assert code.split(".")[0] in str(refusal)
    else:
        np.testing.assert_array_equal(result, meaning(a, b))
