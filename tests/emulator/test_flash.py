"""A kernel of the kind that the emulator exists for, whole: cp.async, ldmatrix, mma, shuffles; and mutants of it.

Each mutant is a mistake that people make. The numbers, the race detector or a counter must show it."""

from __future__ import annotations

import numpy as np
import pytest
from flashsmith.emulator import Misaligned, OutOfBounds

from .conftest import Out, Run, run_cuda

f16, f32, f64 = np.float16, np.float32, np.float64
D, TILE = 64, 64

# Two heads of a causal forward, 64 queries and 64 keys a tile, K double-buffered, rows of 128 bytes swizzled.
# /*name*/ marks the places where the mutants below change the text.
SOURCE = r"""
typedef unsigned int u32;
#define INF __int_as_float(0x7f800000)

__device__ void mma(float* d, const u32* a, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ void ldmatrix(u32* r, u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ void ldmatrix_trans(u32* r, u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ u32 pack(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ float ex2(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
__device__ float lg2(float x) { float r; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
__device__ u32 at(u32 base, int row, int chunk) { return base + row * 128 + ((chunk /*swizzle*/ ^ (row & 7)) << 4); }
__device__ void load_tile(u32 to, const char* from, int tile, int n) {
    for (int i = 0; i < 4; i++) {
        const int c = threadIdx.x + i * 128, row = c >> 3, chunk = c & 7, bytes = tile * 64 + row < n ? 16 : 0;
        const char* source = from + ((long long)tile * 64 + row) * 128 + chunk * 16;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
            :: "r"(at(to, row, chunk)), "l"(source), "r"(/*fill*/bytes) : "memory");
    }
}
#define COMMIT asm volatile("cp.async.commit_group;" ::: "memory")
#define WAIT(n) asm volatile("cp.async.wait_group %0;" :: "n"(n) : "memory")
#define SYNC __syncthreads()

extern "C" __global__ void __launch_bounds__(128)
forward(const char* Q, const char* K, const char* V, u32* O, float* lse, int n, float scale) {
    extern __shared__ __align__(128) char smem[];
    const u32 sQ = (u32)__cvta_generic_to_shared(smem), sK = sQ + 8192, sV = sK + 2 * 8192;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, tile = blockIdx.x;
    const long long head = (long long)blockIdx.y * n;
    Q += head * 128; K += head * 128; V += head * 128; O += head * 32; lse += head;
    load_tile(sQ, Q, tile, n);
    load_tile(sK, K, 0, n);
    COMMIT;
    u32 q[4][4];
    float o[8][4] = {}, m[2] = {-INF, -INF}, l[2] = {0, 0};
    for (int j = 0; j <= tile; j++) {
        load_tile(sV, V, j, n);
        COMMIT;
        WAIT(/*wait for K*/1);
        SYNC; /*K is here*/
        if (j == 0) for (int k = 0; k < 4; k++) ldmatrix(q[k], at(sQ, warp * 16 + (lane & 15), k * 2 + (lane >> 4)));
        float s[8][4] = {};
        for (int k = 0; k < 4; k++)
            for (int c = 0; c < 4; c++) {
                u32 b[4];
                const int row = c * 16 + (lane & 7) + ((lane >> 4) << 3);
                ldmatrix(b, at(sK + (j & 1) * 8192, row, k * 2 + ((lane >> 3) & 1)));
                mma(s[2 * c], q[k], b[0], b[1]);
                mma(s[2 * c + 1], q[k], b[2], b[3]);
            }
        if (j < tile) load_tile(sK + (/*buffer*/(j + 1) & 1) * 8192, K, j + 1, n);
        COMMIT;
        for (int h = 0; h < 2; h++) {
            float top = m[h], sum = 0;
            for (int c = 0; c < 8; c++)
                for (int e = 0; e < 2; e++) {
                    const int key = j * 64 + c * 8 + (lane & 3) * 2 + e;
                    const int row = tile * 64 + warp * 16 + (lane >> 2) + h * 8;
                    float& x = s[c][2 * h + e];
                    x = key /*mask*/<= row && key < n ? x * scale : -INF;
                    top = fmaxf(top, x);
                }
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2)); /*second shuffle*/
            const float alpha = ex2(m[h] - top);
            m[h] = top;
            for (int c = 0; c < 8; c++)
                for (int e = 0; e < 2; e++) {
                    float& x = s[c][2 * h + e];
                    x = ex2(x - top);
                    sum += x;
                    o[c][2 * h + e] *= alpha;
                }
            l[h] = l[h] /*rescale*/* alpha + sum;
        }
        WAIT(/*wait for V*/1);
        SYNC; /*V is here*/
        for (int k = 0; k < 4; k++) {
            const u32 p[4] = {pack(s[2 * k][0], s[2 * k][1]), pack(s[2 * k][2], s[2 * k][3]),
                              pack(s[2 * k + 1][0], s[2 * k + 1][1]), pack(s[2 * k + 1][2], s[2 * k + 1][3])};
            for (int c = 0; c < 4; c++) {
                u32 b[4];
                ldmatrix_trans(b, at(sV, k * 16 + (lane & 7) + ((lane >> 3) & 1) * 8, c * 2 + (lane >> 4)));
                mma(o[2 * c], p, b[0], b[1]);
                mma(o[2 * c + 1], p, b[2], b[3]);
            }
        }
        SYNC; /*V is free*/
    }
    for (int h = 0; h < 2; h++) {
        l[h] += __shfl_xor_sync(~0u, l[h], 1);
        l[h] += __shfl_xor_sync(~0u, l[h], 2);
        const int row = tile * 64 + warp * 16 + (lane >> 2) + h * 8;
        if (/*tail*/row < n) {
            for (int c = 0; c < 8; c++)
                O[row * 32 + c * 4 + (lane & 3)] = pack(o[c][2 * h] / l[h], o[c][2 * h + 1] / l[h]);
            if ((lane & 3) == 0) lse[row] = (m[h] + lg2(l[h])) * 0.69314718f;
        }
    }
}
"""


