// dq90_bf16_d128_causal_sm90_Br128_Bc112_s2_vs2_ov1
// dQ of Br query rows of a head, summed in registers: the same bits in every run.
//
// Rendered by flashsmith from query_block90.cu.j2.
// grid   Tr * Hq * B blocks, one for each tile of Br query rows, flat in x
// block  384 threads, 12 warps
// smem        0  Q_smem     32768 B  [2][128][64]
//         32768  dO_smem    32768 B  [2][128][64]
//         65536  K_smem     57344 B  [2][2][112][64]
//        122880  V_smem     57344 B  [2][2][112][64]
//        180224  barriers      72 B  [9] mbarriers
//        180296  slack       1024 B  the first buffer begins at the next multiple of 1024 B
//        181320  in all, dynamic

// The second half of the split backward. The last warpgroup, the producer, has TMA copy Q and dO and then tile after tile of
// K and V into rings of buffers. Each of the others, the consumers, owns 64 query rows: it computes S and dP again, and what
// the tensor cores leave in registers, dS, is the left operand of dQ += dS K as it is. A buffer goes back and forth between
// them by two mbarriers: `full` when the bytes have arrived, `empty` when every warp of the consumers has done with them.
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr int d = 128;  // head dimension of Q and K
constexpr int dv = 128;  // of V and dO
constexpr int Br = 128;  // query rows of a block
constexpr int Bc = 112;  // keys of a K/V tile
constexpr int K_stages = 2, V_stages = 2;  // buffers
constexpr int consumers = Br / 64;
constexpr int threads = 128 * (consumers + 1);
constexpr int warp_rows = 16;  // query rows of a warp
constexpr int m_tiles = 1, row_blocks = 1;  // in tiles of 16

// Registers of a thread once the roles are given out. All threads start with the same number, which lies between the two.
constexpr int producer_registers = 24;
constexpr int consumer_registers = 240;

// What a thread holds of its warp's rows, for row 8 h + lane / 4:
using Rows = float[2];                       // [h], one number a row
using Scores = float[m_tiles][Bc / 8][4];    // [n][2 h + c], key 8 n + lane % 4 * 2 + c
using Gradients = float[m_tiles][d / 8][4];  // [n][2 h + c], column 8 n + lane % 4 * 2 + c
using Rounded = u32[Bc / 16][4];             // [y], dS of 16 keys as the left operand of a product

// Byte offsets in shared memory. A matrix lies in panels of 64 columns, zeros beyond its last. A row of a panel is 128 bytes
// or eight chunks, and chunk c of row r lies in place c ^ r % 8: TMA writes them so, and wgmma reads them so.
constexpr int Q_smem = 0;  // [2][128][64]
constexpr int dO_smem = 32768;  // [2][128][64]
constexpr int K_smem = 65536;  // [2][2][112][64]
constexpr int V_smem = 122880;  // [2][2][112][64]
constexpr int barriers = 180224;  // [9] mbarriers
constexpr int K_panels = (d + 63) / 64, V_panels = (dv + 63) / 64;
constexpr int Q_panel = Br * 128, KV_panel = Bc * 128;                     // bytes
constexpr int K_tile = K_panels * KV_panel, V_tile = V_panels * KV_panel;  // bytes

constexpr int Q_full = barriers;  // of Q and dO
constexpr int K_full = Q_full + 8, K_empty = K_full + 8 * K_stages;  // one for each buffer
constexpr int V_full = K_empty + 8 * K_stages, V_empty = V_full + 8 * V_stages;

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

// Four 8x8 matrices to shared memory, the reverse of ldmatrix_x4.
__device__ __forceinline__ void stmatrix_x4(u32 address, const u32 (&R)[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], { %1,%2,%3,%4};"
                 :: "r"(address), "r"(R[0]), "r"(R[1]), "r"(R[2]), "r"(R[3]) : "memory");
}

