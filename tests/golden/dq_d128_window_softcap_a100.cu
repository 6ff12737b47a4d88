// dq_bf16_d128_left_shifted_mod5879c901_sm80_Br128_Bc64_w8_sl0_s2_qreg1_weave0_b1_o1
// dQ of one Q tile, summed in registers: the same bits in every run.
// With left, shifted, score_mod '2.0 * tanh(score / 2.0)'.
//
// Rendered by flashsmith from query_block.cu.j2.
// grid   B * Hq * Tr: batch, query head, Q tile, flat in x
// block  256 threads, 8 warps
// smem        0  Q_smem     32768 B  [128][128]
//         32768  dO_smem    32768 B  [128][128]
//         65536  K_smem     32768 B  [2][64][128]
//         98304  V_smem     32768 B  [2][64][128]
//        131072  in all, dynamic

// The second half of the split backward. As in the forward, a warp owns query rows and the block walks the keys; S and
// dP are computed again, and what the tensor cores leave in registers, dS, is the A operand of dQ += dS K as it is.

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

constexpr int d = 128;  // head dimension
constexpr int columns = 128;  // of a row in shared memory: d in whole 16-column blocks, the rest zero
constexpr int Br = 128;  // query rows of this block
constexpr int Bc = 64;  // keys of a K/V tile
constexpr int warps = 8;
constexpr int threads = 32 * warps;
constexpr int stages = 2;  // buffers of K and V
constexpr int copy_rows = threads / 8;  // rows of a copy pass

// What a warp owns, in blocks of 16 x 16.
constexpr int row_blocks = Br / warps / 16;  // its query rows
constexpr int slice = 64;  // keys at once
constexpr int own_blocks = columns / 16;  // its columns of dQ: all

// Bytes from the start of shared memory.
constexpr int Q_smem = 0;  // [128][128]
constexpr int dO_smem = 32768;  // [128][128]
constexpr int K_smem = 65536;  // [2][64][128]
constexpr int V_smem = 98304;  // [2][64][128]

constexpr int K_to_V = V_smem - K_smem;  // from a place in a K tile to the same place in its V tile
constexpr int Q_to_dO = dO_smem - Q_smem;

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

// pointer + bytes, hidden from the compiler: it would otherwise compute the addresses of all copies ahead and hold each
// of them in two registers.
__device__ __forceinline__ const char* advance(const char* pointer, i64 bytes)
{
    asm("add.s64 %0, %0, %1;" : "+l"(pointer) : "l"(bytes));
    return pointer;
}

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

// threadIdx.x and blockIdx.x, read anew at each call: what is computed from them need not be held in registers till then.
__device__ __forceinline__ int thread_index()
{
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    __builtin_assume(index >= 0);  // so that it is divided by shifts alone
    return index;
}

__device__ __forceinline__ int block_index()
{
    int index;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
    return index;
}

// Address of the block's dynamic shared memory.
__device__ __forceinline__ u32 smem_base()
{
    extern __shared__ __align__(1024) char smem[];
    return static_cast<u32>(__cvta_generic_to_shared(smem));
}

// Where [batch, head, row, column] lies. The strides are 64-bit, and so are all products.
template <typename E>
__device__ __forceinline__ E* at(const View<E>& X, int batch, int head, int row, int column)
{
    return X.data + batch * X.batch + head * X.head + row * X.row + column;
}

// A tile of 16-bit elements in panels of 64 columns, [width / 64][rows][64], 128 bytes a row. Chunk c (16 bytes) of row
// r stands at place c ^ (r % 8): the 8 rows of an ldmatrix start in 8 different bank groups, and no byte is lost.
template <int rows_, int width>
struct SwizzledTile {
    static constexpr int rows = rows_;
    static constexpr int row = 128;  // bytes from row to row; 8 rows further a chunk has the same place
    static constexpr int bytes = rows * width * 2;

    // Where chunk c of row r lies, counted from the tile's start.
    static __device__ __forceinline__ u32 chunk(int r, int c)
    {
        return c / 8 * (rows * row) + r * row + (((c % 8) ^ (r % 8)) << 4);
    }

