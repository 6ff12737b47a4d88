// forward_bf16_d192_dv128_causal_sm90_Br128_Bc48_w4_q0_lazy1_b2
// O = softmax(scale Q K^T) V, and of each row the max m and the sum l. A block owns Br query rows of a head.
//
// Rendered by flashsmith from forward.cu.j2.
// grid   Tr * Hq * B blocks, one for each tile of Br query rows, flat in x
// block  128 threads, 4 warps
// smem        0  Q_smem     51200 B  [128][192], rows of 400 B
//         51200  K_smem     19200 B  [48][192], rows of 400 B
//         70400  V_smem     13056 B  [48][128], rows of 272 B
//         83456  in all, dynamic

using u32 = unsigned int;
using i64 = long long;
using T = unsigned short;  // the bits of a __nv_bfloat16

// A tensor [batch, head, row, column]. Strides count elements, 64-bit; columns are contiguous.
template <typename E>
struct View {
    E* data;
    i64 batch, head, row;
};

// Byte distances in a tensor that is read tile after tile. They come as arguments, so that they are operands in constant
// memory and hold no register.
struct Walk {
    i64 pass;  // to the row that the same thread copies next
    i64 tile;  // to the next tile
};

constexpr int d = 192;  // head dimension of Q and K
constexpr int dv = 128;  // head dimension of V and O
constexpr int Br = 128;  // query rows of a block
constexpr int Bc = 48;  // keys of a K/V tile
constexpr int threads = 128;
constexpr int min_blocks = 2;  // blocks that an SM must be able to hold: bounds the registers of a thread
constexpr int q_steps = 0;  // steps of Q K^T whose Q stays in registers; for the others it is read again with each tile

constexpr int warp_rows = Br / (threads / 32);  // query rows of a warp
constexpr int m_tiles = warp_rows / 16;         // in tiles of 16, the height of an mma
constexpr int steps = (d + 15) / 16;            // of Q K^T: 16 columns of d each, the depth of an mma
constexpr int full_steps = d / 16;              // of them; an odd d / 8 leaves a half step
constexpr int copy_rows = threads / 8;          // rows of a copy pass

// What a thread holds of its warp's rows, for row 16 t + 8 h + lane / 4:
using Rows = float[m_tiles][2];            // [t][h], one number a row
using Scores = float[m_tiles][Bc / 8][4];  // [t][n][2 h + c], key 8 n + lane % 4 * 2 + c
using Outputs = float[m_tiles][dv / 8][4];  // [t][n][2 h + c], column 8 n + lane % 4 * 2 + c

// Operands of one step of a product, in the order that ldmatrix delivers:
using Q_step = u32[m_tiles][4];  // [t], 16 rows x 16 columns
using K_step = u32[Bc / 16][4];  // [n], 16 keys x 16 columns
using P_step = u32[m_tiles][4];  // [t], 16 rows x 16 keys
struct V_step {
    u32 columns[(dv + 15) / 16][4];  // [n], 16 keys x 16 columns
};

// D += A B, A [16, 16] row by row, B [16, 8] column by column, fp32 accumulators.
__device__ __forceinline__ void mma_m16n8k16(float (&D)[4], const u32 (&A)[4], u32 b0, u32 b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %0,%1,%2,%3}, { %4,%5,%6,%7}, { %8,%9}, { %0,%1,%2,%3};"
        : "+f"(D[0]), "+f"(D[1]), "+f"(D[2]), "+f"(D[3])
        : "r"(A[0]), "r"(A[1]), "r"(A[2]), "r"(A[3]), "r"(b0), "r"(b1));
}

// D = A B + C with C = [c0, c1] in rows 0-7 and [c2, c3] in rows 8-15: a chain starts without clearing D.
__device__ __forceinline__ void mma_m16n8k16(float (&D)[4], const u32 (&A)[4], u32 b0, u32 b1,
                                             float c0, float c1, float c2, float c3)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %0,%1,%2,%3}, { %4,%5,%6,%7}, { %8,%9}, { %10,%11,%12,%13};"
        : "=f"(D[0]), "=f"(D[1]), "=f"(D[2]), "=f"(D[3])
        : "r"(A[0]), "r"(A[1]), "r"(A[2]), "r"(A[3]), "r"(b0), "r"(b1), "f"(c0), "f"(c1), "f"(c2), "f"(c3));
}