// Address of the block's buffers: dynamic shared memory from its first multiple of 1024 bytes on.
__device__ __forceinline__ u32 smem_base()
{
    extern __shared__ __align__(1024) char smem[];
    return (static_cast<u32>(__cvta_generic_to_shared(smem)) + 1023) & ~1023u;  // CUDA promises no more than 16
}

// A tensor as TMA sees it, encoded by the driver. Dimensions, from the inside: column, row, head, batch.
struct alignas(64) TensorMap {
    unsigned char opaque[128];
};

// A box of the tensor to shared memory; what lies outside the tensor becomes zero. Its bytes count towards the mbarrier.
__device__ __forceinline__ void tma_load(u32 destination, const TensorMap& map, u32 barrier, int column, int row, int head, int batch)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, { %3, %4, %5, %6}], [%2];"
                 :: "r"(destination), "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch) : "memory");
}

// A box of the tensor from shared memory; what lies outside the tensor is not written.
__device__ __forceinline__ void tma_store(const TensorMap& map, u32 source, int column, int row, int head, int batch)
{
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, { %2, %3, %4, %5}], [%1];"
                 :: "l"(&map), "r"(source), "r"(column), "r"(row), "r"(head), "r"(batch) : "memory");
}

// The stores of this thread have read shared memory.
__device__ __forceinline__ void tma_store_wait()
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// What threads have written to shared memory is there for TMA and wgmma.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The first copy will not have to wait for the map.
__device__ __forceinline__ void prefetch(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory"); }

// A phase of an mbarrier completes with `arrivals` arrivals and all bytes that were announced.
__device__ __forceinline__ void mbarrier_init(u32 barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}

// The mbarriers that this thread has set up are there for TMA.
__device__ __forceinline__ void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void mbarrier_arrive(u32 barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// Arrives, and announces bytes that TMA will bring.
__device__ __forceinline__ void mbarrier_arrive_expect(u32 barrier, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

// Until the phase of that parity has completed. Of a new mbarrier the phase before the first, of parity 1, counts as such.
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity)
{
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "AGAIN:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra DONE;\n"
                 "bra AGAIN;\n"
                 "DONE:\n"
                 "}" :: "r"(barrier), "r"(parity) : "memory");
}

// A hardware barrier of `count` threads, by whole warps.
template <int count>
__device__ __forceinline__ void barrier_sync(int name) { asm volatile("bar.sync %0, %1;" :: "r"(name), "n"(count) : "memory"); }

// From here on a thread of this warpgroup has so many registers; the warpgroups' sum must stay within the SM's.
template <int registers>
__device__ __forceinline__ void give_registers_back() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(registers)); }

template <int registers>
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(registers)); }

// Before a wgmma that reads or adds to registers which anything else has written.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// All but the newest `pending` groups of this warpgroup have finished.
template <int pending>
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(pending) : "memory"); }

// The compiler does not know that a wgmma writes its sums later: no use of X may move above this point, no write below.
template <int blocks>
__device__ __forceinline__ void pin(float (&X)[1][blocks][4])
{
    #pragma unroll
    for (int n = 0; n < blocks; ++n)
        #pragma unroll
        for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(X[0][n][e]) :: "memory");
}

// An operand in shared memory, in panels of 64 columns whose rows of 128 bytes are swizzled: its address and distances in
// units of 16 bytes, 1024 bytes from eight rows to the next eight, `panel` bytes from panel to panel where the columns are
// those of the result, and the kind of swizzle. An address takes 14 bits, so that adding steps to it carries nowhere.
__device__ __forceinline__ u64 descriptor(u32 address, int panel)
{
    return static_cast<u64>(address >> 4) | static_cast<u64>(panel >> 4) << 16 | static_cast<u64>(1024 >> 4) << 32 | 1ull << 62;
}