    // From an address in the 16-column block 0 of a row to block x of the same row. Tiles start on 128 bytes, so that
    // the XOR moves bits 5 and 6 alone, and rows and panels stay immediate offsets.
    static __device__ __forceinline__ u32 block(u32 address, int x)
    {
        return (address ^ ((x % 4) << 5)) + x / 4 * (rows * row);
    }

    // From the left chunk of a block to the right one.
    static __device__ __forceinline__ u32 right(u32 address) { return address ^ 16; }
};

using Q_tile = SwizzledTile<Br, columns>;  // Q and dO
using K_tile = SwizzledTile<Bc, columns>;  // K and V

// Copies a tile of d columns, eight threads (128 bytes) a row; rows from `left` on become zero and are not read.
// `destination` and `source` are this thread's own first chunk: row thread / 8, chunk thread % 8.
template <class Tile>
__device__ __forceinline__ void copy_tile(u32 destination, const char* source, i64 pass, int left)
{
    const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
    #pragma unroll
    for (int r = 0; r < Tile::rows; r += copy_rows) {
        const int bytes = r + row < left ? 16 : 0;
        #pragma unroll
        for (int c = 0; c < d / 8; c += 8)
            // Only the last rows of a tile and the last chunks of a row leave threads without one.
            if ((r + copy_rows <= Tile::rows || r + row < Tile::rows) && (c + 8 <= d / 8 || c + chunk < d / 8))
                cp_async_or_zero(destination + r * Tile::row + Tile::block(0, c / 2), source + c * 16, bytes);
        source = advance(source, pass);
    }
}

// D += A B, 16 deep. Accumulators of 16 x 16 are two of 8 columns, D[left, right][2 h + e]: row 8 h + lane / 4, column
// lane % 4 * 2 + e of the 8.
__device__ __forceinline__ void mma_m16n16k16(float (&D)[2][4], const u32 (&A)[4], const u32 (&B)[4])
{
    mma_m16n8k16(D[0], A, B[0], B[1]);
    mma_m16n8k16(D[1], A, B[2], B[3]);
}

// D = A B + C: a chain starts from C, which may be shared by many.
__device__ __forceinline__ void mma_m16n16k16(float (&D)[2][4], const u32 (&A)[4], const u32 (&B)[4],
                                              const float (&C)[2][4])
{
    mma_m16n8k16(D[0], A, B[0], B[1], C[0][0], C[0][1], C[0][2], C[0][3]);
    mma_m16n8k16(D[1], A, B[2], B[3], C[1][0], C[1][1], C[1][2], C[1][3]);
}

// Rounded to 16 bits, accumulators are an A operand as they stand: the layouts agree.
__device__ __forceinline__ void round_block(u32 (&A)[4], const float (&X)[2][4])
{
    A[0] = pack(X[0][0], X[0][1]);
    A[1] = pack(X[0][2], X[0][3]);
    A[2] = pack(X[1][0], X[1][1]);
    A[3] = pack(X[1][2], X[1][3]);
}

// Writes a shared tile of d columns to X from row `row` on, eight threads a row, 16 bytes each; X ends at row `end`.
template <class Tile>
__device__ __forceinline__ void store_tile(const View<T>& X, int batch, int head, int row, int end, u32 tile,
                                           int thread)
{
    #pragma unroll
    for (int r = thread / 8; r < Tile::rows; r += copy_rows)
        #pragma unroll
        for (int c = thread % 8; c < d / 8; c += 8) {
            if (row + r >= end) continue;
            u32 part[4];
            ld_shared_v4(part, tile + Tile::chunk(r, c));
            *reinterpret_cast<uint4*>(at(X, batch, head, row + r, c * 8)) = make_uint4(part[0], part[1], part[2], part[3]);
        }
}

