// fused90_fp16_d64_causal_sm90_Br128_Bc128_s2_ds2
// dK and dV of one K/V tile, and its part of dQ by atomic sums.
//
// Rendered by flashsmith from key_block90.cu.j2.
// grid   B * Hk * Tc: batch, K/V head, K/V tile, flat in x
// block  384 threads, 12 warps
// smem        0  K_smem     16384 B  [1][128][64]
//         16384  V_smem     16384 B  [1][128][64]
//         32768  Q_smem     32768 B  [2][1][128][64]
//         65536  dO_smem    32768 B  [2][1][128][64]
//         98304  dS_smem    65536 B  [2][2][128][64]
//        163840  dQ_smem    32768 B  128 x 64 floats in the order of the fragments
//        196608  stats_smem   3072 B  [2][8][3][16] floats
//        199680  barriers      48 B  [6] mbarriers
//        199728  slack       1024 B  the first buffer begins at the next multiple of 1024 B
//        200752  in all, dynamic

// FlashAttention-2, Algorithm 2, with S and dP transposed: S^T = K Q^T and dP^T = V dO^T. The last warpgroup, the producer,
// has TMA copy K and V, and then tile after tile of Q and dO into rings of buffers. Each of the others, the consumers, owns 64
// keys, and what the tensor cores leave in its registers, P^T and dS^T, is the left operand of dV += P^T dO and dK += dS^T Q as
// it is. Buffers go back and forth between them by mbarriers: `full` when the bytes of Q, and of dO, have arrived, `empty` when
// every warp of the consumers has done with both.
// dQ^T = K^T dS^T takes dS of all keys, through shared memory. Of a tile each consumer computes one half of the rows and has TMA add
// them to the sums in global memory.
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr int d = 64;  // head dimension of Q and K
constexpr int dv = 64;  // of V and dO
constexpr int Br = 128;  // query rows of a Q/dO tile
constexpr int Bc = 128;  // keys of a block
constexpr int stages = 2;  // buffers of Q, and of dO
constexpr int consumers = Bc / 64;
constexpr int threads = 128 * (consumers + 1);

// Registers of a thread once the roles are given out. All threads start with the same number, which lies between the two.
constexpr int producer_registers = 24;
constexpr int consumer_registers = 240;

// What a consumer computes of dQ^T: 16 columns a warp, for all rows of a tile or for one half.
constexpr int columns = 64;  // of dQ: d in whole blocks of 16
constexpr int dQ_rows = Br / consumers;
constexpr int dQ_blocks = columns / 16;  // blocks of 16 columns of the first consumer
constexpr int dQ_block = dQ_rows * 16 * 4;  // bytes of their sums
constexpr int dQ_piece = dQ_blocks * dQ_block;

// What a thread holds of its warp's keys, for key 8 h + lane / 4:
using Scores = float[1][Br / 8][4];  // [n][2 h + c], query 8 n + lane % 4 * 2 + c
using Weights = u32[Br / 16][4];     // [y], P^T or dS^T of 16 queries as the left operand of a product
using Keys = float[1][d / 8][4];     // [n][2 h + c], column 8 n + lane % 4 * 2 + c of dK
using Values = float[1][dv / 8][4];  // of dV
using Queries = float[1][dQ_rows / 8][4];  // dQ^T: [n][2 h + c], column 8 h + lane / 4, query 8 n + lane % 4 * 2 + c

// Byte offsets in shared memory. A matrix lies in panels of 64 columns, zeros beyond its last. A row of a panel is 128 bytes
// or eight chunks, and chunk c of row r lies in place c ^ r % 8: TMA writes them so, and wgmma reads them so.
constexpr int K_smem = 0;  // [1][128][64]
constexpr int V_smem = 16384;  // [1][128][64]
constexpr int Q_smem = 32768;  // [2][1][128][64]
constexpr int dO_smem = 65536;  // [2][1][128][64]
constexpr int dS_smem = 98304;  // [2][2][128][64]
constexpr int dQ_smem = 163840;  // 128 x 64 floats in the order of the fragments
constexpr int stats_smem = 196608;  // [2][8][3][16] floats
constexpr int barriers = 199680;  // [6] mbarriers
constexpr int K_panels = (d + 63) / 64, V_panels = (dv + 63) / 64;
constexpr int KV_panel = Bc * 128, Q_panel = Br * 128;  // bytes; dS has panels of Q_panel as well, one for each consumer's keys
constexpr int K_tile = K_panels * KV_panel, V_tile = V_panels * KV_panel;
constexpr int Q_tile = K_panels * Q_panel, dO_tile = V_panels * Q_panel;
constexpr int dS_tile = consumers * Q_panel;