// D (+)= A B: D [64, Bc], A 16 columns of Q or dO, B 16 columns of K or V.
__device__ __forceinline__ void wgmma_scores(float (&D)[1][14][4], u64 A, u64 B, bool add)
{
    asm volatile("{\n"
                 ".reg .pred add;\n"
                 "setp.ne.b32 add, %58, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n112k16.f32.bf16.bf16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
                 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
                 "%48,%49,%50,%51,%52,%53,%54,%55"
                 "}, %56, %57, add, 1, 1, 0, 0;\n"
                 "}"
                 : "+f"(D[0][0][0]), "+f"(D[0][0][1]), "+f"(D[0][0][2]), "+f"(D[0][0][3]),
                   "+f"(D[0][1][0]), "+f"(D[0][1][1]), "+f"(D[0][1][2]), "+f"(D[0][1][3]),
                   "+f"(D[0][2][0]), "+f"(D[0][2][1]), "+f"(D[0][2][2]), "+f"(D[0][2][3]),
                   "+f"(D[0][3][0]), "+f"(D[0][3][1]), "+f"(D[0][3][2]), "+f"(D[0][3][3]),
                   "+f"(D[0][4][0]), "+f"(D[0][4][1]), "+f"(D[0][4][2]), "+f"(D[0][4][3]),
                   "+f"(D[0][5][0]), "+f"(D[0][5][1]), "+f"(D[0][5][2]), "+f"(D[0][5][3]),
                   "+f"(D[0][6][0]), "+f"(D[0][6][1]), "+f"(D[0][6][2]), "+f"(D[0][6][3]),
                   "+f"(D[0][7][0]), "+f"(D[0][7][1]), "+f"(D[0][7][2]), "+f"(D[0][7][3]),
                   "+f"(D[0][8][0]), "+f"(D[0][8][1]), "+f"(D[0][8][2]), "+f"(D[0][8][3]),
                   "+f"(D[0][9][0]), "+f"(D[0][9][1]), "+f"(D[0][9][2]), "+f"(D[0][9][3]),
                   "+f"(D[0][10][0]), "+f"(D[0][10][1]), "+f"(D[0][10][2]), "+f"(D[0][10][3]),
                   "+f"(D[0][11][0]), "+f"(D[0][11][1]), "+f"(D[0][11][2]), "+f"(D[0][11][3]),
                   "+f"(D[0][12][0]), "+f"(D[0][12][1]), "+f"(D[0][12][2]), "+f"(D[0][12][3]),
                   "+f"(D[0][13][0]), "+f"(D[0][13][1]), "+f"(D[0][13][2]), "+f"(D[0][13][3])
                 : "l"(A), "l"(B), "r"(static_cast<int>(add)));
}

// D += A B: D [64, d], A [64, 16] of dS, B 16 rows of K.
__device__ __forceinline__ void wgmma_dQ(float (&D)[1][16][4], const u32 (&A)[4], u64 B, bool add)
{
    asm volatile("{\n"
                 ".reg .pred add;\n"
                 "setp.ne.b32 add, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
                 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
                 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
                 "}, { %64,%65,%66,%67}, %68, add, 1, 1, 1;\n"
                 "}"
                 : "+f"(D[0][0][0]), "+f"(D[0][0][1]), "+f"(D[0][0][2]), "+f"(D[0][0][3]),
                   "+f"(D[0][1][0]), "+f"(D[0][1][1]), "+f"(D[0][1][2]), "+f"(D[0][1][3]),
                   "+f"(D[0][2][0]), "+f"(D[0][2][1]), "+f"(D[0][2][2]), "+f"(D[0][2][3]),
                   "+f"(D[0][3][0]), "+f"(D[0][3][1]), "+f"(D[0][3][2]), "+f"(D[0][3][3]),
                   "+f"(D[0][4][0]), "+f"(D[0][4][1]), "+f"(D[0][4][2]), "+f"(D[0][4][3]),
                   "+f"(D[0][5][0]), "+f"(D[0][5][1]), "+f"(D[0][5][2]), "+f"(D[0][5][3]),
                   "+f"(D[0][6][0]), "+f"(D[0][6][1]), "+f"(D[0][6][2]), "+f"(D[0][6][3]),
                   "+f"(D[0][7][0]), "+f"(D[0][7][1]), "+f"(D[0][7][2]), "+f"(D[0][7][3]),
                   "+f"(D[0][8][0]), "+f"(D[0][8][1]), "+f"(D[0][8][2]), "+f"(D[0][8][3]),
                   "+f"(D[0][9][0]), "+f"(D[0][9][1]), "+f"(D[0][9][2]), "+f"(D[0][9][3]),
                   "+f"(D[0][10][0]), "+f"(D[0][10][1]), "+f"(D[0][10][2]), "+f"(D[0][10][3]),
                   "+f"(D[0][11][0]), "+f"(D[0][11][1]), "+f"(D[0][11][2]), "+f"(D[0][11][3]),
                   "+f"(D[0][12][0]), "+f"(D[0][12][1]), "+f"(D[0][12][2]), "+f"(D[0][12][3]),
                   "+f"(D[0][13][0]), "+f"(D[0][13][1]), "+f"(D[0][13][2]), "+f"(D[0][13][3]),
                   "+f"(D[0][14][0]), "+f"(D[0][14][1]), "+f"(D[0][14][2]), "+f"(D[0][14][3]),
                   "+f"(D[0][15][0]), "+f"(D[0][15][1]), "+f"(D[0][15][2]), "+f"(D[0][15][3])
                 : "r"(A[0]), "r"(A[1]), "r"(A[2]), "r"(A[3]), "l"(B), "r"(static_cast<int>(add)));
}