namespace score_mod {

// 2^x to 2^-22; 2^-inf = 0.
__device__ __forceinline__ float ex2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x to within one unit in the last place; 1 / 0 = inf.
__device__ __forceinline__ float rcp(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 - 2 / (1 + e^2x), absolute error within 5e-7: a softmax takes no notice of less. NaN stays NaN.
__device__ __forceinline__ float tanh(float x) { return fmaf(-2.f, rcp(1.f + ex2(x * 2.885390082f)), 1.f); }

}  // namespace score_mod

// Statistics of 16 query rows lie together, [3][16] floats: -lse in base 2, -delta, huge m.
constexpr int minus_delta_of = 16;  // floats from a row's -lse
constexpr int huge_m = 32;

// Floats from the -lse of query 0 to that of query q.
__device__ __forceinline__ i64 stats_of(int q)
{
    return static_cast<i64>(q / 16) * 48 + q % 16;
}

// A truth that the compiler knows.
template <bool value_>
struct Always {
    static constexpr bool value = value_;
};

struct Place {
    int query;  // the first of the Q tile
    int head, batch;
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

// The first query that this thread holds; the others are 8, 16, ... further.
__device__ __forceinline__ int thread_query(const Place& at)
{
    const int thread = thread_index();
    return at.query + thread / 32 * row_blocks * 16 + thread % 32 / 4;
}

// Floats from the first statistics to those of a head.
__device__ __forceinline__ i64 head_stats(const Place& at, int Hq, int Nq)
{
    const i64 padded_rows = (Nq + 127) / 128 * 128;
    return (static_cast<i64>(at.batch) * Hq + at.head) * padded_rows * 3;
}

extern "C" __global__ void __launch_bounds__(threads, 1) dq(
    View<const T> Q,  // [B, Hq, Nq, d]
    View<const T> K,  // [B, Hk, Nk, d]
    View<const T> V,  // [B, Hk, Nk, d]
    View<const T> dO,  // [B, Hq, Nq, d]
    const float* stats,  // [B, Hq, Nq padded to 128 / 16, 3, 16]: -lse in base 2, -delta, huge m (see delta)
    View<T> dQ,  // [B, Hq, Nq, d]
    Walk K_walk,  // bytes between copy passes and between K tiles
    Walk V_walk,  // bytes between copy passes and between V tiles
    int Hq,  // query heads
    int Hk,  // key/value heads; query head h reads head h / (Hq / Hk)
    int Nq,  // query rows of a head
    int Nk,  // keys of a head
    float score_scale,  // of Q K^T; then comes score_mod
    float score_scale_log2,  // scale * log2(e): exp(scale * x) = exp2(scale_log2 * x); then comes score_mod
    int left,  // keys that a query sees before its own
    int right)  // keys that a query sees behind its own
{
    const u32 smem = smem_base();
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;

    const Place here = place(block_index(), Hq, Hk, Nq, Nk);
    const int tile_query = here.query, head_k = here.head / (Hq / Hk);
    constexpr float scale = 1.f, scale_log2 = 1.4426950408889634f;  // of what score_mod returns
    // What score_mod needs of this head.
    const int head = here.head, batch = here.batch;

    // Its loop: K/V tiles from the last to the first, so that only the first copy meets the end of the keys.
    const int diagonal = Nk - Nq + right;  // query i sees the keys up to i + diagonal
    const int farthest = Nk - Nq - left;  // and those from i + farthest on
    const int first = max(0, tile_query + farthest) / Bc;  // the walk's last tile; none before it is seen
    const int last_first = tile_query + Br - 1 + farthest;  // the first key that the block's last row sees

    const int Tc = (max(0, min(min(tile_query + Br, Nq) + diagonal, Nk)) + Bc - 1) / Bc;

    // Where the next copies come from. A thread takes chunk thread % 8 of row thread / 8, and of every copy_rows-th row
    // from there; its part of the address is computed anew for each tile: registers are scarcer than instructions.
    constexpr i64 element = sizeof(T);
    auto tile_at = [&](const View<const T>& X, int head_of_X, int row) {
        return reinterpret_cast<const char*>(at(X, here.batch, head_of_X, row, 0));
    };
    auto thread_at = [](i64 row_stride) {
        return (thread_index() / 8 * row_stride + thread_index() % 8 * 8) * element;
    };
    const char* K_next = tile_at(K, head_k, (Tc - 1) * Bc);
    const char* V_next = tile_at(V, head_k, (Tc - 1) * Bc);

    // Copies the next K and V tile, of which `left` rows exist, into buffer `stage`, and steps on.
    auto copy_next = [&](int stage, int left) {
        const u32 chunk = K_tile::chunk(thread_index() / 8, thread_index() % 8);
        const u32 place = smem + K_smem + stage * K_tile::bytes + chunk;
        copy_tile<K_tile>(place, K_next + thread_at(K.row), K_walk.pass, left);
        copy_tile<K_tile>(place + K_to_V, V_next + thread_at(V.row), V_walk.pass, left);
        K_next -= K_walk.tile;
        V_next -= V_walk.tile;
    };

    const u32 Q_place = smem + Q_smem + Q_tile::chunk(thread / 8, thread % 8);
    const char* const Q_source = tile_at(Q, here.head, tile_query) + thread_at(Q.row);
    const char* const dO_source = tile_at(dO, here.head, tile_query) + thread_at(dO.row);
    copy_tile<Q_tile>(Q_place, Q_source, copy_rows * Q.row * element, Nq - tile_query);
    copy_tile<Q_tile>(Q_place + Q_to_dO, dO_source, copy_rows * dO.row * element, Nq - tile_query);
    if (Tc > first) copy_next(0, Nk - (Tc - 1) * Bc);
    cp_async_commit();
    if (Tc > first + 1) copy_next(1, Bc);
    cp_async_commit();

    // Under the copies: statistics of this lane's rows, and whether any row of the tile has huge scores. For that every
    // warp looks at all rows, so that all agree.
    const float* const stats_head = stats + head_stats(here, Hq, Nq);
    float minus_lse[row_blocks][2], minus_delta[row_blocks][2];
    #pragma unroll
    for (int t = 0; t < row_blocks; ++t)
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int q = thread_query(here) + t * 16 + h * 8;
            minus_lse[t][h] = q < Nq ? stats_head[stats_of(q)] : -infinity();  // past the end P is 0
            minus_delta[t][h] = q < Nq ? stats_head[stats_of(q) + minus_delta_of] : 0;
        }
    bool huge = false;
    #pragma unroll
    for (int q = tile_query + lane; q < tile_query + Br; q += 32)
        huge |= q < Nq && stats_head[stats_of(q) + huge_m] != 0;
    huge = __any_sync(~0u, huge);