constexpr int Q_full = barriers, dO_full = Q_full + 8 * stages, empty = dO_full + 8 * stages;  // one for each buffer

// Statistics of 16 query rows lie together, [3][16] floats: -lse in base 2, -delta, huge m.
constexpr int minus_delta = 64;  // bytes from a row's -lse
constexpr int huge_m = 128;
constexpr int stats_bytes = Br / 16 * 192;  // of a tile

// Bytes from the -lse of query 0 to that of query q.
__device__ __forceinline__ constexpr int stats_of(int q)
{
    return q / 16 * 192 + q % 16 * 4;
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
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
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

// Four 8x8 matrices to shared memory, the reverse of ldmatrix_x4.
__device__ __forceinline__ void stmatrix_x4(u32 address, const u32 (&R)[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], { %1,%2,%3,%4};"
                 :: "r"(address), "r"(R[0]), "r"(R[1]), "r"(R[2]), "r"(R[3]) : "memory");
}

// Four 8x8 matrices to shared memory, each transposed.
__device__ __forceinline__ void stmatrix_x4_trans(u32 address, const u32 (&R)[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], { %1,%2,%3,%4};"
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

// Bytes in a line to shared memory; they count towards the mbarrier.
__device__ __forceinline__ void bulk_load(u32 destination, const float* source, int bytes, u32 barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(destination), "l"(source), "r"(bytes), "r"(barrier) : "memory");
}