// S = Q K^T and dP = dO V^T    [64, Bc] = [64, columns] [columns, Bc], a group of its own. A step is 16 columns, 32 bytes in a
// row of a panel.
template <int columns>
__device__ __forceinline__ void multiply_rows(Scores& D, u64 A, u64 B)
{
    #pragma unroll
    for (int x = 0; x < (columns + 15) / 16; ++x)
        wgmma_scores(D, A + (x / 4 * Q_panel + x % 4 * 32) / 16, B + (x / 4 * KV_panel + x % 4 * 32) / 16, x > 0);
    wgmma_commit();
}

// dQ += dS K    [64, d] += [64, Bc] [Bc, d], a group of its own. A step is 16 keys, 16 rows of a panel.
__device__ __forceinline__ void multiply_dS(Gradients& dQ, const Rounded& dS, u64 K)
{
    #pragma unroll
    for (int y = 0; y < Bc / 16; ++y) wgmma_dQ(dQ, dS[y], K + y * 16 * 128 / 16, true);
    wgmma_commit();
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

// dS in 16 bits.
__device__ __forceinline__ void round(Rounded& dS, const Scores& dP)
{
    #pragma unroll
    for (int y = 0; y < Bc / 16; ++y)
        #pragma unroll
        for (int e = 0; e < 4; ++e) dS[y][e] = pack(dP[0][2 * y + e / 2][e % 2 * 2], dP[0][2 * y + e / 2][e % 2 * 2 + 1]);
}

// Statistics of 16 query rows lie together, [3][16] floats: -lse in base 2, -delta, huge m.
constexpr int minus_delta_of = 16;  // floats from a row's -lse
constexpr int huge_m = 32;

// Floats from the -lse of query 0 to that of query q.
__device__ __forceinline__ i64 stats_of(int q)
{
    return static_cast<i64>(q / 16) * 48 + q % 16;
}

// This warpgroup's 64 rows of X times a factor to a tile of Q, in its panels and with its swizzle.
template <int blocks>
__device__ __forceinline__ void put_rows(u32 tile, const float (&X)[1][blocks][4], float factor)
{
    const int thread = thread_index(), row = thread / 32 * 16 + thread % 16;
    auto chunk = [&](int c) { return tile + c / 8 * Q_panel + row * 128 + ((c % 8 ^ row % 8) << 4); };
    auto pair = [&](int n, int h) { return pack(X[0][n][2 * h] * factor, X[0][n][2 * h + 1] * factor); };
    #pragma unroll
    for (int n = 0; n < blocks / 2; ++n) {
        u32 R[4];
        #pragma unroll
        for (int e = 0; e < 4; ++e) R[e] = pair(2 * n + e / 2, e % 2);
        stmatrix_x4(chunk(2 * n + thread % 32 / 16), R);
    }
}

// A position in a ring of buffers.
template <int buffers>
struct Ring {
    int stage;
    u32 parity;  // flips with each round

    __device__ __forceinline__ void advance()
    {
        if (++stage < buffers) return;
        stage = 0;
        parity ^= 1;
    }
};

template <bool known>
struct Bool {
    static constexpr bool value = known;
};

struct Place {
    int query;  // the first of the Q tile
    int head, batch;
};

constexpr int cached_keys = 51200;  // keys whose K and V fill half of the L2 cache

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

extern "C" __global__ void __launch_bounds__(threads, 1) dq90(
    const __grid_constant__ TensorMap Q_map,  // [B, Hq, Nq, d] in boxes of Br rows x 64 columns
    const __grid_constant__ TensorMap K_map,  // [B, Hk, Nk, d] in boxes of Bc rows x 64 columns
    const __grid_constant__ TensorMap V_map,  // [B, Hk, Nk, dv] in boxes of Bc rows x 64 columns
    const __grid_constant__ TensorMap dO_map,  // [B, Hq, Nq, dv] in boxes of Br rows x 64 columns
    const __grid_constant__ TensorMap dQ_map,  // [B, Hq, Nq, d] in boxes of 64 rows x 64 columns
    const float* stats,  // [B, Hq, Nq padded to 128 / 16, 3, 16]: -lse in base 2, -delta, huge m (see delta)
    int Hq,  // query heads
    int Hk,  // key/value heads; query head h reads head h / (Hq / Hk)
    int Nq,  // query rows of a head
    int Nk,  // keys of a head
    float scale,  // of Q K^T
    float scale_log2)  // scale * log2(e): exp(scale * x) = exp2(scale_log2 * x)
{
    const u32 smem = smem_base();
    const Place here = place(block_index(), Hq, Hk, Nq, Nk);

    // Some row of the block sees the first seen_keys keys, in Tc tiles. Its first row, which sees least, sees keys 0 to last.
    // There is always a tile, of which all keys may be masked: then dQ is 0.
    const int seen_keys = min(here.query + Br, Nq) + Nk - Nq, last = here.query + Nk - Nq;
    const int Tc = max((seen_keys + Bc - 1) / Bc, 1);

    if (threadIdx.x == 0) {
        prefetch(Q_map);
        prefetch(K_map);
        prefetch(dO_map);
        prefetch(V_map);
        prefetch(dQ_map);
        mbarrier_init(smem + Q_full, 1);
        for (int s = 0; s < K_stages; ++s) {
            mbarrier_init(smem + K_full + 8 * s, 1);
            mbarrier_init(smem + K_empty + 8 * s, 4 * consumers);
        }
        for (int s = 0; s < V_stages; ++s) {
            mbarrier_init(smem + V_full + 8 * s, 1);
            mbarrier_init(smem + V_empty + 8 * s, 4 * consumers);
        }
        fence_mbarrier_init();
    }
    __syncthreads();  // the mbarriers are set up before anybody arrives or waits

    // Through a shuffle, so that the compiler knows that a warp has one role: setmaxnreg and wgmma take whole warps.
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (warpgroup == consumers) {
        give_registers_back<producer_registers>();
        if (thread_index() % 128 > 0) return;
        const int kv_head = here.head / (Hq / Hk);
        Ring<K_stages> K_ring = {0, 1};  // parity 1: the first wait for each buffer passes at once
        Ring<V_stages> V_ring = {0, 1};
        auto load_K = [&](int j) {
            const u32 full = smem + K_full + 8 * K_ring.stage, buffer = smem + K_smem + K_ring.stage * K_tile;
            mbarrier_wait(smem + K_empty + 8 * K_ring.stage, K_ring.parity);
            mbarrier_arrive_expect(full, K_tile);
            for (int c = 0; c < K_panels; ++c)
                tma_load(buffer + c * KV_panel, K_map, full, 64 * c, j * Bc, kv_head, here.batch);
            K_ring.advance();
        };
        auto load_V = [&](int j) {
            const u32 full = smem + V_full + 8 * V_ring.stage, buffer = smem + V_smem + V_ring.stage * V_tile;
            mbarrier_wait(smem + V_empty + 8 * V_ring.stage, V_ring.parity);
            mbarrier_arrive_expect(full, V_tile);
            for (int c = 0; c < V_panels; ++c)
                tma_load(buffer + c * KV_panel, V_map, full, 64 * c, j * Bc, kv_head, here.batch);
            V_ring.advance();
        };
        mbarrier_arrive_expect(smem + Q_full, (K_panels + V_panels) * Q_panel);
        for (int c = 0; c < K_panels; ++c)
            tma_load(smem + Q_smem + c * Q_panel, Q_map, smem + Q_full, 64 * c, here.query, here.head, here.batch);
        for (int c = 0; c < V_panels; ++c)
            tma_load(smem + dO_smem + c * Q_panel, dO_map, smem + Q_full, 64 * c, here.query, here.head, here.batch);
        // From the last tile to the first, in the order in which the consumers need them.
        for (int j = Tc - 1; j >= 0; --j) {
            load_K(j);
            load_V(j);
        }
        return;
    }

    take_registers<consumer_registers>();
    const int lane = threadIdx.x % 32;
    // Of Q and dO the rows of this warpgroup, in each panel.
    u64 Q_desc = descriptor(smem + Q_smem + warpgroup * 64 * 128, Q_panel), K_desc = descriptor(smem + K_smem, KV_panel);
    u64 dO_desc = descriptor(smem + dO_smem + warpgroup * 64 * 128, Q_panel), V_desc = descriptor(smem + V_smem, KV_panel);
    // At the top of each tile: else the compiler works out the descriptors of all steps ahead, and holds them in registers.
    auto hide_descriptors = [&] { asm volatile("" : "+l"(Q_desc), "+l"(K_desc), "+l"(dO_desc), "+l"(V_desc)); };
    Ring<K_stages> K_ring = {0, 0}, dQ_ring = {0, 0};  // K of the next S, and of the next dQ
    Ring<V_stages> V_ring = {0, 0};
    auto wait_K = [&] { mbarrier_wait(smem + K_full + 8 * K_ring.stage, K_ring.parity); };
    auto wait_V = [&] { mbarrier_wait(smem + V_full + 8 * V_ring.stage, V_ring.parity); };
    // Each warp for itself: that its own part of a product has finished is all that it knows.
    auto release = [&](int empty, auto& ring) {
        if (lane == 0) mbarrier_arrive(smem + empty + 8 * ring.stage);
        ring.advance();
    };

    // Of this thread's two rows, under the copies. m is 0 but of rows with huge scores.
    Rows minus_lse, minus_delta, m;
    #pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int q = thread_query(here) + 8 * h;
        const float* const row = stats + head_stats(here, Hq, Nq) + stats_of(q);
        minus_lse[h] = q < Nq ? row[0] : -infinity();  // past the end P is 0
        minus_delta[h] = q < Nq ? row[minus_delta_of] : 0.f;
        m[h] = q < Nq ? row[huge_m] : 0.f;
    }
    const bool huge = __any_sync(~0u, m[0] != 0.f || m[1] != 0.f);

    Gradients dQ_rmem = {};
    Scores S, dP;
    Rounded dS;
    int j = Tc - 1;  // the tile

    // S gives way to P = exp(scale S - lse). Two branches, and not one for what is huge: a branch ends with all of its
    // exponentials, and ptxas moves none of them below the wait for dP, where less would be left to run under the products.
    auto weigh = [&](auto masked) {
        if (masked.value) mask(S, last - j * Bc);
        if (huge) {
            // Of a row with huge scores `delta` gives the max m apart; in lse it would have swallowed l.
            constexpr float log2_e = 1.4426950408889634f;
            #pragma unroll
            for (int n = 0; n < Bc / 8; ++n)
                #pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float below_m = __fsub_rn(__fmul_rn(S[0][n][e], scale), m[e / 2]);  // not fused: exactly 0 at the max
                    S[0][n][e] = ex2(fmaf(below_m, log2_e, minus_lse[e / 2]));
                }
        } else {
            #pragma unroll
            for (int n = 0; n < Bc / 8; ++n)
                #pragma unroll
                for (int e = 0; e < 4; ++e) S[0][n][e] = ex2(fmaf(S[0][n][e], scale_log2, minus_lse[e / 2]));
        }
    };
    // dP gives way to dS = P o (dP - delta).
    auto differentiate = [&] {
        #pragma unroll
        for (int n = 0; n < Bc / 8; ++n)
            #pragma unroll
            for (int e = 0; e < 4; ++e) dP[0][n][e] = S[0][n][e] * (dP[0][n][e] + minus_delta[e / 2]);
    };

    // dS of the last tile, the only one that can be incomplete.
    mbarrier_wait(smem + Q_full, 0);
    wait_K();
    wgmma_fence();
    multiply_rows<d>(S, Q_desc, K_desc);
    K_ring.advance();
    wait_V();
    multiply_rows<dv>(dP, dO_desc, V_desc);
    wgmma_wait<1>();
    pin(S);
    weigh(Bool<true>());
    wgmma_wait<0>();
    pin(dP);
    release(V_empty, V_ring);
    differentiate();
    round(dS, dP);
    pin(dQ_rmem);
    --j;

    // dS of tile j and, of the tile before, dQ += dS K.
    auto step = [&](auto masked) {
        hide_descriptors();
        wait_K();
        wgmma_fence();
        multiply_rows<d>(S, Q_desc, K_desc + K_ring.stage * (K_tile / 16));
        K_ring.advance();
        wait_V();
        multiply_rows<dv>(dP, dO_desc, V_desc + V_ring.stage * (V_tile / 16));
        multiply_dS(dQ_rmem, dS, K_desc + dQ_ring.stage * (K_tile / 16));
        wgmma_wait<2>();  // S is there; dP and dQ may go on
        pin(S);
        weigh(masked);
        wgmma_wait<1>();  // dP is there
        pin(dP);
        release(V_empty, V_ring);
        differentiate();
        wgmma_wait<0>();
        pin(dQ_rmem);
        pin(dP);  // it is rounded after the wait: till then dS is being read
        release(K_empty, dQ_ring);
        round(dS, dP);
        --j;
    };
    while (j >= 0 && (j + 1) * Bc - 1 > last + 64 * warpgroup) step(Bool<true>());
    while (j >= 0) step(Bool<false>());
    wgmma_fence();
    multiply_dS(dQ_rmem, dS, K_desc + dQ_ring.stage * (K_tile / 16));
    wgmma_wait<0>();
    pin(dQ_rmem);

    // dQ passes through this warpgroup's rows of Q, in its panels and with its swizzle; TMA leaves out rows beyond Nq. The
    // block's place is worked out again rather than held in registers through the loop.
    const Place there = place(block_index(), Hq, Hk, Nq, Nk);
    barrier_sync<128>(1 + warpgroup);  // the warpgroup's four warps have read its Q
    put_rows(smem_base() + Q_smem, dQ_rmem, scale);
    fence_proxy_async();
    barrier_sync<128>(1 + warpgroup);  // the rows have been written, and TMA will see them
    if (thread_index() % 128 == 0) {
        for (int c = 0; c < K_panels; ++c)
            tma_store(dQ_map, smem_base() + Q_smem + c * Q_panel + warpgroup * 64 * 128, 64 * c, there.query + warpgroup * 64,
                      there.head, there.batch);
        tma_store_wait();
    }
}
