"""Small CUDA texts for these tests, and NVRTC to compile them; no GPU is needed."""

from functools import cache

import pytest

# Rows of A stay in registers; tiles of B stream through double-buffered shared memory; S = A B^T, summed exponentials.
# The copy of the next tile hides behind a branch, the loop may be masked, and an outer loop may run it again and again.
SCORES = r"""
typedef unsigned int u32;
#define UNROLL _Pragma("unroll")
const int d = 64, row_bytes = 2 * d + 16;     // padded: eight rows of an ldmatrix hit eight bank groups
__device__ __forceinline__ void mma(float* c, const u32* a, const u32* b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void ldmatrix(u32* r, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
    : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void copy_tile(u32 to, const char* from, int tid) {
  UNROLL for (int row = 0; row < Bc; row += warps * 4)   // eight threads a row of 128 bytes
    asm volatile("cp.async.cg.shared.global [%0],[%1],16;"
      :: "r"(to + (row + tid / 8) * row_bytes + tid % 8 * 16), "l"(from + row * 2 * d + tid * 16) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <bool masked>
__device__ __forceinline__ void tile(u32 B, const u32 (*A)[4][4], float* sum, int j) {
  const int lane = threadIdx.x & 31;
  float S[m_tiles][Bc / 8][4] = {};
  UNROLL for (int n = 0; n < Bc / 16; n++) UNROLL for (int k = 0; k < 4; k++) {
    u32 b[4];
    ldmatrix(b, B + ((lane & 7) + (lane >> 4) * 8 + n * 16) * row_bytes + ((lane >> 3) & 1) * 16 + k * 32);
    UNROLL for (int m = 0; m < m_tiles; m++) { mma(S[m][2 * n], A[m][k], b); mma(S[m][2 * n + 1], A[m][k], b + 2); }
  }
#if RARE
  if (__any_sync(~0u, S[0][0][0] > 1e30f)) {   // rescue of large scores
    float top = 0.f;
    UNROLL for (int m = 0; m < m_tiles; m++) UNROLL for (int n = 0; n < Bc / 8; n++) UNROLL for (int c = 0; c < 4; c++)
      top = fmaxf(top, S[m][n][c]);
    UNROLL for (int m = 0; m < m_tiles; m++) UNROLL for (int n = 0; n < Bc / 8; n++) UNROLL for (int c = 0; c < 4; c++)
      S[m][n][c] -= top;
  }
#endif
  UNROLL for (int m = 0; m < m_tiles; m++) UNROLL for (int n = 0; n < Bc / 8; n++) UNROLL for (int c = 0; c < 4; c++) {
    float e;
    if (masked && j * Bc + n * 8 + (lane & 3) * 2 + (c & 1) > (int)threadIdx.x) S[m][n][c] = -1e30f;
    asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(e) : "f"(S[m][n][c]));
    sum[m] += e;
  }
}
extern "C" __global__ void __launch_bounds__(warps * 32, 1)
scores(const char* A_gmem, const char* B_gmem, float* out, int tiles, int unmasked, int heads) {
  extern __shared__ __align__(128) char smem[];
  const int tid = threadIdx.x, lane = tid & 31;
  const u32 B = (u32)__cvta_generic_to_shared(smem);
  u32 A[m_tiles][4][4];
  UNROLL for (int m = 0; m < m_tiles; m++) UNROLL for (int k = 0; k < 4; k++) UNROLL for (int r = 0; r < 4; r++)
    A[m][k][r] = ((const u32*)A_gmem)[(((blockIdx.x * warps + tid / 32) * m_tiles + m) * 16 + k * 4 + r) * 32 + lane];
  float sum[m_tiles] = {};
#if OUTER
  #pragma unroll 1
  for (int h = 0; h < heads; h++, B_gmem += (long long)tiles * Bc * 2 * d)
#endif
  {
  copy_tile(B, B_gmem, tid);
  int j = 0;
#if MASKED_LOOP
  #pragma unroll 1
  for (; j < tiles - unmasked; j++) {
    asm volatile("cp.async.wait_group 0;" ::: "memory"); __syncthreads();
    if (j + 1 < tiles) copy_tile(B + (j + 1) % 2 * Bc * row_bytes, B_gmem + (j + 1) * Bc * 2 * d, tid);
    tile<true>(B + j % 2 * Bc * row_bytes, A, sum, j);
  }
#endif
  #pragma unroll 1
  for (; j < tiles; j++) {
    asm volatile("cp.async.wait_group 0;" ::: "memory"); __syncthreads();
    if (j + 1 < tiles) copy_tile(B + (j + 1) % 2 * Bc * row_bytes, B_gmem + (j + 1) * Bc * 2 * d, tid);
    tile<false>(B + j % 2 * Bc * row_bytes, A, sum, j);
  }
  }
  UNROLL for (int m = 0; m < m_tiles; m++) out[(blockIdx.x * m_tiles + m) * warps * 32 + tid] = sum[m];
}
"""

SCALE = r"""
extern "C" __global__ void scale(float* x, float by) {   // line 2
  __shared__ float row[256];
  row[threadIdx.x] = x[blockIdx.x * 256 + threadIdx.x];
  __syncthreads();
  x[blockIdx.x * 256 + threadIdx.x] = by * row[255 - threadIdx.x];
}
"""

# A vector of 80 live floats under 32 registers a thread: ptxas has to spill.
SPILLS = r"""
extern "C" __global__ void __launch_bounds__(1024, 2) spills(float* x, int n) {
  float v[80];
  #pragma unroll
  for (int i = 0; i < 80; i++) v[i] = x[i * 1024 + threadIdx.x];
  for (int k = 0; k < n; k++)
    #pragma unroll
    for (int i = 0; i < 80; i++) v[i] = v[i] * v[(i + 7) % 80] + 1.f;
  #pragma unroll
  for (int i = 0; i < 80; i++) x[i * 1024 + threadIdx.x] = v[i];
}
"""


@cache
def compile_cubin(text: str, sm: int | str, *options: str) -> tuple[bytes, str]:
    """(cubin, what ptxas says with -v)"""
    nvrtc = pytest.importorskip("cupy.cuda").nvrtc
    program = nvrtc.createProgram(text, "kernel.cu", [], [])
    nvrtc.compileProgram(program, ["--std=c++17", f"-arch=sm_{sm}", "--ptxas-options=-v", *options])
    log = nvrtc.getProgramLog(program)
    return nvrtc.getCUBIN(program) + b"\0", log  # getCUBIN drops the last byte


def compile_scores(
    sm: int,
    *,
    Bc: int = 64,
    warps: int = 4,
    m_tiles: int = 2,
    outer: bool = False,
    masked: bool = False,
    rare: bool = False,
) -> bytes:
    """`scores` for blocks of 16 * m_tiles * warps rows."""
    constants = f"const int Bc = {Bc}, warps = {warps}, m_tiles = {m_tiles};\n"
    flags = (f"-DOUTER={int(outer)}", f"-DMASKED_LOOP={int(masked)}", f"-DRARE={int(rare)}")
    return compile_cubin(constants + SCORES, sm, *flags)[0]