    // Where this lane's ldmatrix go. An ldmatrix.x4 reads a 16 x 16 block as four 8 x 8 matrices: down first for A
    // stored [m][k] and for B stored [k][n] (.trans), across first for B stored [n][k].
    const int down_row = lane % 16, down_chunk = lane / 16;
    const int across_row = lane % 8 + lane / 16 * 8, across_chunk = lane / 8 % 2;

    // Q as A of S (dO as A of dP); K as B of S (V as B of dP); K as B of dQ.
    const u32 Q_lane = smem + Q_smem + Q_tile::chunk(warp * row_blocks * 16 + down_row, down_chunk);
    u32 K_lane = smem + K_smem + K_tile::chunk(across_row, across_chunk);
    u32 K_columns = smem + K_smem + K_tile::chunk(down_row, down_chunk);

    cp_async_wait<stages - 1>();
    __syncthreads();  // Q, dO and the first K and V tile are there

    u32 Q_rmem[row_blocks][columns / 16][4];  // [Br, d], this warp's rows of Q as A of S
    #pragma unroll
    for (int t = 0; t < row_blocks; ++t)
        #pragma unroll
        for (int x = 0; x < columns / 16; ++x)
            ldmatrix_x4(Q_rmem[t][x], Q_tile::block(Q_lane, x) + t * 16 * Q_tile::row);

    float dQ_rmem[row_blocks][own_blocks][2][4] = {};
    int j = Tc - 1;  // K/V tile

