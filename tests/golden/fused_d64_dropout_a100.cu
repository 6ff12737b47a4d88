// fused_bf16_d64_dropout_sm80_Br64_Bc128_w8_rs1_sl0_s2_vreg1_weave0_b1
// dK and dV of one K/V tile, and its part of dQ by atomic sums.
// With dropout.
//
// Rendered by flashsmith from key_block.cu.j2.
// grid   B * Hk * Tc: batch, K/V head, K/V tile, flat in x
// block  256 threads, 8 warps
// smem        0  K_smem     16384 B  [128][64]
//         16384  Q_smem     16384 B  [2][64][64]
//         32768  dO_smem    16384 B  [2][64][64]
//         49152  dS_smem    16384 B  dS^T [128][64]
//         65536  stats_smem   1536 B  [2][4][3][16] floats
//         67072  in all, dynamic

// FlashAttention-2, Algorithm 2, with S and dP transposed: S^T = K Q^T and dP^T = V dO^T. A warp owns keys, and what
// the tensor cores leave in its registers, P^T and dS^T, is the A operand of dV += P^T dO and dK += dS^T Q as it is.

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

constexpr int d = 64;  // head dimension
constexpr int columns = 64;  // of a row in shared memory: d in whole 16-column blocks, the rest zero
constexpr int Br = 64;  // query rows of a Q/dO tile
constexpr int Bc = 128;  // keys of this block
constexpr int warps = 8;
constexpr int threads = 32 * warps;
constexpr float log2_e = 1.4426950408889634f;
constexpr int stages = 2;  // buffers of Q and dO
constexpr int copy_rows = threads / 8;  // rows of a copy pass

// What a warp owns, in blocks of 16 x 16.
constexpr int row_split = 1;  // warps that share the same keys
constexpr int key_blocks = Bc * row_split / warps / 16;  // its keys
constexpr int own_queries = Br / row_split;  // its columns of S^T and dP^T
constexpr int slice = 64;  // of them at once
constexpr int own_blocks = columns / row_split / 16;  // its columns of dK and dV: share, share + row_split, ...
constexpr int dQ_down = 2, dQ_across = 4;  // warps along the rows and along the columns of dQ
constexpr int dQ_rows = Br / 16 / dQ_down;  // a warp's row blocks of dQ: down, down + dQ_down, ...
constexpr int dQ_columns = columns / 16 / dQ_across;  // and column blocks: across, across + dQ_across, ...

// Bytes from the start of shared memory.
constexpr int K_smem = 0;  // [128][64]
constexpr int Q_smem = 16384;  // [2][64][64]
constexpr int dO_smem = 32768;  // [2][64][64]
constexpr int dS_smem = 49152;  // dS^T [128][64]
constexpr int stats_smem = 65536;  // [2][4][3][16] floats

constexpr int dV_smem = Q_smem;  // once the loop has ended; dK takes the place of K
constexpr int Q_to_dO = dO_smem - Q_smem;  // from a place in a Q tile to the same place in its dO tile

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

