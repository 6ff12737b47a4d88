"""TF32 tensor-core instructions and their conversion: fragments by the formulas of the PTX manual, against float64."""

from __future__ import annotations

import numpy as np
import pytest
from flashsmith.emulator import UnknownInstruction

from .conftest import Out, apply, ptx_kernel, run_ptx

u32, f32, f64 = np.uint32, np.float32, np.float64
LANE = np.arange(32)
GROUP, MEMBER = LANE // 4, LANE % 4  # groupID and threadID_in_group of the manual
TF32 = u32(0xFFFFE000)  # sign, exponent and the upper 10 bits of the mantissa
SUMS = "{%f0, %f1, %f2, %f3}"


def a_place(i: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) of register i of A: two of m16n8k4, four of m16n8k8."""
    return GROUP + 8 * (i % 2), MEMBER + 4 * (i // 2)


def b_place(i: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) of register i of B: one of m16n8k4, two of m16n8k8."""
    return MEMBER + 4 * i, GROUP


def c_place(i: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) of register i of C and D."""
    return GROUP + 8 * (i // 2), MEMBER * 2 + i % 2


def cut(x: np.ndarray) -> np.ndarray:
    """What the tensor core reads of float32 numbers."""
    return (np.asarray(x, f32).view(u32) & TF32).view(f32)


def list_registers(prefix: str, count: int, first: int) -> str:
    return "{" + ", ".join(f"%{prefix}{first + i}" for i in range(count)) + "}"


def run_mma(a: np.ndarray, b: np.ndarray, c: np.ndarray, products: int = 1) -> np.ndarray:
    """D = C + A B, `products` times in a row, for every problem, one warp each. a [n, 16, k], b [n, k, 8]: float32."""
    problems, k = len(a), a.shape[2]
    of_A, of_B = k // 2, k // 4  # registers
    registers = [
        np.stack([x[:, place(i)[0], place(i)[1]] for i in range(count)], -1)
        for x, place, count in ((a, a_place, of_A), (b, b_place, of_B), (c, c_place, 4))
    ]
    a_list, b_list = list_registers("r", of_A, 4), list_registers("r", of_B, 10)
    mma = f"mma.sync.aligned.m16n8k{k}.row.col.f32.tf32.tf32.f32 {SUMS}, {a_list}, {b_list}, {SUMS};\n"
    text = ptx_kernel(
        f"""
        mov.u32 %r0, %ctaid.x;
        mov.u32 %r1, %laneid;
        mad.lo.s32 %r0, %r0, 32, %r1;
        ld.param.u64 %rd0, [p0];
        ld.param.u64 %rd1, [p1];
        ld.param.u64 %rd2, [p2];
        ld.param.u64 %rd3, [p3];
        mad.wide.u32 %rd0, %r0, {4 * of_A}, %rd0;
        mad.wide.u32 %rd1, %r0, {4 * of_B}, %rd1;
        mad.wide.u32 %rd2, %r0, 16, %rd2;
        mad.wide.u32 %rd3, %r0, 16, %rd3;
        ld.global.v{of_A}.b32 {a_list}, [%rd0];
        ld.global{".v2" if of_B == 2 else ""}.b32 {b_list if of_B == 2 else b_list.strip("{}")}, [%rd1];
        ld.global.v4.f32 {{%f0, %f1, %f2, %f3}}, [%rd2];
        {mma * products}
        st.global.v4.f32 [%rd3], {{%f0, %f1, %f2, %f3}};
        """,
        [".u64"] * 4,
    )
    d_regs = run_ptx(text, [*registers, Out((problems, 32, 4), f32)], grid=problems).out
    d = np.full((problems, 16, 8), np.nan, f32)
    for i in range(4):
        d[:, c_place(i)[0], c_place(i)[1]] = d_regs[:, :, i]
    return d


@pytest.mark.parametrize("k", [4, 8])
def test_places_every_element(k):
    """A single one at each place of A, then of B, each in a warp of its own."""
    rng = np.random.default_rng(1)
    nothing = np.zeros((16 * k, 16, 8), f32)
    one_a = np.eye(16 * k, dtype=f32).reshape(16 * k, 16, k)
    other_b = np.tile(rng.integers(1, 100, (k, 8)).astype(f32), (16 * k, 1, 1))
    np.testing.assert_array_equal(run_mma(one_a, other_b, nothing), one_a @ other_b)
    one_b = np.eye(8 * k, dtype=f32).reshape(8 * k, k, 8)
    other_a = np.tile(rng.integers(1, 100, (16, k)).astype(f32), (8 * k, 1, 1))
    np.testing.assert_array_equal(run_mma(other_a, one_b, nothing[: 8 * k]), other_a @ one_b)


@pytest.mark.parametrize("k", [4, 8])
def test_reads_the_upper_19_bits(k):
    """Operands that nobody converted: the lower 13 bits of random float32 do not count, whatever they are."""
    rng = np.random.default_rng(2)
    a, b, c = (rng.standard_normal((5, *shape)).astype(f32) for shape in ((16, k), (k, 8), (16, 8)))
    exact = cut(a).astype(f64) @ cut(b).astype(f64) + c
    got = run_mma(a, b, c)
    np.testing.assert_allclose(got, exact, rtol=0, atol=2e-6)
    noise = [x.view(u32) ^ rng.integers(0, 1 << 13, x.shape, u32) for x in (a, b)]
    np.testing.assert_array_equal(run_mma(*(x.view(f32) for x in noise), c), got)
    assert np.abs(got - (a.astype(f64) @ b.astype(f64) + c)).max() > 1e-4  # and that is coarse


def test_products_in_a_row_add_up():
    """Integers leave no rounding to argue about."""
    rng = np.random.default_rng(3)
    a, b, c = (rng.integers(-8, 9, (7, *shape)).astype(f32) for shape in ((16, 8), (8, 8), (16, 8)))
    np.testing.assert_array_equal(run_mma(a, b, c, products=3), c + 3 * (a @ b))


def test_keeps_special_values_in_their_row_and_column():
    """A NaN in A spoils one row, an infinity in B one column; 0 * inf is NaN; large exponents are those of float32."""
    a, b, c = np.ones((1, 16, 8), f32), np.ones((1, 8, 8), f32), np.zeros((1, 16, 8), f32)
    a[0, 3, 5], a[0, 6], a[0, 10] = np.nan, 0, 2.0**120
    b[0, 7, 2] = np.inf
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(run_mma(a, b, c), a @ b)


@pytest.mark.parametrize("k", [16, 2])
def test_refuses_shapes_that_there_are_not(k):
    A, B = list_registers("r", max(2, k // 2), 0), list_registers("r", max(1, k // 4), 8)
    with pytest.raises(UnknownInstruction, match="mma"):
        run_ptx(ptx_kernel(f"mma.sync.aligned.m16n8k{k}.row.col.f32.tf32.tf32.f32 {SUMS}, {A}, {B}, {SUMS};", []), [])


# ---- conversion ----------------------------------------------------------------------------------------------------


def rounded(x: np.ndarray) -> np.ndarray:
    """To 11 significant bits, to nearest, ties away from zero, in float64; subnormals to a fixed place."""
    x = x.astype(f64)
    _, exponent = np.frexp(np.where(np.isfinite(x), x, 1))
    unit = np.ldexp(1.0, np.maximum(exponent, -125) - 11)
    return np.sign(x) * np.floor(np.abs(x) / unit + 0.5) * unit


def test_rounds_ties_away_from_zero():
    """Every kind of tie, and the numbers just beside it, of both signs, subnormals too."""
    ties = (np.arange(1, 2000, 7, dtype=u32) * 3001 % 250000 << 13) | u32(0x1000)
    bits = np.concatenate([ties, ties - 1, ties + 1, np.arange(0x1000, 0x3001, 0x800, dtype=u32)])
    bits = np.resize(np.concatenate([bits, bits | u32(0x80000000)]), -(-2 * len(bits) // 128) * 128)
    x = bits.view(f32)
    got = apply("cvt.rna.tf32.f32 %d, %a;", x, out=u32)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got.view(f32), rounded(x).astype(f32))
    assert not (got & ~TF32).any()


def test_keeps_infinity_and_nan_and_overflows_to_infinity():
    x = np.resize(np.array([np.inf, -np.inf, np.nan, 3.4028235e38, -3.4028235e38, 0, -0.0], f32), 128)
    x.view(u32)[2] = 0x7F800001  # a NaN whose payload does not survive the cut
    got = apply("cvt.rna.tf32.f32 %d, %a;", x, out=u32)
    np.testing.assert_array_equal(got[:7].view(f32), np.array([np.inf, -np.inf, np.nan, np.inf, -np.inf, 0, -0.0], f32))
    assert got[2] == 0x7FFFFFFF and got[6] == 0x80000000


def test_three_products_are_nearly_float32():
    """x = big + small: what is left of the product after big big + big small + small big is 2^-22 of it."""
    rng = np.random.default_rng(4)
    a, b = rng.standard_normal((40, 16, 8)).astype(f32), rng.standard_normal((40, 8, 8)).astype(f32)

    def split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        big = apply("cvt.rna.tf32.f32 %d, %a;", x.reshape(-1), out=u32).view(f32).reshape(x.shape)
        return big, x - big

    (a_big, a_small), (b_big, b_small) = split(a), split(b)
    zero = np.zeros((40, 16, 8), f32)
    sums = run_mma(a_big, b_big, run_mma(a_big, b_small, run_mma(a_small, b_big, zero)))
    exact, size = a.astype(f64) @ b.astype(f64), np.abs(a).astype(f64) @ np.abs(b).astype(f64)
    assert np.abs((sums - exact) / size).max() < 2.0**-21
