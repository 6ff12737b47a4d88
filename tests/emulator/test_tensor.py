"""Tensor-core instructions: fragments laid out by the formulas of the PTX manual, written out here once more."""

from __future__ import annotations

import numpy as np
import pytest
from flashsmith.emulator import UnknownInstruction

from .conftest import Out, assert_same_floats, from_bf16, pack2, ptx_kernel, run_ptx, to_bf16, unpack2

u16, u32, f16, f32, f64 = np.uint16, np.uint32, np.float16, np.float32, np.float64
LANE = np.arange(32)
GROUP, MEMBER = LANE // 4, LANE % 4  # groupID and threadID_in_group of the manual


# ---- the manual's formulas: (row, column) of element i in lane -----------------------------------------------------


def a_place(i: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """A of m16n8k16 (8 elements a lane) or m16n8k8 (4): i = 0, 1 are the halves of the first register."""
    if k == 16:
        row = GROUP if i in (0, 1, 4, 5) else GROUP + 8
        return row, MEMBER * 2 + (i & 1) + (8 if i >= 4 else 0)
    return (GROUP if i < 2 else GROUP + 8), MEMBER * 2 + (i & 1)


def b_place(i: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """B [k, 8] of m16n8k16 (4 elements a lane) or m16n8k8 (2)."""
    return MEMBER * 2 + (i & 1) + (8 if i >= 2 else 0), GROUP


def c_place(i: int) -> tuple[np.ndarray, np.ndarray]:
    """C and D [16, 8], four float32 a lane."""
    return (GROUP if i < 2 else GROUP + 8), MEMBER * 2 + (i & 1)


def fragment(matrices: np.ndarray, place, elements: int, k: int) -> np.ndarray:
    """[problem, rows, columns] of 16-bit elements to registers [problem, lane, elements / 2]."""
    halves = [matrices[:, place(i, k)[0], place(i, k)[1]] for i in range(elements)]
    return np.stack([pack2(halves[i], halves[i + 1]) for i in range(0, elements, 2)], -1)


ENCODE = {"f16": lambda x: np.asarray(x, f16), "bf16": to_bf16}
DECODE = {"f16": lambda x: x.astype(f64), "bf16": lambda x: from_bf16(x).astype(f64)}


def list_registers(prefix: str, count: int, first: int = 0) -> str:
    return "{" + ", ".join(f"%{prefix}{first + i}" for i in range(count)) + "}"


def run_mma(a: np.ndarray, b: np.ndarray, c: np.ndarray, dtype: str) -> np.ndarray:
    """D = A B + C for every problem, one warp each; A and B are encoded, C and D float32."""
    problems, k = len(a), a.shape[2]
    halves = k // 4  # registers of A; B has half as many
    a_regs, b_regs = fragment(a, a_place, 2 * halves, k), fragment(b, b_place, halves, k)
    c_regs = np.stack([c[:, c_place(i)[0], c_place(i)[1]] for i in range(4)], -1).astype(f32)
    vector = {1: "", 2: ".v2", 4: ".v4"}
    a_list, b_list = list_registers("r", halves, 4), list_registers("r", halves // 2, 10)
    plain = b_list.strip("{}") if halves == 2 else b_list  # ld of one register is no vector
    text = ptx_kernel(
        f"""
        mov.u32 %r0, %ctaid.x;
        mov.u32 %r1, %laneid;
        mad.lo.s32 %r0, %r0, 32, %r1;
        ld.param.u64 %rd0, [p0];
        ld.param.u64 %rd1, [p1];
        ld.param.u64 %rd2, [p2];
        ld.param.u64 %rd3, [p3];
        mad.wide.u32 %rd0, %r0, {4 * halves}, %rd0;
        mad.wide.u32 %rd1, %r0, {2 * halves}, %rd1;
        mad.wide.u32 %rd2, %r0, 16, %rd2;
        mad.wide.u32 %rd3, %r0, 16, %rd3;
        ld.global{vector[halves]}.b32 {a_list}, [%rd0];
        ld.global{vector[halves // 2]}.b32 {plain}, [%rd1];
        ld.global.v4.f32 {{%f0, %f1, %f2, %f3}}, [%rd2];
        mma.sync.aligned.m16n8k{k}.row.col.f32.{dtype}.{dtype}.f32
            {{%f4, %f5, %f6, %f7}}, {a_list}, {b_list}, {{%f0, %f1, %f2, %f3}};
        st.global.v4.f32 [%rd3], {{%f4, %f5, %f6, %f7}};
        """,
        [".u64"] * 4,
    )
    d_regs = run_ptx(text, [a_regs, b_regs, c_regs, Out((problems, 32, 4), f32)], grid=problems).out
    d = np.full((problems, 16, 8), np.nan, f32)
    for i in range(4):
        d[:, c_place(i)[0], c_place(i)[1]] = d_regs[:, :, i]
    return d


SHAPES = [pytest.param(dtype, k, id=f"m16n8k{k}-{dtype}") for dtype in ("f16", "bf16") for k in (16, 8)]


@pytest.mark.parametrize(("dtype", "k"), SHAPES)
def test_mma_of_random_integers_is_exact(dtype, k):
    """Small integers leave no rounding to argue about."""
    rng = np.random.default_rng(0)
    a, b, c = (rng.integers(-8, 9, (7, *shape)) for shape in ((16, k), (k, 8), (16, 8)))
    d = run_mma(ENCODE[dtype](a), ENCODE[dtype](b), c.astype(f32), dtype)
    np.testing.assert_array_equal(d, a @ b + c)


@pytest.mark.parametrize(("dtype", "k"), SHAPES)
def test_mma_places_every_element(dtype, k):
    """A single one at each place of A, then of B, each in a warp of its own."""
    rng = np.random.default_rng(1)
    one_a = np.eye(16 * k).reshape(16 * k, 16, k)
    other_b = np.tile(rng.integers(1, 100, (k, 8)), (16 * k, 1, 1))
    d = run_mma(ENCODE[dtype](one_a), ENCODE[dtype](other_b), np.zeros((16 * k, 16, 8), f32), dtype)
    np.testing.assert_array_equal(d, one_a @ other_b)
    one_b = np.eye(8 * k).reshape(8 * k, k, 8)
    other_a = np.tile(rng.integers(1, 100, (16, k)), (8 * k, 1, 1))
    d = run_mma(ENCODE[dtype](other_a), ENCODE[dtype](one_b), np.zeros((8 * k, 16, 8), f32), dtype)
    np.testing.assert_array_equal(d, other_a @ one_b)


@pytest.mark.parametrize(("dtype", "k"), SHAPES)
def test_mma_accumulates_in_float32(dtype, k):
    """Random reals: the products are exact, the sum is good to float32, far better than 16 bits."""
    rng = np.random.default_rng(2)
    a, b = (ENCODE[dtype](rng.standard_normal((5, *shape))) for shape in ((16, k), (k, 8)))
    c = (1000 * rng.standard_normal((5, 16, 8))).astype(f32)
    exact = DECODE[dtype](a) @ DECODE[dtype](b) + c
    np.testing.assert_allclose(run_mma(a, b, c, dtype), exact, rtol=0, atol=1e-3)
    d = run_mma(a, b, np.zeros_like(c), dtype)
    np.testing.assert_allclose(d, DECODE[dtype](a) @ DECODE[dtype](b), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_mma_keeps_special_values_in_their_row_and_column(dtype):
    """A NaN in A spoils one row, an infinity in B one column; 0 * inf is NaN; subnormals count."""
    a, b, c = np.ones((1, 16, 16)), np.ones((1, 16, 8)), np.zeros((1, 16, 8), f32)
    a[0, 3, 5] = np.nan
    a[0, 6, :] = 0
    b[0, 9, 2] = np.inf
    a[0, 10, :] = 2.0**-24  # the least subnormal half
    d = run_mma(ENCODE[dtype](a), ENCODE[dtype](b), c, dtype)[0]
    with np.errstate(invalid="ignore"):
        expected = np.full((16, 8), 16, f32)
        expected[6], expected[10] = 0, 16 * 2.0**-24
        expected[:, 2] = np.inf
        expected[6, 2] = np.nan
        expected[3] = np.nan
    assert_same_floats(d, expected)


def chain(middle: str) -> str:
    """A kernel with A = the lane's four words, B = two of them, and `middle` between load and store of %f0..%f3."""
    return ptx_kernel(
        f"""
        mov.u32 %r1, %tid.x;
        ld.param.u64 %rd0, [p0];
        ld.param.u64 %rd1, [p1];
        ld.param.u64 %rd2, [p2];
        mad.wide.u32 %rd0, %r1, 16, %rd0;
        mad.wide.u32 %rd1, %r1, 8, %rd1;
        mad.wide.u32 %rd2, %r1, 16, %rd2;
        ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd0];
        ld.global.v2.b32 {{%r8, %r9}}, [%rd1];
        mov.f32 %f0, 0f00000000;
        mov.f32 %f1, %f0;
        mov.f32 %f2, %f0;
        mov.f32 %f3, %f0;
        {middle}
        st.global.v4.f32 [%rd2], {{%f0, %f1, %f2, %f3}};
        """,
        [".u64"] * 3,
    )


MMA = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {}, {{%r4, %r5, %r6, %r7}}, {{%r8, %r9}}, {};"
D0, D4 = "{%f0, %f1, %f2, %f3}", "{%f4, %f5, %f6, %f7}"
SWAP = "mov.b32 %r10, %r8; mov.b32 %r8, %r9; mov.b32 %r9, %r10;"  # exchanges the k halves of B

CHAINS = {
    "accumulates in place": (MMA.format(D0, D0) * 3, lambda a, b, s: 3 * (a @ b)),
    "B changes between two": (MMA.format(D0, D0) + SWAP + MMA.format(D0, D0), lambda a, b, s: a @ b + a @ s),
    "A is overwritten after its use": (
        MMA.format(D0, D0) + "mov.b32 %r4, 0; mov.b32 %r5, 0; mov.b32 %r6, 0; mov.b32 %r7, 0;",
        lambda a, b, s: a @ b,
    ),
    "C is overwritten after its use": (
        MMA.format(D4, D0)
        + "mov.f32 %f0, %f4; mov.f32 %f1, %f5;"
        + MMA.format(D4, D4)
        + "add.f32 %f0, %f0, %f4; add.f32 %f1, %f1, %f5; mov.f32 %f2, %f6; mov.f32 %f3, %f7;",
        lambda a, b, s: np.where(np.arange(16)[:, None] < 8, 3, 2) * (a @ b),
    ),
    "the result feeds a product": (
        MMA.format(D0, D0)
        + "cvt.rn.f16x2.f32 %r8, %f1, %f0; cvt.rn.f16x2.f32 %r9, %f3, %f2;"
        + "mov.f32 %f0, 0f00000000; mov.f32 %f1, %f0; mov.f32 %f2, %f0; mov.f32 %f3, %f0;"
        + MMA.format(D0, D0),
        None,
    ),
    "scaled between two": (
        MMA.format(D0, D0) + "".join(f"mul.f32 %f{i}, %f{i}, 0f40000000;" for i in range(4)) + MMA.format(D0, D0),
        lambda a, b, s: 3 * (a @ b),
    ),
}


@pytest.mark.parametrize("case", CHAINS)
def test_mma_in_a_chain(case):
    """Whatever the emulator does to go fast, each instruction sees the registers of its own moment."""
    code, meaning = CHAINS[case]
    rng = np.random.default_rng(3)
    a, b = rng.integers(-3, 4, (1, 16, 16)), rng.integers(-3, 4, (1, 16, 8))
    a_regs, b_regs = fragment(a.astype(f16), a_place, 8, 16)[0], fragment(b.astype(f16), b_place, 4, 16)[0]
    d_regs = run_ptx(chain(code), [a_regs, b_regs, Out((32, 4), f32)]).out
    d = np.empty((16, 8), f32)
    for i in range(4):
        d[c_place(i)] = d_regs[:, i]
    a, b = a[0], b[0]
    if meaning:
        expected = meaning(a, b, np.roll(b, 8, 0))
    else:  # lane (g, t) holds D[g, 2t:2t+2] and D[g+8, 2t:2t+2]; as B they stand at [2t:2t+2, g] and [8+2t.., g]
        first = a @ b
        expected = a @ np.concatenate([first[:8].T, first[8:].T])
    np.testing.assert_array_equal(d, expected)


def test_mma_in_a_loop_that_only_some_warps_run():
    """Twelve warps of a block with trip counts 0, 1, 2, 3 in disorder, as under a mask."""
    code = f"""
        shr.u32 %r2, %r1, 5;
        mul.lo.u32 %r2, %r2, 7;
        shr.u32 %r2, %r2, 1;
        and.b32 %r2, %r2, 3;
        mov.u32 %r3, 0;
    loop:
        setp.ge.u32 %p0, %r3, %r2;
        @%p0 bra done;
        {MMA.format(D0, D0)}
        add.u32 %r3, %r3, 1;
        bra.uni loop;
    done:
    """
    rng = np.random.default_rng(4)
    a, b = rng.integers(-3, 4, (12, 16, 16)), rng.integers(-3, 4, (12, 16, 8))
    a_regs, b_regs = fragment(a.astype(f16), a_place, 8, 16), fragment(b.astype(f16), b_place, 4, 16)
    d_regs = run_ptx(chain(code), [a_regs, b_regs, Out((12, 32, 4), f32)], block=384).out
    for warp in range(12):
        for i in range(4):
            expected = (warp * 7 // 2 & 3) * (a[warp] @ b[warp])[c_place(i)]
            np.testing.assert_array_equal(d_regs[warp, :, i], expected)


# ---- ldmatrix, stmatrix, movmatrix ---------------------------------------------------------------------------------


ROW_BYTES = 80  # a padded row of the shared tile: five 16-byte chunks, no power of two


def matrix_kernel(middle: str, target: str = "sm_80") -> str:
    """Copy p0 to a shared tile of 32 rows, then run `middle`: %r2 is the lane's address of p1, %rd2 its place in p2."""
    return ptx_kernel(
        f"""
        mov.u32 %r1, %tid.x;
        ld.param.u64 %rd0, [p0];
        ld.param.u64 %rd1, [p1];
        ld.param.u64 %rd2, [p2];
        mov.u32 %r0, tile;
        mov.u32 %r3, 0;
    copy:
        mad.lo.s32 %r10, %r3, 128, 0;
        mad.lo.s32 %r10, %r1, 4, %r10;
        cvt.u64.u32 %rd3, %r10;
        add.s64 %rd4, %rd0, %rd3;
        ld.global.b32 %r11, [%rd4];
        add.s32 %r12, %r0, %r10;
        st.shared.b32 [%r12], %r11;
        add.s32 %r3, %r3, 1;
        setp.lt.s32 %p0, %r3, {32 * ROW_BYTES // 128};
        @%p0 bra copy;
        bar.sync 0;
        mad.wide.u32 %rd3, %r1, 4, %rd1;
        ld.global.b32 %r2, [%rd3];
        add.s32 %r2, %r2, %r0;
        mad.wide.u32 %rd2, %r1, 16, %rd2;
        {middle}
        """,
        [".u64"] * 3,
        declarations=f".shared .align 16 .b8 tile[{32 * ROW_BYTES}];",
        target=target,
    )


def loaded_by_hand(tile: np.ndarray, rows: np.ndarray, count: int, trans: bool) -> np.ndarray:
    """Lane l's word of matrix j: row l/4, columns 2(l%4) and the next; .trans exchanges row and column."""
    out = np.empty((32, count), u32)
    for j in range(count):
        matrix = tile[rows[8 * j : 8 * j + 8], :8]
        matrix = matrix.T if trans else matrix
        out[:, j] = pack2(matrix[GROUP, 2 * MEMBER], matrix[GROUP, 2 * MEMBER + 1])
    return out


@pytest.mark.parametrize("trans", ["", ".trans"], ids=["plain", "trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(count, trans):
    """Eight lanes name the rows of each matrix, in any order; the addresses of idle lanes are not looked at."""
    tile = np.arange(32 * ROW_BYTES // 2, dtype=u16).reshape(32, ROW_BYTES // 2)
    rows = np.random.default_rng(5).permutation(32)
    addresses = np.where(8 * count > LANE, rows * ROW_BYTES, 1_000_003).astype(u32)
    registers = list_registers("r", count, 4)
    code = f"""
        mov.u32 %r5, 0;
        mov.u32 %r6, 0;
        mov.u32 %r7, 0;
        ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {registers}, [%r2];
        st.global.v4.b32 [%rd2], {{%r4, %r5, %r6, %r7}};
    """
    out = run_ptx(matrix_kernel(code), [tile, addresses, Out((32, 4), u32)]).out
    np.testing.assert_array_equal(out[:, :count], loaded_by_hand(tile, rows, count, bool(trans)))
    assert not out[:, count:].any()


def test_ldmatrix_with_an_offset_and_the_other_order_of_modifiers():
    """[%r + 16] reads the second chunk; CuTe writes .x4 before .m8n8."""
    tile = np.arange(32 * ROW_BYTES // 2, dtype=u16).reshape(32, ROW_BYTES // 2)
    code = """
        ldmatrix.sync.aligned.x4.m8n8.shared.b16 {%r4, %r5, %r6, %r7}, [%r2+16];
        st.global.v4.b32 [%rd2], {%r4, %r5, %r6, %r7};
    """
    out = run_ptx(matrix_kernel(code), [tile, (LANE * ROW_BYTES).astype(u32), Out((32, 4), u32)]).out
    np.testing.assert_array_equal(out, loaded_by_hand(tile[:, 8:], LANE, 4, False))


@pytest.mark.parametrize("trans", ["", ".trans"], ids=["plain", "trans"])
def test_ldmatrix_by_some_of_the_warps(trans):
    """Every other of twelve warps loads, each from rows of its own; the others keep their registers."""
    tile = np.arange(32 * ROW_BYTES // 2, dtype=u16).reshape(32, ROW_BYTES // 2)
    rows = np.stack([np.random.default_rng(warp).permutation(32) for warp in range(12)])
    code = f"""
        mov.u32 %r4, 7;
        mov.u32 %r5, 7;
        mov.u32 %r6, 7;
        mov.u32 %r7, 7;
        and.b32 %r8, %r1, 32;
        setp.eq.u32 %p1, %r8, 0;
        @%p1 bra over;
        ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r4, %r5, %r6, %r7}}, [%r2];
    over:
        st.global.v4.b32 [%rd2], {{%r4, %r5, %r6, %r7}};
    """
    text = (
        matrix_kernel(code)
        .replace("copy:", "setp.ge.u32 %p0, %r1, 32;\n@%p0 bra filled;\ncopy:")
        .replace("bar.sync 0;", "filled: bar.sync 0;")
    )
    out = run_ptx(text, [tile, (rows * ROW_BYTES).astype(u32), Out((12, 32, 4), u32)], block=384).out
    assert (out[::2] == 7).all()
    for warp in range(1, 12, 2):
        np.testing.assert_array_equal(out[warp], loaded_by_hand(tile, rows[warp], 4, bool(trans)))


def test_ldmatrix_feeds_mma():
    """The idiom of every kernel: A by ldmatrix.x4, B [n, k] by ldmatrix.x2, from one padded tile."""
    rng = np.random.default_rng(6)
    tile = rng.integers(-9, 9, (32, ROW_BYTES // 2)).astype(f16)  # rows 0..15: A [16, 16]; rows 16..23: B^T [8, 16]
    addresses = (LANE % 16 * ROW_BYTES + LANE // 16 * 16).astype(u32)
    code = f"""
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r4, %r5, %r6, %r7}}, [%r2];
        and.b32 %r12, %r1, 7;
        shr.u32 %r13, %r1, 3;
        and.b32 %r13, %r13, 1;
        add.s32 %r12, %r12, 16;
        mad.lo.s32 %r14, %r12, {ROW_BYTES}, %r0;
        mad.lo.s32 %r14, %r13, 16, %r14;
        ldmatrix.sync.aligned.m8n8.x2.shared.b16 {{%r8, %r9}}, [%r14];
        mov.f32 %f0, 0f00000000;
        mov.f32 %f1, %f0;
        mov.f32 %f2, %f0;
        mov.f32 %f3, %f0;
        {MMA.format(D0, D0)}
        st.global.v4.f32 [%rd2], {D0};
    """
    out = run_ptx(matrix_kernel(code), [tile, addresses, Out((32, 4), f32)]).out
    expected = tile[:16, :16].astype(f64) @ tile[16:24, :16].astype(f64).T
    for i in range(4):
        np.testing.assert_array_equal(out[:, i], expected[c_place(i)])


@pytest.mark.parametrize("trans", ["", ".trans"], ids=["plain", "trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix(count, trans):
    """The reverse of ldmatrix (sm_90): what was in the tile elsewhere stays."""
    words = np.random.default_rng(7).integers(0, 2**32, (32, 4), u32)
    rows = np.random.default_rng(8).permutation(32)
    before = np.arange(32 * ROW_BYTES // 2, dtype=u16).reshape(32, ROW_BYTES // 2)
    addresses = (rows * ROW_BYTES).astype(u32)
    code = f"""
        ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd2];
        stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r2], {list_registers("r", count, 4)};
        bar.sync 0;
        mov.u32 %r3, 0;
    back:
        mad.lo.s32 %r10, %r3, 128, 0;
        mad.lo.s32 %r10, %r1, 4, %r10;
        cvt.u64.u32 %rd3, %r10;
        add.s64 %rd4, %rd0, %rd3;
        add.s32 %r12, %r0, %r10;
        ld.shared.b32 %r11, [%r12];
        st.global.b32 [%rd4], %r11;
        add.s32 %r3, %r3, 1;
        setp.lt.s32 %p0, %r3, {32 * ROW_BYTES // 128};
        @%p0 bra back;
    """
    run = run_ptx(matrix_kernel(code, target="sm_90"), [before, addresses, words])
    expected = before.copy()
    for j in range(count):
        matrix = np.empty((8, 8), u16)
        matrix[GROUP, 2 * MEMBER], matrix[GROUP, 2 * MEMBER + 1] = unpack2(words[:, j])
        expected[rows[8 * j : 8 * j + 8], :8] = matrix.T if trans else matrix
    np.testing.assert_array_equal(run.arrays[0], expected)


def test_movmatrix():
    """A transpose between registers; an emulator may refuse it."""
    words = np.random.default_rng(9).integers(0, 2**32, 32, u32)
    text = ptx_kernel(
        """
        mov.u32 %r1, %tid.x;
        ld.param.u64 %rd0, [p0];
        ld.param.u64 %rd1, [p1];
        mad.wide.u32 %rd0, %r1, 4, %rd0;
        mad.wide.u32 %rd1, %r1, 4, %rd1;
        ld.global.b32 %r2, [%rd0];
        movmatrix.sync.aligned.m8n8.trans.b16 %r3, %r2;
        st.global.b32 [%rd1], %r3;
        """,
        [".u64", ".u64"],
    )
    try:
        out = run_ptx(text, [words, Out(32, u32)]).out
    except UnknownInstruction:
        pytest.skip("movmatrix is not supported")
    matrix = np.empty((8, 8), u16)
    matrix[GROUP, 2 * MEMBER], matrix[GROUP, 2 * MEMBER + 1] = unpack2(words)
    np.testing.assert_array_equal(out, pack2(matrix.T[GROUP, 2 * MEMBER], matrix.T[GROUP, 2 * MEMBER + 1]))