// Announces bytes that TMA will bring, and leaves it to others to arrive.
__device__ __forceinline__ void mbarrier_expect(u32 barrier, int bytes)
{
    asm volatile("mbarrier.expect_tx.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

// Adds floats in a line of shared memory to those in global memory, each atomically.
__device__ __forceinline__ void bulk_add(float* destination, u32 source, int bytes)
{
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                 :: "l"(destination), "r"(source), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// The sums of this thread have been read from shared memory.
__device__ __forceinline__ void bulk_add_wait() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
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

// D (+)= A B: D [64, Br], A 16 columns of K or V, B 16 columns of Q or dO.
__device__ __forceinline__ void wgmma_scores(float (&D)[1][16][4], u64 A, u64 B, bool add)
{
    asm volatile("{\n"
                 ".reg .pred add;\n"
                 "setp.ne.b32 add, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
                 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
                 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
                 "}, %64, %65, add, 1, 1, 0, 0;\n"
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
                 : "l"(A), "l"(B), "r"(static_cast<int>(add)));
}

// D += A B: D [64, d], A [64, 16] of dS^T or P^T, B 16 rows of Q or dO.
__device__ __forceinline__ void wgmma_sums(float (&D)[1][8][4], const u32 (&A)[4], u64 B, bool add)
{
    asm volatile("{\n"
                 ".reg .pred add;\n"
                 "setp.ne.b32 add, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
                 "}, { %32,%33,%34,%35}, %36, add, 1, 1, 1;\n"
                 "}"
                 : "+f"(D[0][0][0]), "+f"(D[0][0][1]), "+f"(D[0][0][2]), "+f"(D[0][0][3]),
                   "+f"(D[0][1][0]), "+f"(D[0][1][1]), "+f"(D[0][1][2]), "+f"(D[0][1][3]),
                   "+f"(D[0][2][0]), "+f"(D[0][2][1]), "+f"(D[0][2][2]), "+f"(D[0][2][3]),
                   "+f"(D[0][3][0]), "+f"(D[0][3][1]), "+f"(D[0][3][2]), "+f"(D[0][3][3]),
                   "+f"(D[0][4][0]), "+f"(D[0][4][1]), "+f"(D[0][4][2]), "+f"(D[0][4][3]),
                   "+f"(D[0][5][0]), "+f"(D[0][5][1]), "+f"(D[0][5][2]), "+f"(D[0][5][3]),
                   "+f"(D[0][6][0]), "+f"(D[0][6][1]), "+f"(D[0][6][2]), "+f"(D[0][6][3]),
                   "+f"(D[0][7][0]), "+f"(D[0][7][1]), "+f"(D[0][7][2]), "+f"(D[0][7][3])
                 : "r"(A[0]), "r"(A[1]), "r"(A[2]), "r"(A[3]), "l"(B), "r"(static_cast<int>(add)));
}

// D (+)= A B: D [64, dQ_rows], A 16 rows of K, B 16 columns of dS.
__device__ __forceinline__ void wgmma_dQ(float (&D)[1][8][4], u64 A, u64 B, bool add)
{
    asm volatile("{\n"
                 ".reg .pred add;\n"
                 "setp.ne.b32 add, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
                 "}, %32, %33, add, 1, 1, 1, 0;\n"
                 "}"
                 : "+f"(D[0][0][0]), "+f"(D[0][0][1]), "+f"(D[0][0][2]), "+f"(D[0][0][3]),
                   "+f"(D[0][1][0]), "+f"(D[0][1][1]), "+f"(D[0][1][2]), "+f"(D[0][1][3]),
                   "+f"(D[0][2][0]), "+f"(D[0][2][1]), "+f"(D[0][2][2]), "+f"(D[0][2][3]),
                   "+f"(D[0][3][0]), "+f"(D[0][3][1]), "+f"(D[0][3][2]), "+f"(D[0][3][3]),
                   "+f"(D[0][4][0]), "+f"(D[0][4][1]), "+f"(D[0][4][2]), "+f"(D[0][4][3]),
                   "+f"(D[0][5][0]), "+f"(D[0][5][1]), "+f"(D[0][5][2]), "+f"(D[0][5][3]),
                   "+f"(D[0][6][0]), "+f"(D[0][6][1]), "+f"(D[0][6][2]), "+f"(D[0][6][3]),
                   "+f"(D[0][7][0]), "+f"(D[0][7][1]), "+f"(D[0][7][2]), "+f"(D[0][7][3])
                 : "l"(A), "l"(B), "r"(static_cast<int>(add)));
}

// S^T = K Q^T or dP^T = V dO^T    [64, Br] = [64, width] [width, Br], a group of its own. A step is 16 columns, 32 bytes in a row
// of a panel.
template <int width>
__device__ __forceinline__ void multiply_columns(Scores& D, u64 A, u64 B)
{
    #pragma unroll
    for (int x = 0; x < (width + 15) / 16; ++x)
        wgmma_scores(D, A + (x / 4 * KV_panel + x % 4 * 32) / 16, B + (x / 4 * Q_panel + x % 4 * 32) / 16, x > 0);
    wgmma_commit();
}

// dV += P^T dO or dK += dS^T Q    [64, width] += [64, Br] [Br, width], a group of its own. A step is 16 queries, 16 rows of a
// panel.
template <int blocks>
__device__ __forceinline__ void multiply_rows(float (&D)[1][blocks][4], const Weights& A, u64 B)
{
    #pragma unroll
    for (int y = 0; y < Br / 16; ++y) wgmma_sums(D, A[y], B + y * 16 * 128 / 16, true);
    wgmma_commit();
}

// dQ^T = K^T dS^T    [64, dQ_rows] = [64, Bc] [Bc, dQ_rows], a group of its own. A step is 16 keys: 16 rows of a panel of K,
// 32 bytes in a row of a panel of dS.
__device__ __forceinline__ void multiply_dS(Queries& dQ, u64 K, u64 dS)
{
    #pragma unroll
    for (int y = 0; y < Bc / 16; ++y)
        wgmma_dQ(dQ, K + y * 16 * 128 / 16, dS + (y / 4 * Q_panel + y % 4 * 32) / 16, y > 0);
    wgmma_commit();
}

// P^T = exp(scale S^T - lse), in place.
__device__ __forceinline__ void weigh(Scores& S, u32 stats_lane, float scale_log2)
{
    #pragma unroll
    for (int n = 0; n < Br / 8; ++n) {
        float minus_lse[2];
        ld_shared_v2(minus_lse, stats_lane + stats_of(8 * n));
        #pragma unroll
        for (int e = 0; e < 4; ++e) S[0][n][e] = ex2(fmaf(S[0][n][e], scale_log2, minus_lse[e % 2]));
    }
}

// The same where scores are huge: there lse would swallow l, so that m comes off first; in all other rows m is 0.
__device__ __forceinline__ void weigh_with_care(Scores& S, u32 stats_lane, float scale)
{
    constexpr float log2_e = 1.4426950408889634f;
    #pragma unroll
    for (int n = 0; n < Br / 8; ++n) {
        float minus_lse[2], m[2];
        ld_shared_v2(minus_lse, stats_lane + stats_of(8 * n));
        ld_shared_v2(m, stats_lane + huge_m + stats_of(8 * n));
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float below_m = __fsub_rn(__fmul_rn(S[0][n][e], scale), m[e % 2]);  // not fused: exactly 0 at the max
            S[0][n][e] = ex2(__fmaf_rn(below_m, log2_e, minus_lse[e % 2]));
        }
    }
}

__device__ __forceinline__ void st_shared_v4(u32 address, const float (&x)[4])
{
    asm volatile("st.shared.v4.f32 [%0], { %1,%2,%3,%4};" :: "r"(address), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}

// The sums of a warp to shared memory as its lanes hold them, 512 bytes for each 8 queries.
__device__ __forceinline__ void put_sums(u32 destination, const Queries& dQ)
{
    #pragma unroll
    for (int n = 0; n < dQ_rows / 8; ++n) st_shared_v4(destination + n * 512, dQ[0][n]);
}

// This warpgroup's 64 rows of X times a factor to a tile of K or V, in its panels and with its swizzle.
template <int blocks>
__device__ __forceinline__ void put_rows(u32 tile, const float (&X)[1][blocks][4], float factor)
{
    const int thread = thread_index(), row = thread / 32 * 16 + thread % 16;
    auto chunk = [&](int c) { return tile + c / 8 * KV_panel + row * 128 + ((c % 8 ^ row % 8) << 4); };
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
struct Ring {
    int stage;
    u32 parity;  // flips with each round

    __device__ __forceinline__ void advance()
    {
        if (++stage < stages) return;
        stage = 0;
        parity ^= 1;
    }
};

template <bool known>
struct Bool {
    static constexpr bool value = known;
};

struct Place {
    int key;  // the first of the K/V tile
    int head, batch;
};

// Query rows whose Q and dO, and sums of dQ, fill half of the L2 cache.
constexpr int cached_queries = 51200;

// The K/V tile of a block. Blocks start in the order of their number, and early keys are seen by most queries, so all heads'
// first tiles should come first; but the heads in work at once share the L2 cache. So heads are dealt with in groups whose
// queries take half of it, longest loops first within a group. The last group takes the heads that are left over as well.
__device__ __forceinline__ Place place(int block, int Hq, int Hk, int Nq, int Nk)
{
    const int Tc = (Nk + Bc - 1) / Bc, matrices = gridDim.x / Tc;  // the B x Hk matrices of K
    const int group = min(max(1, cached_queries / Nq / (Hq / Hk)), matrices);
    const int first = min(block / (Tc * group), matrices / group - 1) * group;
    const int members = first + 2 * group <= matrices ? group : matrices - first;
    const int tile = (block - first * Tc) / members, matrix = first + (block - first * Tc) % members;
    return {tile * Bc, matrix % Hk, matrix / Hk};
}

extern "C" __global__ void __launch_bounds__(threads, 1) fused90(
    const __grid_constant__ TensorMap Q_map,  // [B, Hq, Nq, d] in boxes of Br rows x 64 columns
    const __grid_constant__ TensorMap K_map,  // [B, Hk, Nk, d] in boxes of Bc rows x 64 columns
    const __grid_constant__ TensorMap V_map,  // [B, Hk, Nk, dv] in boxes of Bc rows x 64 columns
    const __grid_constant__ TensorMap dO_map,  // [B, Hq, Nq, dv] in boxes of Br rows x 64 columns
    const __grid_constant__ TensorMap dK_map,  // [B, Hk, Nk, d] in boxes of 64 rows x 64 columns
    const __grid_constant__ TensorMap dV_map,  // [B, Hk, Nk, dv] in boxes of 64 rows x 64 columns
    const float* stats,  // [B, Hq, Nq padded to 128 / 16, 3, 16]: -lse in base 2, -delta, huge m (see delta)
    float* dQ_acc,  // [B, Hq, Tr, Br * columns], sums of dQ / scale in the order of the fragments
    int Hq,  // query heads
    int Hk,  // key/value heads; query head h reads head h / (Hq / Hk)
    int Nq,  // query rows of a head
    int Nk,  // keys of a head
    float scale,  // of Q K^T
    float scale_log2)  // scale * log2(e): exp(scale * x) = exp2(scale_log2 * x)
{
    const u32 smem = smem_base();
    const Place here = place(block_index(), Hq, Hk, Nq, Nk);

    // Its loop: the Q tiles of every query head that reads this K/V head, one after the other, so that dK and dV need
    // no atomic sums.
    const int group = Hq / Hk, head_q = here.head * group, Tr = (Nq + Br - 1) / Br;
    const int diagonal = Nk - Nq;                               // query i sees the keys up to i + diagonal
    const int first_tile = max(0, (here.key - diagonal) / Br);  // of a head: the first with a query that sees a key

    if (threadIdx.x == 0) {
        for (int s = 0; s < stages; ++s) {
            mbarrier_init(smem + Q_full + 8 * s, 1);
            mbarrier_init(smem + dO_full + 8 * s, 1);
            mbarrier_init(smem + empty + 8 * s, 4 * consumers);
        }
        fence_mbarrier_init();
    }
    __syncthreads();  // the mbarriers are set up before anybody arrives or waits

    // Through a shuffle, so that the compiler knows that a warp has one role: setmaxnreg and wgmma take whole warps.
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (warpgroup == consumers) {
        give_registers_back<producer_registers>();
        if (thread_index() % 128 > 0) return;
        prefetch(Q_map);
        prefetch(K_map);
        prefetch(V_map);
        prefetch(dO_map);
        prefetch(dK_map);
        prefetch(dV_map);

        // K comes with the first Q, V with the first dO.
        mbarrier_expect(smem + Q_full, K_tile);
        for (int c = 0; c < K_panels; ++c)
            tma_load(smem + K_smem + c * KV_panel, K_map, smem + Q_full, 64 * c, here.key, here.head, here.batch);
        mbarrier_expect(smem + dO_full, V_tile);
        for (int c = 0; c < V_panels; ++c)
            tma_load(smem + V_smem + c * KV_panel, V_map, smem + dO_full, 64 * c, here.key, here.head, here.batch);

        const int stats_rows = (Nq + 127) / 128 * 128;  // of a head
        Ring ring = {0, 1};  // parity 1: the first wait for each buffer passes at once
        for (int head = head_q; head < head_q + group; ++head) {
            const float* stats_head = stats + (static_cast<i64>(here.batch) * Hq + head) * stats_rows * 3;
            for (int i0 = first_tile * Br; i0 < Nq; i0 += Br, ring.advance()) {
                u32 full = smem + Q_full + 8 * ring.stage, buffer = smem + Q_smem + ring.stage * Q_tile;
                const u32 stats_tile = smem + stats_smem + ring.stage * stats_bytes;
                mbarrier_wait(smem + empty + 8 * ring.stage, ring.parity);
                constexpr int bytes = stats_bytes;
                mbarrier_arrive_expect(full, Q_tile + bytes);
                for (int c = 0; c < K_panels; ++c)
                    tma_load(buffer + c * Q_panel, Q_map, full, 64 * c, i0, head, here.batch);
                bulk_load(stats_tile, stats_head + static_cast<i64>(i0) * 3, bytes, full);

                full = smem + dO_full + 8 * ring.stage, buffer = smem + dO_smem + ring.stage * dO_tile;
                mbarrier_arrive_expect(full, dO_tile);
                for (int c = 0; c < V_panels; ++c)
                    tma_load(buffer + c * Q_panel, dO_map, full, 64 * c, i0, head, here.batch);
            }
        }
        return;
    }

    take_registers<consumer_registers>();
    const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
    const u32 own_rows = warpgroup * 64 * 128;  // bytes from the first row of K and V to the first of this warpgroup
    const u64 K_desc = descriptor(smem + K_smem + own_rows, KV_panel);
    const u64 V_desc = descriptor(smem + V_smem + own_rows, KV_panel);
    const u64 Q_desc = descriptor(smem + Q_smem, Q_panel), dO_desc = descriptor(smem + dO_smem, Q_panel);
    const u32 stats_lane = smem + stats_smem + lane % 4 * 8;  // of this thread's queries
    // Statistics of four queries for each lane: is one of them huge?
    const u32 huge_lane = smem + stats_smem + huge_m + stats_of(lane % (Br / 4) * 4);
    const int first_key = here.key + warpgroup * 64;  // of this warpgroup

    // The 64 columns of K and the rows of dS whose product is this warpgroup's part of dQ^T.
    const u64 K_columns = descriptor(smem + K_smem, KV_panel);
    const u64 dS_desc = descriptor(smem + dS_smem + warpgroup * dQ_rows * 128, Q_panel);
    const u32 dQ_own = smem + dQ_smem + warpgroup * dQ_piece;
    // Where the sums of dQ of the tile lie.
    float* dQ_tile = dQ_acc + (static_cast<i64>(here.batch) * Hq + head_q) * Tr * (Br * columns) + warpgroup * (dQ_piece / 4);
    // dS^T is transposed on its way: this lane stores a row of 8 keys, a chunk of a row of this warpgroup's panel of dS.
    const int dS_row = lane / 16 * 8 + lane % 8, dS_chunk = warp * 2 + lane / 8 % 2;
    const u32 dS_lane = smem + dS_smem + warpgroup * Q_panel + dS_row * 128 + ((dS_chunk ^ dS_row % 8) << 4);
    u32 dS_stage = 0;  // bytes to the buffer of dS

    Keys dK_rmem = {};
    Values dV_rmem = {};
    Ring ring = {0, 0};
    int left = group * (Tr - first_tile);  // tiles
    int i0 = 0;  // first query of the tile

    auto step = [&](auto masked) {
        Scores S, dP;
        Weights P, dS;
        const u32 stats_stage = ring.stage * stats_bytes;

        // S^T = K Q^T, and then dP^T = V dO^T under the exponentials
        mbarrier_wait(smem + Q_full + 8 * ring.stage, ring.parity);
        pin(dK_rmem);
        pin(dV_rmem);
        wgmma_fence();
        multiply_columns<d>(S, K_desc, Q_desc + ring.stage * (Q_tile / 16));
        mbarrier_wait(smem + dO_full + 8 * ring.stage, ring.parity);
        multiply_columns<dv>(dP, V_desc, dO_desc + ring.stage * (dO_tile / 16));
        u32 m[4];
        ld_shared_v4(m, huge_lane + stats_stage);
        const bool special = (m[0] | m[1] | m[2] | m[3]) != 0;
        wgmma_wait<1>();  // S is there
        pin(S);

        // Two branches, and not one for what is special: a branch ends with all of its exponentials, and ptxas moves none of them
        // below the wait for dP, where nothing would be left to run under the product.
        if (__any_sync(~0u, special))
            weigh_with_care(S, stats_lane + stats_stage, scale);
        else
            weigh(S, stats_lane + stats_stage, scale_log2);
        if (masked.value) {
            // Of this thread's keys, the number of the last one that its first query sees.
            const int last_seen = i0 + lane % 4 * 2 + diagonal - (first_key + warp * 16 + lane / 4);
            #pragma unroll
            for (int n = 0; n < Br / 8; ++n)
                #pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (e / 2 * 8 > last_seen + 8 * n + e % 2) S[0][n][e] = 0.f;
        }
        pin(S);
        // The last sums of dQ must have been read before they are overwritten, behind the barrier below.
        if (thread == 0) bulk_add_wait();
        wgmma_wait<0>();
        pin(dP);

        // dS^T = P^T o (dP^T - delta), both in 16 bits. P is rounded no earlier: beside S and dP it would take registers. And not
        // from the first queries to the last, with which ptxas spills where tiles are as large as can be.
        #pragma unroll
        for (int y = Br / 16 - 1; y >= 0; --y) {
            #pragma unroll
            for (int n = 2 * y; n < 2 * y + 2; ++n) {
                float minus_delta_of[2];
                ld_shared_v2(minus_delta_of, stats_lane + stats_stage + minus_delta + stats_of(8 * n));
                #pragma unroll
                for (int e = 0; e < 4; ++e) dP[0][n][e] = S[0][n][e] * (dP[0][n][e] + minus_delta_of[e % 2]);
            }
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int n = 2 * y + e / 2, r = e % 2 * 2;
                P[y][e] = pack(S[0][n][r], S[0][n][r + 1]);
                dS[y][e] = pack(dP[0][n][r], dP[0][n][r + 1]);
            }
        }
        // Before dV is issued: beside a product in flight ptxas would run out of registers.
        #pragma unroll
        for (int y = 0; y < Br / 16; ++y) stmatrix_x4_trans(dS_lane + dS_stage + y * 16 * 128, dS[y]);

        // dV += P^T dO
        wgmma_fence();
        multiply_rows(dV_rmem, P, dO_desc + ring.stage * (dO_tile / 16));
        fence_proxy_async();
        barrier_sync<256>(1);  // both warpgroups' dS is there, and the last sums of dQ have been read

        // dQ^T = K^T dS^T and dK += dS^T Q
        Queries dQ;
        wgmma_fence();
        multiply_dS(dQ, K_columns, dS_desc + dS_stage / 16);
        multiply_rows(dK_rmem, dS, Q_desc + ring.stage * (Q_tile / 16));
        wgmma_wait<1>();  // all but dK
        pin(dV_rmem);
        pin(dQ);
        put_sums(dQ_own + warp * dQ_block + lane * 16, dQ);
        fence_proxy_async();
        barrier_sync<128>(2 + warpgroup);  // this warpgroup's part of dQ is there
        if (thread == 0) bulk_add(dQ_tile, dQ_own, dQ_piece);
        dQ_tile += Br * columns;
        wgmma_wait<0>();
        pin(dK_rmem);
        if (lane == 0) mbarrier_arrive(smem + empty + 8 * ring.stage);  // each warp for itself
        dS_stage ^= dS_tile;
        ring.advance();
        --left;
        i0 += Br;
    };
    while (left > 0) {  // query head by query head
        i0 = first_tile * Br;
        dQ_tile += first_tile * (Br * columns);
        while (i0 < Nq && i0 + diagonal < first_key + 63) step(Bool<true>());
        while (i0 < Nq) step(Bool<false>());
    }

    // dK and dV in the places of K and V, rows of this warpgroup; TMA leaves out keys past the end. The block's place is worked
    // out again rather than held in registers through the loop.
    const Place there = place(block_index(), Hq, Hk, Nq, Nk);
    barrier_sync<256>(1);  // both warpgroups are done with K and V
    put_rows(smem_base() + V_smem, dV_rmem, 1.f);
    put_rows(smem_base() + K_smem, dK_rmem, scale);
    fence_proxy_async();
    barrier_sync<128>(2 + warpgroup);  // the rows have been written, and TMA will see them
    if (thread == 0) {
        const int key = there.key + warpgroup * 64;
        for (int c = 0; c < V_panels; ++c)
            tma_store(dV_map, smem_base() + V_smem + c * KV_panel + own_rows, 64 * c, key, there.head, there.batch);
        for (int c = 0; c < K_panels; ++c)
            tma_store(dK_map, smem_base() + K_smem + c * KV_panel + own_rows, 64 * c, key, there.head, there.batch);
        tma_store_wait();
    }
}
