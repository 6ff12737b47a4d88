"""Predicates, divergence, barriers, shuffles, votes and special registers."""

from __future__ import annotations

import numpy as np
import pytest

from .conftest import Out, apply, ptx_kernel, run_cuda, run_ptx

i32, u32, f32 = np.int32, np.uint32, np.float32
LANE = np.arange(32)


# ---- predicates --------------------------------------------------------------------------------------------------

ORDERED = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
SELECT = "selp.b32 %d, 1, 0, %p0;"


@pytest.mark.parametrize("type_", ["s32", "u32", "s64", "u64", "s16", "u16"])
def test_integer_comparisons(type_):
    """The type decides whether the top bit is a sign."""
    dtype = np.dtype(f"{'i' if type_[0] == 's' else 'u'}{int(type_[1:]) // 8}")
    values = np.array([0, 1, 2, np.iinfo(dtype).max, np.iinfo(dtype).min, np.iinfo(dtype).max - 1], dtype)
    a, b = (np.resize(x.ravel(), 96) for x in np.meshgrid(values, values))
    for name, meaning in ORDERED.items():
        result = apply(f"setp.{name}.{type_} %p0, %a, %b; {SELECT}", a, b, out=i32)
        np.testing.assert_array_equal(result, meaning(a, b), name)