    // One K/V tile. The code is there twice, with and without what `special` scores need: a branch between S and dP
    // would keep the products of the one from filling the pauses of the other.
    auto walk_tile = [&](auto special) {
        #pragma unroll
        for (int c = 0; c < Bc; c += slice) {
            constexpr float zero[2][4] = {};

            // S = Q K^T  [Br, Bc]
            float S[row_blocks][slice / 16][2][4];
            #pragma unroll
            for (int x = 0; x < columns / 16; ++x) {
                #pragma unroll
                for (int n = 0; n < slice / 16; ++n) {
                    u32 K_rmem[4];
                    ldmatrix_x4(K_rmem, K_tile::block(K_lane, x) + (c + n * 16) * K_tile::row);
                    if (x == 0) {
                        #pragma unroll
                        for (int t = 0; t < row_blocks; ++t) mma_m16n16k16(S[t][n], Q_rmem[t][x], K_rmem, zero);
                    } else {
                        #pragma unroll
                        for (int t = 0; t < row_blocks; ++t) mma_m16n16k16(S[t][n], Q_rmem[t][x], K_rmem);
                    }
                }
            }

            // What score_mod makes of the scores, and its slopes.
            float slopes[row_blocks][slice / 16][2][4];
            {
                #pragma unroll
                for (int i = 0; i < slice / 8; ++i)
                    #pragma unroll
                    for (int t = 0; t < row_blocks; ++t)
                        #pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            float& s = S[t][i / 2][i % 2][e];
                            const float score = s * score_scale;
                            const float mod0 = score_mod::tanh(score * 0.5f);
                            slopes[t][i / 2][i % 2][e] = 1.f - mod0 * mod0;
                            s = 2.f * mod0;
                        }
            }
            if constexpr (special.value) {
                const float unscale = __fdividef(1, scale);
                const Place now = place(block_index(), Hq, Hk, Nq, Nk);
                #pragma unroll
                for (int t = 0; t < row_blocks; ++t)
                    #pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        // Of a row with huge scores `delta` gives the max m here; in lse it would have swallowed l.
                        const int q = thread_query(now) + t * 16 + h * 8;
                        const float m = huge && q < Nq ? stats[head_stats(now, Hq, Nq) + stats_of(q) + huge_m] : 0;
                        const int last = min(q + diagonal, Nk - 1);  // the last key that query q sees
                        const int room = last - j * Bc - c - thread_index() % 4 * 2;  // and the last of this thread's keys
                        const int before = q + farthest - j * Bc - c - thread_index() % 4 * 2;  // and the first
                        #pragma unroll
                        for (int i = 0; i < slice / 8; ++i)
                            #pragma unroll
                            for (int e = 0; e < 2; ++e) {
                                float& s = S[t][i / 2][i % 2][2 * h + e];
                                // No fused multiply-add: scale * s is exactly m at the max.
                                if (m != 0) s = __fsub_rn(__fmul_rn(s, scale), m) * unscale;
                                if (i * 8 + e > room || i * 8 + e < before) s = -infinity();
                            }
                    }
            }

            // P = exp(scale S - lse)
            #pragma unroll
            for (int i = 0; i < slice / 8; ++i) {
                if (i < 0 || i >= slice / 8) continue;
                #pragma unroll
                for (int t = 0; t < row_blocks; ++t)
                    #pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        float& s = S[t][i / 2][i % 2][e];
                        s = ex2(__fmaf_rn(s, scale_log2, minus_lse[t][e / 2]));
                    }
            }

            // dP - delta = dO V^T - delta  [Br, Bc]
            float C[row_blocks][2][4];
            #pragma unroll
            for (int t = 0; t < row_blocks; ++t)
                #pragma unroll
                for (int e = 0; e < 8; ++e) C[t][e / 4][e % 4] = minus_delta[t][e % 4 / 2];
            float dP[row_blocks][slice / 16][2][4];
            #pragma unroll
            for (int x = 0; x < columns / 16; ++x) {
                u32 dO_rmem[row_blocks][4];
                #pragma unroll
                for (int t = 0; t < row_blocks; ++t)
                    ldmatrix_x4(dO_rmem[t], Q_tile::block(Q_lane, x) + Q_to_dO + t * 16 * Q_tile::row);
                #pragma unroll
                for (int n = 0; n < slice / 16; ++n) {
                    u32 V_rmem[4];
                    ldmatrix_x4(V_rmem, K_tile::block(K_lane, x) + K_to_V + (c + n * 16) * K_tile::row);
                    if (x == 0) {
                        #pragma unroll
                        for (int t = 0; t < row_blocks; ++t) mma_m16n16k16(dP[t][n], dO_rmem[t], V_rmem, C[t]);
                    } else {
                        #pragma unroll
                        for (int t = 0; t < row_blocks; ++t) mma_m16n16k16(dP[t][n], dO_rmem[t], V_rmem);
                    }
                }
            }