def inputs(n: int) -> list[np.ndarray]:
    """Q, K, V of two heads, with means off zero."""
    rng = np.random.default_rng(0)
    return [(rng.standard_normal((2, n, D)) + 0.3).astype(f16) for _ in range(3)]


def run_flash(n: int, source: str = SOURCE, *, shared_bytes: int = 4 * 8192, check_races: bool = True) -> Run:
    """Launch the kernel or a mutant."""
    scale = D**-0.5 * np.log2(np.e)
    outs = [Out((2, n, D), f16), Out((2, n), f32)]
    grid = (-(-n // TILE), 2, 1)
    args = [*inputs(n), *outs, n, scale]
    return run_cuda(source, args, grid=grid, block=128, shared_bytes=shared_bytes, check_races=check_races)


def reference(n: int) -> tuple[np.ndarray, np.ndarray]:
    """O and lse in float64."""
    q, k, v = (x.astype(f64) for x in inputs(n))
    s = np.where(np.tri(n, dtype=bool), q @ k.swapaxes(1, 2) * D**-0.5, -np.inf)
    m = s.max(-1, keepdims=True)
    e = np.exp(s - m)
    return e @ v / e.sum(-1, keepdims=True), (m + np.log(e.sum(-1, keepdims=True)))[..., 0]


def is_right(run: Run, n: int) -> bool:
    """As close to float64 as half-precision inputs allow."""
    o, lse = reference(n)
    with np.errstate(invalid="ignore"):
        return bool(np.abs(run.arrays[-2] - o).max() < 4e-3 and np.abs(run.arrays[-1] - lse).max() < 1e-5)


@pytest.mark.parametrize("n", [1, 64, 100, 192, 250])
def test_forward(n):
    """Whole tiles and tails: right, in bounds, without a race."""
    run = run_flash(n)
    assert is_right(run, n)
    assert run.report.race_count == 0


def test_forward_in_closed_form():
    """Four tiles, two heads: everything that can be counted with a pencil."""
    n, heads, tiles = 256, 2, 4
    pairs = heads * tiles * (tiles + 1) // 2  # of a query tile and a key tile
    report = run_flash(n).report
    assert report.tensor_flops == pairs * 2 * (2 * 64 * 64 * 64)
    assert report.instructions["tensor"] == pairs * 4 * 64
    assert report.async_copied_bytes == (heads * tiles + 2 * pairs) * 8192
    assert report.global_read_bytes == report.async_copied_bytes
    assert report.global_written_bytes == heads * n * (2 * D + 4)
    assert report.barriers == 3 * pairs
    assert report.instructions["barrier"] == 4 * 3 * pairs
    assert report.instructions["shuffle"] == 4 * (pairs * 4 + heads * tiles * 4)


def test_swizzle_avoids_bank_conflicts():
    """No conflict with it; without it every ldmatrix takes eight times as long, and the results are the same."""
    swizzled, plain = run_flash(64), run_flash(64, SOURCE.replace("/*swizzle*/ ^ (row & 7)", ""))
    assert swizzled.report.bank_conflicts == 0
    assert plain.report.shared_wavefronts_ideal == swizzled.report.shared_wavefronts_ideal
    assert plain.report.bank_conflicts > 3 * plain.report.shared_wavefronts_ideal
    np.testing.assert_array_equal(swizzled.arrays[-2], plain.arrays[-2])


WRONG = {
    "no wait for K": ("WAIT(/*wait for K*/1)", ""),
    "a weak wait for K": ("WAIT(/*wait for K*/1)", "WAIT(2)"),
    "no wait for V": ("WAIT(/*wait for V*/1)", ""),
    "a weak wait for V": ("WAIT(/*wait for V*/1)", "WAIT(2)"),
    "the wrong K buffer": ("/*buffer*/(j + 1)", "(j + 2)"),
    "a mask off by one": ("/*mask*/<=", "<"),
    "a shuffle forgotten": ("top = fmaxf(top, __shfl_xor_sync(~0u, top, 2)); /*second shuffle*/", ""),
    "l not rescaled": ("/*rescale*/* alpha", ""),
    "pack the wrong way round": (': "f"(high), "f"(low)', ': "f"(low), "f"(high)'),
    "ldmatrix of V without .trans": ("m8n8.x4.trans.shared", "m8n8.x4.shared"),
    "rows of half a tile": ("warp * 16 + (lane & 15)", "warp * 16 + (lane & 7)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_mutant_gives_wrong_numbers(case):
    """A mistake in the arithmetic or in the order of asynchronous copies reaches O or lse."""
    old, new = WRONG[case]
    assert old in SOURCE
    assert not is_right(run_flash(250, SOURCE.replace(old, new), check_races=False), 250)


RACY = {
    "no barrier after the wait for K": "SYNC; /*K is here*/",
    "no barrier after the wait for V": "SYNC; /*V is here*/",
    "no barrier before V is loaded again": "SYNC; /*V is free*/",
}


@pytest.mark.parametrize("case", RACY)
def test_mutant_without_a_barrier_is_a_race(case):
    """The numbers may still be right in lock step; on a GPU they would be luck."""
    assert RACY[case] in SOURCE
    assert run_flash(250, SOURCE.replace(RACY[case], "")).report.race_count > 0


FAULTY = {
    "no bounds check on the store": (("/*tail*/row < n", "true"), 4 * 8192),
    "no zero fill": (("/*fill*/bytes", "16"), 4 * 8192),
    "too little shared memory": (("", ""), 4 * 8192 - 16),
    "a misaligned copy": (("+ chunk * 16;", "+ chunk * 16 + 8;"), 4 * 8192),
}


@pytest.mark.parametrize("case", FAULTY)
def test_mutant_faults(case):
    """Outside a tensor, outside shared memory, off alignment: the launch stops."""
    (old, new), shared_bytes = FAULTY[case]
    assert old in SOURCE
    with pytest.raises(Misaligned if "misaligned" in case else OutOfBounds):
        run_flash(250, SOURCE.replace(old, new) if old else SOURCE, shared_bytes=shared_bytes)