def test_unsigned_comparisons_by_their_own_names():
    """lo, ls, hi, hs."""
    a, b = np.resize(np.array([0, 1, 0x80000000, 5], u32), 96), np.resize(np.array([1, 1, 5, 0xFFFFFFFF, 5], u32), 96)
    for name, meaning in {"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}.items():
        np.testing.assert_array_equal(apply(f"setp.{name}.u32 %p0, %a, %b; {SELECT}", a, b, out=i32), meaning(a, b))


def test_float_comparisons_with_nan():
    """Ordered ones are false with a NaN (ne too), the -u forms true; num and nan ask for it."""
    values = np.array([0, -0.0, 1, -1, np.inf, -np.inf, np.nan], f32)
    a, b = (np.resize(x.ravel(), 64) for x in np.meshgrid(values, values))
    unordered = np.isnan(a) | np.isnan(b)
    cases = {name: meaning(a, b) & ~unordered for name, meaning in ORDERED.items()}
    cases |= {f"{name}u": meaning(a, b) | unordered for name, meaning in ORDERED.items()}
    cases |= {"num": ~unordered, "nan": unordered}
    for name, expected in cases.items():
        result = apply(f"setp.{name}.f32 %p0, %a, %b; {SELECT}", a, b, out=i32, threads=64)
        np.testing.assert_array_equal(result, expected, name)


def test_comparison_combined_with_a_predicate():
    """setp.cmp.op p|q, a, b, c: p = (a cmp b) op c, q = !(a cmp b) op c."""
    a, b = np.resize(np.array([1, 2, 3, 4], i32), 32), np.resize(np.array([2, 2, 2, 2, 5], i32), 32)
    operators = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
    for name, meaning in operators.items():
        for negation in ("", "!"):
            code = f"""
                setp.gt.s32 %p2, %b, 3;
                setp.lt.{name}.s32 %p0|%p1, %a, %b, {negation}%p2;
                selp.b32 %r3, 1, 0, %p0;
                selp.b32 %r4, 2, 0, %p1;
                add.s32 %d, %r3, %r4;
            """
            c = (b > 3) if not negation else ~(b > 3)
            expected = meaning(a < b, c) + 2 * meaning(~(a < b), c)
            np.testing.assert_array_equal(apply(code, a, b, out=i32), expected, f"{name} {negation}")


def test_predicate_logic_and_guards():
    """and, or, xor, not, mov of predicates; @p and @!p instructions leave the other lanes alone."""
    a = np.arange(64, dtype=i32)
    code = """
        and.b32 %r3, %a, 1;
        setp.eq.s32 %p0, %r3, 1;
        setp.lt.s32 %p1, %a, 40;
        and.pred %p2, %p0, %p1;
        or.pred %p3, %p0, %p1;
        xor.pred %p4, %p2, %p3;
        not.pred %p5, %p4;
        mov.pred %p6, %p5;
        mov.b32 %d, %a;
        @%p6 add.s32 %d, %d, 1000;
        @!%p2 add.s32 %d, %d, 5000;
    """
    odd, low = a % 2 == 1, a < 40
    expected = a + 1000 * ~((odd & low) ^ (odd | low)) + 5000 * ~(odd & low)
    np.testing.assert_array_equal(apply(code, a, out=i32), expected)


def test_select_of_every_width():
    """selp takes immediates, floats and 64-bit registers."""
    a = np.arange(32, dtype=i32)
    head = "setp.gt.s32 %p0, %a, 10; "
    low = a > 10
    np.testing.assert_array_equal(
        apply(head + "selp.f32 %d, 0f3F800000, 0fFF800000, %p0;", a, out=f32), np.where(low, f32(1), f32(-np.inf))
    )
    np.testing.assert_array_equal(apply(head + "selp.s32 %d, %a, -7, %p0;", a, out=i32), np.where(low, a, -7))
    code = head + "cvt.s64.s32 %rd1, %a; selp.b64 %d, %rd1, 4294967296, %p0;"
    np.testing.assert_array_equal(apply(code, a, out=np.int64), np.where(low, a.astype(np.int64), 2**32))
    code = head + "cvt.u16.u32 %h0, %a; mov.b16 %h1, 9; selp.b16 %d, %h0, %h1, %p0;"
    np.testing.assert_array_equal(apply(code, a, out=np.uint16), np.where(low, a, 9))


# ---- divergence --------------------------------------------------------------------------------------------------

COLLATZ = """
extern "C" __global__ void collatz(const int* start, int* steps) {
    int g = blockIdx.x * blockDim.x + threadIdx.x, v = start[g], n = 0;
    while (v != 1 && n < 200) { v = (v & 1) ? 3 * v + 1 : v >> 1; n++; }
    steps[g] = n;
}"""


def test_loop_with_a_trip_count_of_its_own_in_every_lane():
    """The Collatz steps of 512 numbers."""
    start = np.random.default_rng(0).integers(1, 1000, 512).astype(i32)

    def steps(v: int) -> int:
        n = 0
        while v != 1 and n < 200:
            v, n = (3 * v + 1 if v & 1 else v >> 1), n + 1
        return n

    expected = [steps(int(v)) for v in start]
    np.testing.assert_array_equal(run_cuda(COLLATZ, [start, Out(512, i32)], grid=4, block=128).out, expected)


NESTED = """
extern "C" __global__ void nested(int* out) {
    int t = threadIdx.x, x = 0;
    for (int i = 0; i < (t & 7); i++) {
        if (i & 1) {
            if (t & 8) x += 10;
            else { for (int j = 0; j < i; j++) { if (j == (t >> 4)) continue; if (x > 500) break; x += 100 + j; } }
        } else x += i;
        x ^= t;
    }
    out[t] = x;
}"""


def test_nested_divergence_with_break_and_continue():
    """Four levels of branches that depend on the lane."""

    def model(t: int) -> int:
        x = 0
        for i in range(t & 7):
            if i & 1:
                if t & 8:
                    x += 10
                else:
                    for j in range(i):
                        if j == t >> 4:
                            continue
                        if x > 500:
                            break
                        x += 100 + j
            else:
                x += i
            x ^= t
        return x

    np.testing.assert_array_equal(run_cuda(NESTED, [Out(96, i32)], block=96).out, [model(t) for t in range(96)])


EARLY_RETURN = """
extern "C" __global__ void early(const float* x, float* out, int n) {
    __shared__ float s[128];
    int t = threadIdx.x, g = blockIdx.x * 128 + t;
    s[t] = g < n ? x[g] : 0.f;
    __syncthreads();
    if (g >= n) return;
    float sum = 0.f;
    for (int i = 0; i <= t; i++) sum += s[i];
    out[g] = sum;
}"""


def test_early_return_of_some_lanes():
    """Threads past the end leave; those that stay run a triangular loop and store."""
    n = 300
    x = np.random.default_rng(1).integers(-9, 9, n).astype(f32)
    out = run_cuda(EARLY_RETURN, [x, Out(384, f32), n], grid=3, block=128).out
    expected = np.concatenate([np.cumsum(x[i : i + 128]) for i in range(0, n, 128)])
    np.testing.assert_array_equal(out[:n], expected)
    assert (out[n:].view(u32) == 0xFFFFFFFF).all()  # poison: nobody wrote there


EXITED_WARPS = """
extern "C" __global__ void k(int* out) {
    __shared__ int s[64];
    int t = threadIdx.x;
    if (t >= 64) return;             // two whole warps leave before the barrier
    s[t] = t * t;
    __syncthreads();
    out[t] = s[63 - t];
}"""


def test_a_barrier_waits_only_for_warps_that_have_not_exited():
    """Whole warps may return before __syncthreads; the rest go on."""
    t = np.arange(64)
    np.testing.assert_array_equal(run_cuda(EXITED_WARPS, [Out(64, i32)], block=128).out, (63 - t) ** 2)


BLOCKS_DIVERGE = """
extern "C" __global__ void k(int* out) {
    __shared__ int s[64];
    int t = threadIdx.x, sum = 0;
    for (int i = 0; i < blockIdx.x % 5; i++) {
        s[t] = t + i * blockIdx.x;
        __syncthreads();
        sum += s[t ^ 33];
        __syncthreads();
    }
    out[blockIdx.x * 64 + t] = sum;
}"""


def test_blocks_with_different_trip_counts_around_a_barrier():
    """Barriers belong to a block, and blocks may run together in one batch."""
    grid, t = 37, np.arange(64)
    expected = [sum(((t ^ 33) + i * b for i in range(b % 5)), start=0 * t) for b in range(grid)]
    out = run_cuda(BLOCKS_DIVERGE, [Out((grid, 64), i32)], grid=grid, block=64).out
    np.testing.assert_array_equal(out, expected)


def test_partial_last_warp():
    """A block of 40 threads: shuffles and barriers with a warp of eight lanes."""
    source = """
    extern "C" __global__ void k(int* out) {
        int t = threadIdx.x;
        unsigned present = __ballot_sync(t < 32 ? ~0u : 0xffu, 1);
        __syncthreads();
        out[t] = __popc(present);
    }"""
    np.testing.assert_array_equal(run_cuda(source, [Out(40, i32)], block=40).out, [32] * 32 + [8] * 8)


NAMED_BARRIER = """
extern "C" __global__ void k(int* out) {
    __shared__ int s[128];
    int t = threadIdx.x;
    s[t] = t * 3;
    if (t < 64) { asm volatile("bar.sync 1, 64;" ::: "memory"); out[t] = s[t ^ 32]; }
    else        { asm volatile("bar.sync 2, 64;" ::: "memory"); out[t] = s[t ^ 32]; }
}"""


def test_named_barriers_join_a_part_of_the_block():
    """bar.sync id, count: two pairs of warps meet at barriers of their own."""
    run = run_cuda(NAMED_BARRIER, [Out(128, i32)], block=128, check_races=True)
    np.testing.assert_array_equal(run.out, (np.arange(128) ^ 32) * 3)
    assert run.report.race_count == 0


SPIN = """
extern "C" __global__ void k(int* out) {
    __shared__ volatile int flag;
    int t = threadIdx.x;
    if (t == 0) flag = 0;
    __syncthreads();
    if (t >= 32) { while (flag == 0) { } out[t] = flag; }
    else { int x = 0; for (int i = 0; i < 50; i++) x += i * t; out[t] = x; if (t == 0) flag = 7; }
}"""


def test_waiting_for_a_flag_of_another_warp():
    """A spinning warp must not starve the one it waits for."""
    expected = np.concatenate([np.arange(32) * 1225, np.full(32, 7)])
    np.testing.assert_array_equal(run_cuda(SPIN, [Out(64, i32)], block=64).out, expected)


# ---- shuffles ----------------------------------------------------------------------------------------------------


def shuffled(mode: str, values: np.ndarray, b: int, c: int) -> tuple[np.ndarray, np.ndarray]:
    """The PTX manual's rule for shfl.sync, lane by lane: the result and its predicate."""
    result, predicate = values.copy(), np.zeros(32, bool)
    bval, cval, segmask = b & 31, c & 31, c >> 8 & 31
    for lane in range(32):
        high, low = (lane & segmask) | (cval & ~segmask), lane & segmask
        j = {"up": lane - bval, "down": lane + bval, "bfly": lane ^ bval, "idx": low | (bval & ~segmask)}[mode]
        predicate[lane] = j >= high if mode == "up" else j <= high
        result[lane] = values[j if predicate[lane] else lane]
    return result, predicate


@pytest.mark.parametrize("width", [32, 16, 8, 4])
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffle(mode, width):
    """Every distance, in segments of every width; a lane without a source keeps its own value and knows it."""
    c = (32 - width) << 8 | (0 if mode == "up" else 31)
    values = np.random.default_rng(2).integers(0, 2**31, 32).astype(i32)
    for b in (0, 1, 2, 3, 7, 8, 15, 16, 20, 31):
        code = f"""
            shfl.sync.{mode}.b32 %r3|%p0, %a, {b}, {c}, -1;
            selp.b32 %r4, 1, 0, %p0;
            mov.b64 %d, {{%r3, %r4}};
        """
        moved, predicate = apply(code, values, out=np.int64, diverge=False).view(i32).reshape(32, 2).T
        expected = shuffled(mode, values, b, c)
        np.testing.assert_array_equal(moved, expected[0], f"distance {b}")
        np.testing.assert_array_equal(predicate, expected[1], f"predicate at distance {b}")


def test_shuffle_with_a_clamp_inside_the_segment():
    """c's low bits bound the source lane: down by 3, no farther than lane 20."""
    values = np.arange(100, 132, dtype=i32)
    result = apply("shfl.sync.down.b32 %d, %a, 3, 20, 0xffffffff;", values, out=i32, diverge=False)
    np.testing.assert_array_equal(result, shuffled("down", values, 3, 20)[0])


def test_shuffle_from_a_lane_that_each_lane_chooses():
    """The source is a register; __shfl_sync wraps it into the width."""
    source = """
    extern "C" __global__ void k(const float* x, float* out) {
        int t = threadIdx.x;
        out[t] = __shfl_sync(~0u, x[t], (t * 7 + 3) % 64, 16) + 1000.f * __shfl_xor_sync(~0u, x[t], t & 32 ? 5 : 9);
    }"""
    x = np.arange(64, dtype=f32)
    lane, base = np.arange(64) % 32, np.arange(64) // 32 * 32
    chosen = base + (lane & 16) + ((np.arange(64) * 7 + 3) % 64) % 16
    expected = x[chosen] + 1000 * x[base + (lane ^ np.where(base > 0, 5, 9))]
    np.testing.assert_array_equal(run_cuda(source, [x, Out(64, f32)], block=64).out, expected)


def test_shuffle_inside_a_branch():
    """Half a warp exchanges among itself under a mask of its own."""
    source = """
    extern "C" __global__ void k(int* out) {
        int t = threadIdx.x, x = t * 10;
        if (t & 1) x = __shfl_xor_sync(0xaaaaaaaau, x, 2);
        else       x = __shfl_down_sync(0x55555555u, x, 4) + 1;
        out[t] = x;
    }"""
    even = np.where(LANE + 4 < 32, LANE + 4, LANE) * 10 + 1
    expected = np.where(LANE & 1, (LANE ^ 2) * 10, even)
    np.testing.assert_array_equal(run_cuda(source, [Out(32, i32)]).out, expected)


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffle_by_some_of_the_warps(mode):
    """Every other of twelve warps shuffles, the rest keep what they had; lane and clamp known or in registers."""
    values = np.random.default_rng(4).integers(1, 2**31, 384).astype(i32)
    c = 0 if mode == "up" else 31
    warp = np.arange(384) // 32
    expected = np.where(warp % 2, np.concatenate([shuffled(mode, row, 5, c)[0] for row in values.reshape(12, 32)]), -1)
    inside = np.where(warp % 2, np.tile(shuffled(mode, values[:32], 5, c)[1], 12), 0)
    for lane, clamp in (("5", str(c)), ("%r6", "%r7")):
        code = f"""
            mov.u32 %r3, -1;
            mov.u32 %r4, 0;
            shr.u32 %r5, %r2, 5;
            and.b32 %r5, %r5, 1;
            add.u32 %r6, %r5, 4;
            mul.lo.u32 %r7, %r5, {c};
            setp.eq.u32 %p1, %r5, 0;
            @%p1 bra $over;
            shfl.sync.{mode}.b32 %r3|%p0, %a, {lane}, {clamp}, -1;
            selp.b32 %r4, 1, 0, %p0;
        $over:
            mov.b64 %d, {{%r3, %r4}};
        """
        result = apply(code, values, out=np.int64, threads=384, diverge=False).view(i32).reshape(384, 2)
        np.testing.assert_array_equal(result[:, 0], expected)
        np.testing.assert_array_equal(result[:, 1], inside)


def test_warp_reduction():
    """The butterfly that every softmax uses, over five warps in two blocks."""
    source = """
    extern "C" __global__ void k(const float* x, float* out) {
        float v = x[blockIdx.x * blockDim.x + threadIdx.x], s = v;
        for (int d = 16; d; d >>= 1) { v = fmaxf(v, __shfl_xor_sync(~0u, v, d)); s += __shfl_xor_sync(~0u, s, d); }
        out[blockIdx.x * blockDim.x + threadIdx.x] = v * 1000 + s;
    }"""
    x = np.random.default_rng(3).integers(-50, 50, 320).astype(f32)
    rows = x.reshape(-1, 32)
    expected = np.repeat(rows.max(1) * 1000 + rows.sum(1), 32)
    np.testing.assert_array_equal(run_cuda(source, [x, Out(320, f32)], grid=2, block=160).out, expected)


# ---- votes -------------------------------------------------------------------------------------------------------


def test_votes():
    """ballot, any, all, uni over three warps: mixed, all false, all true."""
    flags = np.concatenate([LANE % 3 == 0, LANE < 0, LANE >= 0]).astype(i32)
    code = """
        setp.ne.s32 %p0, %a, 0;
        vote.sync.ballot.b32 %r3, %p0, -1;
        vote.sync.any.pred %p1, %p0, -1;
        vote.sync.all.pred %p2, %p0, -1;
        vote.sync.uni.pred %p3, %p0, -1;
        selp.b32 %r4, 1, 0, %p1;
        selp.b32 %r5, 2, 0, %p2;
        selp.b32 %r6, 4, 0, %p3;
        or.b32 %r4, %r4, %r5;
        or.b32 %r4, %r4, %r6;
        mov.b64 %d, {%r3, %r4};
    """
    ballot, votes = apply(code, flags, out=np.int64, threads=96, diverge=False).view(u32).reshape(96, 2).T
    mixed = sum(1 << lane for lane in range(0, 32, 3))
    np.testing.assert_array_equal(ballot, np.repeat(np.array([mixed, 0, 0xFFFFFFFF], u32), 32))
    np.testing.assert_array_equal(votes, np.repeat([1, 4, 7], 32))


def test_ballot_of_the_lanes_in_a_branch():
    """Lanes outside the mask count as false; activemask sees who is here."""
    source = """
    extern "C" __global__ void k(unsigned* out) {
        int t = threadIdx.x;
        unsigned r = 0;
        if (t < 12) r = __ballot_sync(0xfffu, t & 1);
        else if (t < 20) r = __any_sync(0xff000u, t == 19) ? 77 : 0;
        out[t] = r;
    }"""
    expected = np.where(LANE < 12, 0xAAA, np.where(LANE < 20, 77, 0))
    np.testing.assert_array_equal(run_cuda(source, [Out(32, u32)]).out, expected)


# ---- special registers -------------------------------------------------------------------------------------------


def test_indices_in_three_dimensions():
    """x runs fastest, in blocks and in the grid; lanes count through all of them."""
    source = """
    extern "C" __global__ void k(int* out) {
        int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
        int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
        int lane, warp;
        asm("mov.u32 %0, %%laneid;" : "=r"(lane));
        asm("mov.u32 %0, %%warpid;" : "=r"(warp));
        int* row = out + 8 * (block * (blockDim.x * blockDim.y * blockDim.z) + thread);
        row[0] = blockIdx.x; row[1] = blockIdx.y; row[2] = blockIdx.z;
        row[3] = threadIdx.x; row[4] = threadIdx.y; row[5] = threadIdx.z;
        row[6] = lane; row[7] = warp;
    }"""
    grid, block = (3, 2, 4), (5, 4, 3)
    out = run_cuda(source, [Out((24, 60, 8), i32)], grid=grid, block=block).out
    b, t = np.meshgrid(np.arange(24), np.arange(60), indexing="ij")
    expected = [b % 3, b // 3 % 2, b // 6, t % 5, t // 5 % 4, t // 20, t % 32, t // 32]
    np.testing.assert_array_equal(out, np.stack(expected, -1))


def test_dimensions_as_registers():
    """ntid and nctaid in x, y, z."""
    names = ["%ntid.x", "%ntid.y", "%ntid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z"]
    body = "ld.param.u64 %rd0, [p0];\n"
    body += "\n".join(f"mov.u32 %r0, {name}; st.global.u32 [%rd0+{4 * i}], %r0;" for i, name in enumerate(names))
    run = run_ptx(ptx_kernel(body), [Out(6, i32)], grid=(2, 3, 5), block=(8, 2, 2))
    np.testing.assert_array_equal(run.out, [8, 2, 2, 2, 3, 5])


def test_grid_larger_than_one_batch():
    """Thousands of small blocks: every one runs once."""
    source = (
        'extern "C" __global__ void k(int* out) { atomicAdd(out + blockIdx.x * 32 + threadIdx.x, blockIdx.x + 1); }'
    )
    out = run_cuda(source, [np.zeros((3000, 32), i32)], grid=3000).out
    np.testing.assert_array_equal(out, np.repeat(np.arange(1, 3001)[:, None], 32, 1))