// Adds a float to global memory, atomically.
__device__ __forceinline__ void red_add(float* destination, float x)
{
    asm volatile("red.global.add.f32 [%0], %1;" :: "l"(destination), "f"(x) : "memory");
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

using K_tile = SwizzledTile<Bc, columns>;  // K and V
using Q_tile = SwizzledTile<Br, columns>;  // Q and dO
using dS_tile = SwizzledTile<Bc, Br>;      // dS^T

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

// What a thread's random numbers are made of.
struct Random {
    u32 low, high, offset;  // seed and offset
    u32 matrix;             // batch * Hq + head
    u32 keep_below;
};

// 128 random bits for the 8 weights of queries i and i + 8, keys j, j + 8, j + 16 and j + 24, with i % 16 < 8 and j % 32 < 8:
// however tiles are cut, a weight has the same 16 bits. Word (j / 8) % 4, its low half for query i. Philox4x32 with 7
// rounds (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011).
__device__ __forceinline__ void random_words(u32 (&words)[4], const Random& random, u32 row, u32 column)
{
    u32 x0 = row, x1 = column, x2 = random.matrix, x3 = random.offset, k0 = random.low, k1 = random.high;
    #pragma unroll
    for (int round = 0; round < 7; ++round) {
        const unsigned long long a = 0xd2511f53ull * x0, b = 0xcd9e8d57ull * x2;
        x0 = static_cast<u32>(b >> 32) ^ x1 ^ k0;
        x1 = static_cast<u32>(b);
        x2 = static_cast<u32>(a >> 32) ^ x3 ^ k1;
        x3 = static_cast<u32>(a);
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    words[0] = x0;
    words[1] = x1;
    words[2] = x2;
    words[3] = x3;
}

// Whether a weight is kept: that of query i + 8 half.
__device__ __forceinline__ bool kept(const Random& random, u32 word, int half)
{
    return (half ? word >> 16 : word & 0xffffu) < random.keep_below;
}

// Weights in 16 bits. Those that are dropped carry a minus sign and become 0; NaN stays NaN.
__device__ __forceinline__ void round_kept(u32 (&A)[4], const float (&X)[2][4])
{
    float Y[2][4];
    #pragma unroll
    for (int e = 0; e < 8; ++e) Y[e / 4][e % 4] = X[e / 4][e % 4] < 0.f ? 0.f : X[e / 4][e % 4];
    round_block(A, Y);
}

// Statistics of 16 query rows lie together, [3][16] floats: -lse in base 2, -delta, huge m.
constexpr int minus_delta = 64;  // bytes from a row's -lse
constexpr int huge_m = 128;
constexpr int stats_bytes = Br / 16 * 192;  // of a tile

// Bytes from the -lse of query 0 to that of query q.
__device__ __forceinline__ constexpr int stats_of(int q)
{
    return q / 16 * 192 + q % 16 * 4;
}

struct Place {
    int key;  // the first of the K/V tile
    int head, batch;
};

// The K/V tile of a block. Tiles of a head are neighbours, so that they find Q, dO and dQ in L2.
__device__ __forceinline__ Place place(int block, int Hk, int Nk)
{
    const int Tc = (Nk + Bc - 1) / Bc;
    return {block % Tc * Bc, block / Tc % Hk, block / Tc / Hk};
}

extern "C" __global__ void __launch_bounds__(threads, 1) fused(
    View<const T> Q,  // [B, Hq, Nq, d]
    View<const T> K,  // [B, Hk, Nk, d]
    View<const T> V,  // [B, Hk, Nk, d]
    View<const T> dO,  // [B, Hq, Nq, d]
    const float* stats,  // [B, Hq, Nq padded to 128 / 16, 3, 16]: -lse in base 2, -delta, huge m (see delta)
    float* dQ_acc,  // [B, Hq, Tr, Br * columns], sums of dQ / scale in the order of the fragments
    View<T> dK,  // [B, Hk, Nk, d]
    View<T> dV,  // [B, Hk, Nk, d]
    Walk Q_walk,  // bytes between copy passes and between Q tiles
    Walk dO_walk,  // bytes between copy passes and between dO tiles
    int Hq,  // query heads
    int Hk,  // key/value heads; query head h reads head h / (Hq / Hk)
    int Nq,  // query rows of a head
    int Nk,  // keys of a head
    float scale,  // of Q K^T
    const i64* rng,  // [2], seed and offset of the random numbers
    int keep_below,  // a weight is kept if its 16 random bits are below
    float keep)  // the share of the weights that is kept, keep_below / 65536
{
    const u32 smem = smem_base();
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int share = warp % row_split;                       // of the queries, and of the columns of dK and dV
    const int warp_key = warp / row_split * key_blocks * 16;  // first key of this warp in the tile

    const Place here = place(block_index(), Hk, Nk);
    const int tile_key = here.key, head_k = here.head, batch = here.batch;
    const int Tr = (Nq + Br - 1) / Br;

    // Its loop: the Q tiles of every query head that reads this K/V head, one after the other, so that dK and dV need
    // no atomic sums.
    const int group = Hq / Hk, head_q = head_k * group;
    constexpr int first_tile = 0;  // of a head
    const int steps = group * (Tr - first_tile);

    // Where the next copies come from. A thread takes chunk thread % 8 of row thread / 8, and of every copy_rows-th row
    // from there; its part of the address is computed anew for each tile: registers are scarcer than instructions.
    constexpr i64 element = sizeof(T);
    auto tile_at = [&](const View<const T>& X, int head, int row) {
        return reinterpret_cast<const char*>(at(X, batch, head, row, 0));
    };
    auto thread_at = [](i64 row_stride) {
        return (thread_index() / 8 * row_stride + thread_index() % 8 * 8) * element;
    };
    const char* Q_next = tile_at(Q, head_q, first_tile * Br);
    const char* dO_next = tile_at(dO, head_q, first_tile * Br);
    const i64 stats_head = (Nq + 127) / 128 * static_cast<i64>(384);  // floats of a head
    const float* stats_next = stats + (static_cast<i64>(batch) * Hq + head_q) * stats_head;
    stats_next += first_tile * (stats_bytes / 4);
    int next_tile = first_tile;

    // Copies the next Q tile, dO tile and statistics into buffer `stage`, and steps on.
    auto copy_next = [&](int stage) {
        const u32 Q_place = smem + Q_smem + Q_tile::chunk(thread_index() / 8, thread_index() % 8);
        const u32 place = Q_place + stage * Q_tile::bytes;
        const int left = Nq - next_tile * Br;
        copy_tile<Q_tile>(place, Q_next + thread_at(Q.row), Q_walk.pass, left);
        copy_tile<Q_tile>(place + Q_to_dO, dO_next + thread_at(dO.row), dO_walk.pass, left);
        if (thread * 16 < stats_bytes)
            cp_async(smem + stats_smem + stage * stats_bytes + thread * 16, stats_next + thread * 4);
        Q_next += Q_walk.tile;
        dO_next += dO_walk.tile;
        stats_next += stats_bytes / 4;
        if (++next_tile == Tr) {  // on to the next query head
            Q_next += Q.head * element - (Tr - first_tile) * Q_walk.tile;
            dO_next += dO.head * element - (Tr - first_tile) * dO_walk.tile;
            stats_next += stats_head - (Tr - first_tile) * (stats_bytes / 4);
            next_tile = first_tile;
        }
    };

    // Where this lane's ldmatrix and stores go. An ldmatrix.x4 reads a 16 x 16 block as four 8 x 8 matrices: down first
    // for A stored [m][k] and for B stored [k][n] (.trans), across first for B stored [n][k] and for A stored [k][m]
    // (.trans).
    const int down_row = lane % 16, down_chunk = lane / 16;
    const int across_row = lane % 8 + lane / 16 * 8, across_chunk = lane / 8 % 2;
    const int own_query = share * own_queries;

    // K as A of S^T (V as A of dP^T); Q as B of S^T (dO as B of dP^T); dO as B of dV (Q as B of dK).
    const u32 K_lane = smem + K_smem + K_tile::chunk(warp_key + down_row, down_chunk);
    u32 Q_lane = smem + Q_smem + Q_tile::chunk(own_query + across_row, across_chunk);
    u32 dO_lane = Q_tile::block(smem + dO_smem + Q_tile::chunk(own_query + down_row, down_chunk), share);
    u32 stats_lane = smem + stats_smem + stats_of(own_query) + lane % 4 * 8;

    // Where the warp puts dS^T of its keys and queries.
    const u32 dS_own = smem + dS_smem + dS_tile::chunk(warp_key + lane / 4, 0) + lane % 4 * 4;
    const u32 dS_lane = dS_tile::block(dS_own, own_query / 16);

    // This warp's blocks of dQ: dS as A, K as B.
    const int down = warp % dQ_down, across = warp / dQ_down;
    const u32 dS_queries = dS_tile::block(smem + dS_smem + dS_tile::chunk(across_row, across_chunk), down);
    const u32 K_columns = K_tile::block(smem + K_smem + K_tile::chunk(down_row, down_chunk), across);
    // Where the sums of dQ of the tile lie.
    float* dQ_tile = dQ_acc + ((static_cast<i64>(batch) * Hq + head_q) * Tr + first_tile) * (Br * columns);

    const u32 K_place = smem + K_smem + K_tile::chunk(thread / 8, thread % 8);
    const char* const K_source = tile_at(K, head_k, tile_key) + thread_at(K.row);
    const char* const V_source = tile_at(V, head_k, tile_key) + thread_at(V.row);
    copy_tile<K_tile>(K_place, K_source, copy_rows * K.row * element, Nk - tile_key);
    copy_tile<K_tile>(K_place + (Q_smem - K_smem), V_source, copy_rows * V.row * element, Nk - tile_key);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();  // K and V are there

    u32 V_rmem[key_blocks][columns / 16][4];  // [Bc, d], V of this warp's keys as A of dP^T
    #pragma unroll
    for (int t = 0; t < key_blocks; ++t)
        #pragma unroll
        for (int x = 0; x < columns / 16; ++x)
            ldmatrix_x4(V_rmem[t][x], K_tile::block(K_lane, x) + (Q_smem - K_smem) + t * 16 * K_tile::row);
    __syncthreads();  // everyone holds V; Q and dO may overwrite it
    copy_next(0);
    cp_async_commit();
    if (steps > 1) copy_next(1);
    cp_async_commit();
    cp_async_wait<stages - 1>();
    __syncthreads();  // K, V and the first Q tile are there

    float dK_rmem[key_blocks][own_blocks][2][4] = {};
    float dV_rmem[key_blocks][own_blocks][2][4] = {};
    int tile_query = first_tile * Br;  // first query of the Q tile
    int head = head_q;  // its head
    Random random = {
        static_cast<u32>(rng[0]), static_cast<u32>(rng[0] >> 32), static_cast<u32>(rng[1]),
        static_cast<u32>(batch * Hq + head_q), static_cast<u32>(keep_below),
    };

    const int keys_left = Nk - (tile_key + warp_key + lane / 4);  // that exist, from this thread's first on

    #pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        #pragma unroll
        for (int c = 0; c < own_queries; c += slice) {
            constexpr float zero[2][4] = {};

            // Which weights of the slice are dropped, a bit each: drawn before there are scores, while registers are free.
            u32 dropped[key_blocks][(slice + 63) / 64] = {};
            #pragma unroll
            for (int t = 0; t < key_blocks; ++t)
                #pragma unroll
                for (int n = 0; n < slice / 16; ++n) {
                    const u32 row = (tile_query + own_query + c) / 2 + 8 * n + lane % 4 * 2;
                    const int first_key = tile_key + warp_key;
                    const int second = (first_key / 16 + t) % 2;  // half of 32 keys
                    const u32 column = (first_key / 16 + t) / 2 * 8 + lane / 4;
                    u32 words[2][4];
                    #pragma unroll
                    for (int p = 0; p < 2; ++p) random_words(words[p], random, row + p, column);
                    #pragma unroll
                    for (int e = 0; e < 8; ++e) {
                        const int p = e % 2, half = e / 4, eighth = e % 4 / 2;  // which pair of rows, queries, keys
                        const u32 word = second ? words[p][2 + eighth] : words[p][eighth];
                        if (!kept(random, word, half)) dropped[t][n / 4] |= 1u << (n % 4 * 8 + e);
                    }
                }

            // S^T = K Q^T  [Bc, Br]
            float S[key_blocks][slice / 16][2][4];
            #pragma unroll
            for (int x = 0; x < columns / 16; ++x) {
                u32 K_rmem[key_blocks][4];
                #pragma unroll
                for (int t = 0; t < key_blocks; ++t)
                    ldmatrix_x4(K_rmem[t], K_tile::block(K_lane, x) + t * 16 * K_tile::row);
                #pragma unroll
                for (int n = 0; n < slice / 16; ++n) {
                    u32 Q_rmem[4];
                    ldmatrix_x4(Q_rmem, Q_tile::block(Q_lane, x) + (c + n * 16) * Q_tile::row);
                    if (x == 0) {
                        #pragma unroll
                        for (int t = 0; t < key_blocks; ++t) mma_m16n16k16(S[t][n], K_rmem[t], Q_rmem, zero);
                    } else {
                        #pragma unroll
                        for (int t = 0; t < key_blocks; ++t) mma_m16n16k16(S[t][n], K_rmem[t], Q_rmem);
                    }
                }
            }

            // P^T = exp(scale S^T - lse)
            #pragma unroll
            for (int i = 0; i < slice / 8; ++i) {
                if (i < 0 || i >= slice / 8) continue;
                float minus_lse[2], m[2];
                ld_shared_v2(minus_lse, stats_lane + stats_of(c + i * 8));
                ld_shared_v2(m, stats_lane + huge_m + stats_of(c + i * 8));
                #pragma unroll
                for (int t = 0; t < key_blocks; ++t)
                    #pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        float& s = S[t][i / 2][i % 2][e];
                        const float below_m = __fsub_rn(__fmul_rn(s, scale), m[e % 2]);  // not fused: exactly 0 at the max
                        s = ex2(__fmaf_rn(below_m, log2_e, minus_lse[e % 2]));
                    }
            }
            // Weights that are dropped get a minus sign.
            #pragma unroll
            for (int t = 0; t < key_blocks; ++t)
                #pragma unroll
                for (int n = 0; n < slice / 16; ++n)
                    #pragma unroll
                    for (int e = 0; e < 8; ++e) {
                        float& s = S[t][n][e / 4][e % 4];
                        s = __uint_as_float(__float_as_uint(s) | (dropped[t][n / 4] << (31 - (n % 4 * 8 + e)) & 0x80000000u));
                    }
            u32 P_rmem[key_blocks][slice / 16][4];
            #pragma unroll
            for (int t = 0; t < key_blocks; ++t)
                #pragma unroll
                for (int n = 0; n < slice / 16; ++n) round_kept(P_rmem[t][n], S[t][n]);

            // dV += P^T dO  [Bc, d]
            #pragma unroll
            for (int k = 0; k < slice / 16; ++k)
                #pragma unroll
                for (int n = 0; n < own_blocks; ++n) {
                    u32 dO_rmem[4];
                    const int row = (c + k * 16) * Q_tile::row;
                    ldmatrix_x4_trans(dO_rmem, Q_tile::block(dO_lane, n * row_split) + row);
                    #pragma unroll
                    for (int t = 0; t < key_blocks; ++t) mma_m16n16k16(dV_rmem[t][n], P_rmem[t][k], dO_rmem);
                }

            // dP^T - delta = V dO^T - delta  [Bc, Br]
            float dP[key_blocks][slice / 16][2][4];
            #pragma unroll
            for (int x = 0; x < columns / 16; ++x) {
                #pragma unroll
                for (int n = 0; n < slice / 16; ++n) {
                    u32 dO_rmem[4];
                    ldmatrix_x4(dO_rmem, Q_tile::block(Q_lane, x) + Q_to_dO + (c + n * 16) * Q_tile::row);
                    if (x == 0) {
                        float left[2], right[2];
                        ld_shared_v2(left, stats_lane + minus_delta + stats_of(c + n * 16));
                        ld_shared_v2(right, stats_lane + minus_delta + stats_of(c + n * 16 + 8));
                        const float C[2][4] = {left[0], left[1], left[0], left[1],
                                               right[0], right[1], right[0], right[1]};
                        #pragma unroll
                        for (int t = 0; t < key_blocks; ++t) mma_m16n16k16(dP[t][n], V_rmem[t][x], dO_rmem, C);
                    } else {
                        #pragma unroll
                        for (int t = 0; t < key_blocks; ++t) mma_m16n16k16(dP[t][n], V_rmem[t][x], dO_rmem);
                    }
                }
            }

            // dS^T = P^T o (dP^T - delta)
            #pragma unroll
            for (int i = 0; i < slice / 8; ++i) {
                float minus_deltas[2];
                ld_shared_v2(minus_deltas, stats_lane + minus_delta + stats_of(c + i * 8));
                #pragma unroll
                for (int t = 0; t < key_blocks; ++t)
                    #pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const float p = S[t][i / 2][i % 2][e];
                        float& s = dP[t][i / 2][i % 2][e];
                        s = fabsf(p) * (p < 0.f ? minus_deltas[e % 2] : s);
                    }
            }

            u32 dS_rmem[key_blocks][slice / 16][4];
            #pragma unroll
            for (int t = 0; t < key_blocks; ++t)
                #pragma unroll
                for (int n = 0; n < slice / 16; ++n) round_block(dS_rmem[t][n], dP[t][n]);
            #pragma unroll
            for (int t = 0; t < key_blocks; ++t)
                #pragma unroll
                for (int n = 0; n < slice / 16; ++n)
                    #pragma unroll
                    for (int r = 0; r < 4; ++r)
                        if (t * 16 + r % 2 * 8 >= keys_left) dS_rmem[t][n][r] = 0;
            if (c == 0) __syncthreads();  // everyone is done with the dS of the last tile
            #pragma unroll
            for (int t = 0; t < key_blocks; ++t)
                #pragma unroll
                for (int n = 0; n < slice / 16; ++n) {
                    st_shared(dS_tile::block(dS_lane, c / 16 + n) + t * 16 * dS_tile::row, dS_rmem[t][n][0]);
                    st_shared(dS_tile::block(dS_lane, c / 16 + n) + (t * 16 + 8) * dS_tile::row, dS_rmem[t][n][1]);
                    st_shared(dS_tile::block(dS_tile::right(dS_lane), c / 16 + n) + t * 16 * dS_tile::row, dS_rmem[t][n][2]);
                    st_shared(dS_tile::block(dS_tile::right(dS_lane), c / 16 + n) + (t * 16 + 8) * dS_tile::row, dS_rmem[t][n][3]);
                }

            // dK += dS^T Q  [Bc, d]
            #pragma unroll
            for (int k = 0; k < slice / 16; ++k)
                #pragma unroll
                for (int n = 0; n < own_blocks; ++n) {
                    u32 Q_rmem[4];
                    const int row = (c + k * 16) * Q_tile::row - Q_to_dO;
                    ldmatrix_x4_trans(Q_rmem, Q_tile::block(dO_lane, n * row_split) + row);
                    #pragma unroll
                    for (int t = 0; t < key_blocks; ++t) mma_m16n16k16(dK_rmem[t][n], dS_rmem[t][k], Q_rmem);
                }
        }
        cp_async_wait<0>();
        __syncthreads();  // dS is there, and everyone is done with Q and dO; the next tile is there
        if (step + 2 < steps) copy_next(step % 2);
        cp_async_commit();

        // dQ += dS K  [Br, d]
        float dQ_rmem[dQ_rows][dQ_columns][2][4] = {};
        #pragma unroll
        for (int k = 0; k < Bc / 16; ++k) {
            u32 dS_rmem[dQ_rows][4];
            #pragma unroll
            for (int r = 0; r < dQ_rows; ++r)
                ldmatrix_x4_trans(dS_rmem[r], dS_tile::block(dS_queries, r * dQ_down) + k * 16 * dS_tile::row);
            #pragma unroll
            for (int n = 0; n < dQ_columns; ++n) {
                u32 K_rmem[4];
                ldmatrix_x4_trans(K_rmem, K_tile::block(K_columns, n * dQ_across) + k * 16 * K_tile::row);
                #pragma unroll
                for (int r = 0; r < dQ_rows; ++r) mma_m16n16k16(dQ_rmem[r][n], dS_rmem[r], K_rmem);
            }
        }
        float* const sums = dQ_tile + thread_index();
        #pragma unroll
        for (int r = 0; r < dQ_rows; ++r)
            #pragma unroll
            for (int n = 0; n < 2 * dQ_columns; ++n) {
                const int x = r * 2 * dQ_columns + n;
                #pragma unroll
                for (int e = 0; e < 4; ++e) red_add(sums + (x * 4 + e) * threads, dQ_rmem[r][n / 2][n % 2][e]);
            }

        // The next tile lies in the other buffer.
        Q_lane += step % 2 ? -Q_tile::bytes : Q_tile::bytes;
        dO_lane += step % 2 ? -Q_tile::bytes : Q_tile::bytes;
        stats_lane += step % 2 ? -stats_bytes : stats_bytes;
        dQ_tile += Br * columns;
        tile_query += Br;
        if (tile_query >= Nq) {  // on to the next query head
            tile_query = first_tile * Br;
            dQ_tile += first_tile * (Br * columns);
            ++head;
            ++random.matrix;
        }
    }

    // dK and dV, through shared memory in whole rows. The block's place is worked out again rather than held in registers.
    __syncthreads();  // everyone is done with dS and K
    const int end_lane = thread_index() % 32, end_warp = thread_index() / 32;
    const int end_row = end_warp / row_split * key_blocks * 16 + end_lane / 4;
    const u32 end_smem = smem_base() + K_tile::block(K_tile::chunk(end_row, 0), end_warp % row_split) + end_lane % 4 * 4;
    const float of_dK = scale / keep, of_dV = 1 / keep;
    #pragma unroll
    for (int t = 0; t < key_blocks; ++t)
    {
        #pragma unroll
        for (int n = 0; n < own_blocks; ++n) {
            #pragma unroll
            for (int e = 0; e < 8; ++e) dK_rmem[t][n][e / 4][e % 4] *= of_dK;
            u32 dK_block[4];
            round_block(dK_block, dK_rmem[t][n]);
            st_shared(K_tile::block(end_smem + K_smem, n * row_split) + t * 16 * K_tile::row, dK_block[0]);
            st_shared(K_tile::block(end_smem + K_smem, n * row_split) + (t * 16 + 8) * K_tile::row, dK_block[1]);
            st_shared(K_tile::block(K_tile::right(end_smem + K_smem), n * row_split) + t * 16 * K_tile::row, dK_block[2]);
            st_shared(K_tile::block(K_tile::right(end_smem + K_smem), n * row_split) + (t * 16 + 8) * K_tile::row, dK_block[3]);
        }
        #pragma unroll
        for (int n = 0; n < own_blocks; ++n) {
            #pragma unroll
            for (int e = 0; e < 8; ++e) dV_rmem[t][n][e / 4][e % 4] *= of_dV;
            u32 dV_block[4];
            round_block(dV_block, dV_rmem[t][n]);
            st_shared(K_tile::block(end_smem + dV_smem, n * row_split) + t * 16 * K_tile::row, dV_block[0]);
            st_shared(K_tile::block(end_smem + dV_smem, n * row_split) + (t * 16 + 8) * K_tile::row, dV_block[1]);
            st_shared(K_tile::block(K_tile::right(end_smem + dV_smem), n * row_split) + t * 16 * K_tile::row, dV_block[2]);
            st_shared(K_tile::block(K_tile::right(end_smem + dV_smem), n * row_split) + (t * 16 + 8) * K_tile::row, dV_block[3]);
        }
    }
    __syncthreads();  // dK and dV are there
    const Place end = place(block_index(), Hk, Nk);
    store_tile<K_tile>(dK, end.batch, end.head, end.key, Nk, smem_base() + K_smem, threadIdx.x);
    store_tile<K_tile>(dV, end.batch, end.head, end.key, Nk, smem_base() + dV_smem, threadIdx.x);
}