            // dS = P o (dP - delta)
            #pragma unroll
            for (int t = 0; t < row_blocks; ++t)
                #pragma unroll
                for (int n = 0; n < slice / 16; ++n)
                    #pragma unroll
                    for (int e = 0; e < 8; ++e) dP[t][n][e / 4][e % 4] *= S[t][n][e / 4][e % 4];
            // dS of the scores that score_mod took.
            {
                #pragma unroll
                for (int i = 0; i < slice / 8; ++i)
                    #pragma unroll
                    for (int t = 0; t < row_blocks; ++t)
                        #pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            float& s = dP[t][i / 2][i % 2][e];
                            s = s * slopes[t][i / 2][i % 2][e];
                        }
            }
            u32 dS_rmem[row_blocks][slice / 16][4];
            #pragma unroll
            for (int t = 0; t < row_blocks; ++t)
                #pragma unroll
                for (int n = 0; n < slice / 16; ++n) round_block(dS_rmem[t][n], dP[t][n]);

            // dQ += dS K  [Br, d]
            #pragma unroll
            for (int k = 0; k < slice / 16; ++k)
                #pragma unroll
                for (int n = 0; n < own_blocks; ++n) {
                    u32 K_rmem[4];
                    const int row = (c + k * 16) * K_tile::row;
                    ldmatrix_x4_trans(K_rmem, K_tile::block(K_columns, n) + row);
                    #pragma unroll
                    for (int t = 0; t < row_blocks; ++t) mma_m16n16k16(dQ_rmem[t][n], dS_rmem[t][k], K_rmem);
                }
        }

        const int stage = (Tc - 1 - j) % 2;
        cp_async_wait<0>();
        __syncthreads();  // everyone is done with this K and V; the next tile is there
        if (j > first + 1) copy_next(stage, Bc);
        cp_async_commit();

        // The next tile lies in the other buffer.
        K_lane += stage ? -K_tile::bytes : K_tile::bytes;
        K_columns += stage ? -K_tile::bytes : K_tile::bytes;
        --j;
    };

    // First the tiles that the end of the keys or the diagonal crosses; all of them if a row has huge scores.
    auto is_special = [&] {
        if ((j + 1) * Bc - 1 > tile_query + diagonal) return true;
        if (j * Bc < last_first) return true;
        return (j + 1) * Bc > Nk || huge;
    };
    #pragma unroll 1
    while (j >= first) {  // and again at the window's far end
        #pragma unroll 1
        while (j >= first && is_special()) walk_tile(Always<true>());
        #pragma unroll 1
        while (j >= first && !is_special()) walk_tile(Always<false>());
    }

    // dQ, through shared memory in whole rows. The block's place is worked out again rather than held in registers.
    const int end_lane = thread_index() % 32;
    const u32 Q_rows = smem_base() + Q_smem + Q_tile::chunk(thread_index() / 32 * row_blocks * 16 + end_lane / 4, 0);
    #pragma unroll
    for (int t = 0; t < row_blocks; ++t)
        #pragma unroll
        for (int n = 0; n < own_blocks; ++n) {
            #pragma unroll
            for (int e = 0; e < 8; ++e) dQ_rmem[t][n][e / 4][e % 4] *= score_scale;
            u32 block[4];
            round_block(block, dQ_rmem[t][n]);
            st_shared(Q_tile::block((Q_rows + end_lane % 4 * 4), n) + t * 16 * Q_tile::row, block[0]);
            st_shared(Q_tile::block((Q_rows + end_lane % 4 * 4), n) + (t * 16 + 8) * Q_tile::row, block[1]);
            st_shared(Q_tile::block(Q_tile::right((Q_rows + end_lane % 4 * 4)), n) + t * 16 * Q_tile::row, block[2]);
            st_shared(Q_tile::block(Q_tile::right((Q_rows + end_lane % 4 * 4)), n) + (t * 16 + 8) * Q_tile::row, block[3]);
        }
    __syncthreads();  // dQ is there
    const Place end = place(block_index(), Hq, Hk, Nq, Nk);
    store_tile<Q_tile>(dQ, end.batch, end.head, end.query, Nq, smem_base() + Q_smem, thread_index());
}