// Four 8x8 matrices from shared memory; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void ldmatrix_x4(u32 (&R)[4], u32 address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0,%1,%2,%3}, [%4];"
                 : "=r"(R[0]), "=r"(R[1]), "=r"(R[2]), "=r"(R[3]) : "r"(address) : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&R)[4], u32 address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { %0,%1,%2,%3}, [%4];"
                 : "=r"(R[0]), "=r"(R[1]), "=r"(R[2]), "=r"(R[3]) : "r"(address) : "memory");
}

// 16 bytes, global to shared, past the registers. They are there after commit, wait and a barrier.
__device__ __forceinline__ void cp_async(u32 destination, const void* source)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(destination), "l"(source) : "memory");
}

// The same with the first `bytes` copied and the rest set to zero; bytes = 0 reads nothing.
__device__ __forceinline__ void cp_async_or_zero(u32 destination, const void* source, int bytes)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(destination), "l"(source), "r"(bytes) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// All but the newest `pending` groups of this thread have landed.
template <int pending>
__device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(pending) : "memory"); }

// Shared memory by 4, 8 and 16 bytes.
__device__ __forceinline__ float ld_shared(u32 address)
{
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    return x;
}

__device__ __forceinline__ void ld_shared_v2(float (&x)[2], u32 address)
{
    asm volatile("ld.shared.v2.f32 { %0,%1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "r"(address) : "memory");
}

__device__ __forceinline__ void ld_shared_v4(u32 (&x)[4], u32 address)
{
    asm volatile("ld.shared.v4.b32 { %0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void st_shared(u32 address, u32 x)
{
    asm volatile("st.shared.b32 [%0], %1;" :: "r"(address), "r"(x) : "memory");
}

__device__ __forceinline__ void st_shared_v4(u32 address, const u32 (&x)[4])
{
    asm volatile("st.shared.v4.b32 [%0], { %1,%2,%3,%4};"
                 :: "r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}

// 2^x; 2^-inf = 0.
__device__ __forceinline__ float ex2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// max(a, b); a NaN gives way to the other operand.
__device__ __forceinline__ float max_f32(float a, float b)
{
    float y;
    asm("max.ftz.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

// Two floats rounded to nearest even, `low` in the low half.
__device__ __forceinline__ u32 pack(float low, float high)
{
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// 1 / x to within one unit in the last place; 1 / 0 = inf.
__device__ __forceinline__ float rcp(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Address of the block's dynamic shared memory.
__device__ __forceinline__ u32 smem_base()
{
    extern __shared__ __align__(1024) char smem[];
    return static_cast<u32>(__cvta_generic_to_shared(smem));
}

// threadIdx.x and blockIdx.x, read anew at each call: what is computed from them need not be held in registers till then.
__device__ __forceinline__ int thread_index()
{
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}

__device__ __forceinline__ int block_index()
{
    int index;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
    return index;
}

// pointer + bytes, hidden from the compiler: it would otherwise compute the addresses of all copies ahead and hold each
// of them in two registers.
__device__ __forceinline__ const char* advance(const char* pointer, i64 bytes)
{
    asm("add.s64 %0, %0, %1;" : "+l"(pointer) : "l"(bytes));
    return pointer;
}

// Where [batch, head, row, column] lies. The strides are 64-bit, and so are all products.
template <typename E>
__device__ __forceinline__ E* at(const View<E>& X, int batch, int head, int row, int column)
{
    return X.data + batch * X.batch + head * X.head + row * X.row + column;
}

// A tile of 16-bit elements, [rows][width], each row padded to an odd number of 16-byte chunks: the 8 rows of an
// ldmatrix start in 8 different bank groups.
template <int rows_, int width>
struct PaddedTile {
    static constexpr int rows = rows_;
    static constexpr int row = (width / 8 | 1) * 16;  // bytes from row to row
    static constexpr int bytes = rows * row;

    // Where chunk c of row r lies, counted from the tile's start.
    static __device__ __forceinline__ u32 chunk(int r, int c) { return r * row + c * 16; }

    // From an address in the 16-column block 0 of a row to block x of the same row.
    static __device__ __forceinline__ u32 block(u32 address, int x) { return address + x * 32; }

    // From the left chunk of a block to the right one.
    static __device__ __forceinline__ u32 right(u32 address) { return address + 16; }
};

using Q_tile = PaddedTile<Br, d>;  // of Q, and then of O in its place
using KV_tile = PaddedTile<Bc, d>;
using V_tile = PaddedTile<Bc, dv>;
constexpr int row_bytes = KV_tile::row;

// Byte offsets in shared memory.
constexpr int Q_smem = 0;  // [128][192], rows of 400 B
constexpr int K_smem = 51200;  // [48][192], rows of 400 B
constexpr int V_smem = 70400;  // [48][128], rows of 272 B

// Copies a tile of width columns, eight threads (128 bytes) a row; rows from `left` on become zero and are not read.
// `destination` and `source` are this thread's own first chunk: row thread / 8, chunk thread % 8.
template <class Tile, int width>
__device__ __forceinline__ void copy_tile(u32 destination, const char* source, i64 pass, int left)
{
    const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
    #pragma unroll
    for (int r = 0; r < Tile::rows; r += copy_rows) {
        const int bytes = r + row < left ? 16 : 0;
        #pragma unroll
        for (int c = 0; c < width / 8; c += 8)
            // Only the last rows of a tile and the last chunks of a row leave threads without one.
            if ((r + copy_rows <= Tile::rows || r + row < Tile::rows) && (c + 8 <= width / 8 || c + chunk < width / 8))
                cp_async_or_zero(destination + r * Tile::row + Tile::block(0, c / 2), source + c * 16, bytes);
        source = advance(source, pass);
    }
}

// Copies a tile that lies wholly inside its tensor if it is `wanted`; else clears it and reads nothing.
template <class Tile, int width>
__device__ __forceinline__ void copy_or_clear(u32 destination, const char* source, i64 pass, bool wanted)
{
    const int row = threadIdx.x / 8, chunk = threadIdx.x % 8, bytes = wanted ? 16 : 0;
    #pragma unroll
    for (int r = 0; r < Tile::rows; r += copy_rows) {
        #pragma unroll
        for (int c = 0; c < width / 8; c += 8)
            if ((r + copy_rows <= Tile::rows || r + row < Tile::rows) && (c + 8 <= width / 8 || c + chunk < width / 8))
                cp_async_or_zero(destination + r * Tile::row + Tile::block(0, c / 2), source + c * 16, bytes);
        source = advance(source, pass);
    }
}

// Step x takes columns 16 x to 16 x + 15 of d.
__device__ __forceinline__ void load_Q(Q_step& Q, u32 Q_lane, int x)
{
    #pragma unroll
    for (int t = 0; t < m_tiles; ++t) ldmatrix_x4(Q[t], Q_lane + t * 16 * Q_tile::row + x * 32);
}

__device__ __forceinline__ void load_K(K_step& K, u32 K_lane, int x)
{
    #pragma unroll
    for (int n = 0; n < Bc / 16; ++n) ldmatrix_x4(K[n], K_lane + n * 16 * row_bytes + x * 32);
}

// S += Q K^T over one step, S = Q K^T if it is the first. The order is a serpentine: neighbours share Q or K, which the
// register file then delivers once.
__device__ __forceinline__ void multiply_QK(Scores& S, const Q_step& Q, const K_step& K, bool first)
{
    #pragma unroll
    for (int n = 0; n < Bc / 16; ++n)
        #pragma unroll
        for (int t = 0; t < m_tiles; ++t)
            #pragma unroll
            for (int turn = 0; turn < 2; ++turn) {
                const int e = (t + turn) % 2;  // the first or the second 8 of 16 keys
                if (first) mma_m16n8k16(S[t][2 * n + e], Q[t], K[n][2 * e], K[n][2 * e + 1], 0.f, 0.f, 0.f, 0.f);
                else mma_m16n8k16(S[t][2 * n + e], Q[t], K[n][2 * e], K[n][2 * e + 1]);
            }
}

// Step y takes keys 16 y to 16 y + 15 of the tile. V lies key by key, so its fragments are transposed on the way.
__device__ __forceinline__ void load_V(V_step& V, u32 V_lane, int y)
{
    #pragma unroll
    for (int n = 0; n < dv / 16; ++n) ldmatrix_x4_trans(V.columns[n], V_lane + y * 16 * V_tile::row + n * 32);
}

// O += P V over one step, in the order of multiply_QK.
__device__ __forceinline__ void multiply_PV(Outputs& O, const P_step& P, const V_step& V)
{
    #pragma unroll
    for (int n = 0; n < dv / 16; ++n)
        #pragma unroll
        for (int t = 0; t < m_tiles; ++t)
            #pragma unroll
            for (int turn = 0; turn < 2; ++turn) {
                const int e = (t + turn) % 2;  // the first or the second 8 of 16 columns
                mma_m16n8k16(O[t][2 * n + e], P[t], V.columns[n][2 * e], V.columns[n][2 * e + 1]);
            }
}

// Keys past a row's diagonal score -inf: a row sees one key more than the row above it, and the block's first row sees the
// tile's keys up to `last`.
__device__ __forceinline__ void mask(Scores& S, int last)
{
    const int thread = thread_index(), lane = thread % 32;
    #pragma unroll
    for (int t = 0; t < m_tiles; ++t)
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = thread / 32 * warp_rows + 16 * t + 8 * h + lane / 4;  // of the block
            const int room = last + row - lane % 4 * 2;  // the last of this thread's keys that the row sees
            #pragma unroll
            for (int n = 0; n < Bc / 8; ++n)
                #pragma unroll
                for (int c = 0; c < 2; ++c)
                    if (8 * n + c > room) S[t][n][2 * h + c] = -infinity();
        }
}

// The softmax of a row is measured against a reference m:  P = exp(scale (S - m)),  l = sum of P,  O = sum of P V.
// In base 2 it is P = 2^(scale_log2 S - shift) with shift = scale_log2 m: one fused multiply-add and one ex2 a score.
// When m grows to m_new, what was summed before is rescaled by alpha = exp(scale (m - m_new)).

// m of a row that has seen no key: no score is less, and finite, because (-inf) - (-inf) is NaN.
constexpr float lowest = -3.402823466e38f;

// Rounding shift moves exponents by up to 2^-24 |shift|: by 2^-11 at this limit, which real inputs stay below. The shift of
// a row that has seen no key is beyond it.
constexpr float max_shift = 8192.f;

// The max of a row over this thread's columns.
__device__ __forceinline__ float max_of_columns(const float (&S)[Bc / 8][4], int h)
{
    float top = max_f32(S[0][2 * h], S[0][2 * h + 1]);
    #pragma unroll
    for (int n = 1; n < Bc / 8; ++n) top = max_f32(max_f32(top, S[n][2 * h]), S[n][2 * h + 1]);
    return top;
}

// The max over the four lanes that share a row.
__device__ __forceinline__ float max_of_lanes(float x)
{
    x = max_f32(x, __shfl_xor_sync(~0u, x, 1));
    return max_f32(x, __shfl_xor_sync(~0u, x, 2));
}

// m follows the row max. True if a shift of this thread is huge.
__device__ __forceinline__ bool follow_max(Rows& m_new, Rows& alpha, Rows& shift, const Scores& S, const Rows& m,
                                           float scale_log2)
{
    bool huge = false;
    #pragma unroll
    for (int t = 0; t < m_tiles; ++t)
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            m_new[t][h] = max_of_lanes(max_f32(m[t][h], max_of_columns(S[t], h)));
            alpha[t][h] = ex2((m[t][h] - m_new[t][h]) * scale_log2);
            shift[t][h] = m_new[t][h] * scale_log2;
            huge |= fabsf(shift[t][h]) > max_shift;
        }
    return huge;
}

// A row keeps its m until a weight P would exceed 2^max_growth. P, l and O have the same relative precision either way.
constexpr float max_growth = 8.f;

// Sets shift for the m that rows have. True if a row of this thread has outgrown its m, or has a huge shift.
__device__ __forceinline__ bool keep_max(Rows& shift, const Scores& S, const Rows& m, float scale_log2)
{
    bool outgrown = false, huge = false;
    #pragma unroll
    for (int t = 0; t < m_tiles; ++t)
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            shift[t][h] = m[t][h] * scale_log2;
            outgrown |= (max_of_columns(S[t], h) - m[t][h]) * scale_log2 > max_growth;
            huge |= fabsf(shift[t][h]) > max_shift;
        }
    return outgrown | huge;
}

// Scores give way to their distance from the max, which is exactly 0 at the max, and no shift is left.
__device__ __forceinline__ void take_off_max(Scores& S, Rows& shift, const Rows& m_new)
{
    #pragma unroll
    for (int t = 0; t < m_tiles; ++t)
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            #pragma unroll
            for (int n = 0; n < Bc / 8; ++n)
                #pragma unroll
                for (int c = 2 * h; c < 2 * h + 2; ++c) S[t][n][c] -= m_new[t][h];
            shift[t][h] = 0.f;
        }
}

// What was summed against m is now measured against m_new.
__device__ __forceinline__ void rescale(Rows& m, Rows& l, Outputs& O, const Rows& m_new, const Rows& alpha)
{
    #pragma unroll
    for (int t = 0; t < m_tiles; ++t)
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            m[t][h] = m_new[t][h];
            l[t][h] *= alpha[t][h];
            #pragma unroll
            for (int n = 0; n < dv / 8; ++n) {
                O[t][n][2 * h] *= alpha[t][h];
                O[t][n][2 * h + 1] *= alpha[t][h];
            }
        }
}

// P of step y, 16 keys, in 16 bits; l grows by what P was before it was rounded. The accumulators of S lie in a thread as
// the left operand of O += P V must lie, so P needs no exchange.
__device__ __forceinline__ void weigh(P_step& P, Rows& l, const Scores& S, const Rows& shift, float scale_log2, int y)
{
    #pragma unroll
    for (int t = 0; t < m_tiles; ++t)
        #pragma unroll
        for (int e = 0; e < 2; ++e)
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float p0 = ex2(fmaf(S[t][2 * y + e][2 * h], scale_log2, -shift[t][h]));
                const float p1 = ex2(fmaf(S[t][2 * y + e][2 * h + 1], scale_log2, -shift[t][h]));
                l[t][h] += p0;
                l[t][h] += p1;
                P[t][2 * e + h] = pack(p0, p1);
            }
}

struct Place {
    int i0;  // the first query row
    int q_head, batch;
};

constexpr int cached_keys = 40960;  // keys whose K and V fill half of the L2 cache

// What a block works on. Blocks start in the order of their number, and late query tiles take longest, so all heads' last
// tiles should come first; but the heads in work at once share the L2 cache. So heads are dealt with in groups whose K and
// V take half of it, longest tiles first within a group. The last group takes the heads that are left over as well.
__device__ __forceinline__ Place place(int block, int Hq, int Hk, int Nq, int Nk)
{
    const int Tr = (Nq + Br - 1) / Br, matrices = gridDim.x / Tr;  // the B x Hq matrices of Q
    const int group = min(max(1, cached_keys / Nk) * (Hq / Hk), matrices);
    const int first = min(block / (Tr * group), matrices / group - 1) * group;
    const int members = first + 2 * group <= matrices ? group : matrices - first;
    const int tile = Tr - 1 - (block - first * Tr) / members, matrix = first + (block - first * Tr) % members;
    return {tile * Br, matrix % Hq, matrix / Hq};
}

extern "C" __global__ void __launch_bounds__(threads, min_blocks) forward(
    View<const T> Q,  // [B, Hq, Nq, d]
    View<const T> K,  // [B, Hk, Nk, d]
    View<const T> V,  // [B, Hk, Nk, dv]
    View<T> O,  // [B, Hq, Nq, dv]
    float* m,  // [B, Hq, Nq], max of the scaled scores of a row; -inf if it sees no key
    float* l,  // [B, Hq, Nq], sum of exp(S - m) of a row; 0 if it sees no key
    Walk K_walk,  // bytes between copy passes and between K tiles
    Walk V_walk,  // bytes between copy passes and between V tiles
    int Hq,  // query heads
    int Hk,  // key/value heads; query head h reads head h / (Hq / Hk)
    int Nq,  // query rows of a head
    int Nk,  // keys of a head
    float scale,  // of Q K^T
    float scale_log2)  // scale * log2(e): exp(scale * x) = exp2(scale_log2 * x)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 smem = smem_base();
    const Place here = place(block_index(), Hq, Hk, Nq, Nk);
    const int kv_head = here.q_head / (Hq / Hk);

    // Some row of the block sees the first seen_keys keys, in Tc tiles. Its first row, which sees least, sees keys 0 to last.
    const int seen_keys = min(here.i0 + Br, Nq) + Nk - Nq;
    const int last = here.i0 + Nk - Nq;
    const int Tc = seen_keys > 0 ? (seen_keys + Bc - 1) / Bc : 0;

    // The walk over K and V goes from the last tile to the first: only the last can be incomplete, and it is copied here. A
    // thread copies chunk thread % 8 of row thread / 8, and of every copy_rows-th row from there.
    const int copy_row = threadIdx.x / 8, copy_column = threadIdx.x % 8 * 8, k0 = (Tc - 1) * Bc;
    const u32 copy_smem = smem + KV_tile::chunk(copy_row, threadIdx.x % 8);
    const u32 copy_V = smem + V_tile::chunk(copy_row, threadIdx.x % 8);
    const u32 copy_Q = smem + Q_tile::chunk(copy_row, threadIdx.x % 8);
    const char* Q_gmem = reinterpret_cast<const char*>(at(Q, here.batch, here.q_head, here.i0 + copy_row, copy_column));
    const char* K_gmem = reinterpret_cast<const char*>(at(K, here.batch, kv_head, k0 + copy_row, copy_column));
    const char* V_gmem = reinterpret_cast<const char*>(at(V, here.batch, kv_head, k0 + copy_row, copy_column));
    const int keys_left = Tc > 0 ? Nk - k0 : 0;
    copy_tile<Q_tile, d>(copy_Q + Q_smem, Q_gmem, copy_rows * Q.row * static_cast<i64>(sizeof(T)), Nq - here.i0);
    copy_tile<KV_tile, d>(copy_smem + K_smem, K_gmem, K_walk.pass, keys_left);
    cp_async_commit();
    copy_tile<V_tile, dv>(copy_V + V_smem, V_gmem, V_walk.pass, keys_left);
    cp_async_commit();

    Outputs O_rmem = {};
    Rows m_rmem, l_rmem = {};
    #pragma unroll
    for (int t = 0; t < m_tiles; ++t) m_rmem[t][0] = m_rmem[t][1] = lowest;

    // The row of an 8x8 matrix whose address this lane gives to ldmatrix. The four matrices of Q are rows 0-7 and 8-15 of
    // columns 0-7, then of columns 8-15; of K columns 0-7 and 8-15 of keys 0-7, then of keys 8-15; of V as of Q.
    const u32 Q_lane = smem + Q_smem + Q_tile::chunk(warp * warp_rows + lane % 16, lane / 16);
    const u32 K_lane = smem + K_smem + KV_tile::chunk(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    const u32 V_lane = smem + V_smem + V_tile::chunk(lane % 16, lane / 16);
    Q_step Q_rmem[steps];
    K_step K_rmem[steps];

    cp_async_wait<1>();
    __syncthreads();  // Q and the last tile of K have been written by all threads
    #pragma unroll
    for (int x = 0; x < q_steps; ++x) load_Q(Q_rmem[x], Q_lane, x);
    if (full_steps > 0 && q_steps == 0) load_Q(Q_rmem[0], Q_lane, 0);
    if (full_steps > 0) load_K(K_rmem[0], K_lane, 0);

    int j = Tc - 1;  // the tile
    Scores S;
    Rows shift;

    // S = Q K^T    [warp_rows, Bc] = [warp_rows, d] [d, Bc]
    // On entry K_smem holds tile j, V_smem is being filled with it, and the operands of step 0 are in registers; those of
    // the other steps are loaded under the products of the step before.
    auto score = [&] {
        #pragma unroll
        for (int x = 0; x < steps - 1; ++x) {
            if (x + 1 < full_steps && x + 1 >= q_steps) load_Q(Q_rmem[x + 1], Q_lane, x + 1);
            if (x + 1 < full_steps) load_K(K_rmem[x + 1], K_lane, x + 1);
            multiply_QK(S, Q_rmem[x], K_rmem[x], x == 0);
        }

        // The last products of S take their operands from registers. So they can wait until the barrier has started the
        // next copy, and hide its cost.
        cp_async_wait<0>();
        __syncthreads();  // K(j) has been read by all warps and may be overwritten; V(j) has been written by all threads
        K_gmem -= K_walk.tile;
        copy_or_clear<KV_tile, d>(copy_smem + K_smem, K_gmem, K_walk.pass, j > 0);
        cp_async_commit();
        multiply_QK(S, Q_rmem[steps - 1], K_rmem[steps - 1], steps == 1);
    };

    // P = exp(scale (S - m)), O += P V    [warp_rows, d] += [warp_rows, Bc] [Bc, d], and on to the next tile
    auto accumulate = [&] {
        P_step P[Bc / 16];
        V_step V_rmem[Bc / 16];
        #pragma unroll
        for (int y = 0; y < Bc / 16; ++y) weigh(P[y], l_rmem, S, shift, scale_log2, y);
        #pragma unroll
        for (int y = 0; y < Bc / 16 - 1; ++y) {
            load_V(V_rmem[y], V_lane, y);
            multiply_PV(O_rmem, P[y], V_rmem[y]);
        }
        load_V(V_rmem[Bc / 16 - 1], V_lane, Bc / 16 - 1);

        // The last products of O hide the next copy, and the loads of the next tile's first operands.
        cp_async_wait<0>();
        __syncthreads();  // V(j) has been read by all warps and may be overwritten; K(j - 1) has been written by all threads
        V_gmem -= V_walk.tile;
        copy_or_clear<V_tile, dv>(copy_V + V_smem, V_gmem, V_walk.pass, j > 0);
        cp_async_commit();
        if (full_steps > 0 && q_steps == 0) load_Q(Q_rmem[0], Q_lane, 0);
        if (full_steps > 0) load_K(K_rmem[0], K_lane, 0);
        multiply_PV(O_rmem, P[Bc / 16 - 1], V_rmem[Bc / 16 - 1]);
        --j;
    };

    // The inner loop, over ordinary tiles, holds nothing but what they need. A warp leaves it with the scores of a tile that
    // needs more: a mask, a new m, care for huge scores. It does so by vote: the products need all lanes.
    auto masked = [&] { return (j + 1) * Bc - 1 > last; };
    auto walk = [&] {
        while (j >= 0) {
            #pragma unroll 1
            for (;;) {
                score();
                const bool special = keep_max(shift, S, m_rmem, scale_log2);
                if (__any_sync(~0u, special | masked())) break;
                accumulate();
                if (j < 0) return;
            }
            Rows m_new, alpha;
            if (masked()) mask(S, last - j * Bc);
            const bool huge = follow_max(m_new, alpha, shift, S, m_rmem, scale_log2);
            if (__any_sync(~0u, huge)) take_off_max(S, shift, m_new);
            rescale(m_rmem, l_rmem, O_rmem, m_new, alpha);
            accumulate();
        }
    };
    walk();

    // m, l and O / l. The block's place is worked out again rather than held in registers through the loop.
    const Place there = place(block_index(), Hq, Hk, Nq, Nk);
    const int thread = thread_index(), row0 = thread / 32 * warp_rows, quad = thread % 32 / 4, member = thread % 4;
    const u32 O_smem = smem_base() + Q_smem + row0 * Q_tile::row;  // nobody but this warp has read these rows
    #pragma unroll
    for (int t = 0; t < m_tiles; ++t)
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            float sum = l_rmem[t][h];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            const int row = 16 * t + 8 * h + quad, i = there.i0 + row0 + row;
            if (member == 0 && i < Nq) {
                const i64 index = (static_cast<i64>(there.batch) * Hq + there.q_head) * Nq + i;
                m[index] = sum == 0.f ? -infinity() : __fmul_rn(m_rmem[t][h], scale);
                l[index] = sum;
            }
            const float inverse = sum == 0.f ? 0.f : rcp(sum);  // a row that saw no key is 0; NaN stays NaN
            #pragma unroll
            for (int n = 0; n < dv / 8; ++n)
                st_shared(O_smem + Q_tile::chunk(row, n) + member * 4,
                          pack(O_rmem[t][n][2 * h] * inverse, O_rmem[t][n][2 * h + 1] * inverse));
        }

    __syncwarp();  // the warp's rows of O have been written by all its lanes; they go out 16 bytes a lane
    #pragma unroll
    for (int r = 0; r < warp_rows; r += 4)
        #pragma unroll
        for (int c = 0; c < dv / 8; c += 8) {
            const int row = r + thread % 32 / 8, chunk = c + thread % 8, i = there.i0 + row0 + row;
            if (i < Nq && chunk < dv / 8) {
                u32 part[4];
                ld_shared_v4(part, O_smem + Q_tile::chunk(row, chunk));
                *reinterpret_cast<uint4*>(at(O, there.batch, there.q_head, i, chunk * 8)) =
                    make_uint4(part[0], part[1], part[2], part[3]);
            }
        }
    cp_async_wait<0>();  // no copy outlives its block
}
