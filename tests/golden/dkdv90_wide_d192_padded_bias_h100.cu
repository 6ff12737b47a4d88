// dkdv90_wide_bf16_d192_causal_padded_mod8eb9ac38_sm90_Bc96_c3_s2_gs2_ov1
// dK and dV of one K/V tile, of heads whose sums no warpgroup could hold for 64 keys.
// With padded, score_mod 'score + bias[b, h, i, j]', bias.fp32.grad.
//
// Rendered by flashsmith from key_block90_wide.cu.j2.
// grid   B * Hk * Tc: batch, K/V head, K/V tile, flat in x
// block  512 threads, 16 warps
// smem        0  K_smem     36864 B  [3][96][64]
//         36864  V_smem     36864 B  [3][96][64]
//         73728  Q_smem     49152 B  [2][3][64][64]
//        122880  dO_smem    49152 B  [2][3][64][64]
//        172032  P_smem     16384 B  [2][64][64]
//        188416  dS_smem    16384 B  [2][64][64]
//        204800  stats_smem   1536 B  [2][4][3][16] floats
//        206336  barriers      72 B  [9] mbarriers
//        206408  slack       1024 B  the first buffer begins at the next multiple of 1024 B
//        207432  in all, dynamic

// The first half of the split backward. The last warpgroup, the producer, has TMA copy K and V, and then tile after tile of Q
// and dO into rings of buffers. The others, the consumers, share the keys of S = Q K^T and dP = dO V^T and leave P and dS in
// shared memory. Of dV^T += dO^T P and dK^T += Q^T dS they share the columns, 64 at once, for all keys of the block. Buffers go
// back and forth between them by two mbarriers: `full` when the bytes have arrived, `empty` when every warp of the consumers
// has done with them.
using u32 = unsigned int;
using i64 = long long;
using T = unsigned short;  // the bits of a __nv_bfloat16
using u64 = unsigned long long;

// A tensor [batch, head, row, column]. Strides count elements, 64-bit; columns are contiguous.
template <typename E>
struct View {
    E* data;
    i64 batch, head, row;
};

constexpr int d = 192;  // head dimension of Q and K
constexpr int dv = 192;  // of V and dO
constexpr int Br = 64;  // query rows of a Q/dO tile
constexpr int Bc = 96;  // keys of a block
constexpr int Q_stages = 2, dO_stages = 2;  // buffers
constexpr int consumers = 3;
constexpr int threads = 128 * (consumers + 1);
constexpr int own_keys = Bc / consumers;  // whose S and dP a consumer computes

// Registers of a thread once the roles are given out. All threads start with the same number, which lies between the two.
constexpr int producer_registers = 32;
constexpr int consumer_registers = 160;

// What a thread holds of its warp's rows, for row 8 h + lane / 4: a query of S and dP, a column of dK^T and dV^T.
using Rows = float[2];                     // [h], one number a query
using Scores = float[1][own_keys / 8][4];  // [n][2 h + c], key 8 n + lane % 4 * 2 + c
using Rounded = u32[own_keys / 8][2];      // [n][h], P or dS of these two keys in 16 bits
using Sums = float[1][Bc / 8][4];          // dK^T or dV^T of 64 columns, as Scores

// Byte offsets in shared memory. A matrix lies in panels of 64 columns, zeros beyond its last; of P and dS the columns are keys.
// A row of a panel is 128 bytes or eight chunks, and chunk c of row r lies in place c ^ r % 8: so TMA and wgmma want them.
constexpr int K_smem = 0;  // [3][96][64]
constexpr int V_smem = 36864;  // [3][96][64]
constexpr int Q_smem = 73728;  // [2][3][64][64]
constexpr int dO_smem = 122880;  // [2][3][64][64]
constexpr int P_smem = 172032;  // [2][64][64]
constexpr int dS_smem = 188416;  // [2][64][64]
constexpr int stats_smem = 204800;  // [2][4][3][16] floats
constexpr int barriers = 206336;  // [9] mbarriers
constexpr int K_panels = (d + 63) / 64, V_panels = (dv + 63) / 64;
constexpr int KV_panel = Bc * 128, Q_panel = Br * 128;  // bytes; P and dS have panels of Q_panel as well
constexpr int K_tile = K_panels * KV_panel, V_tile = V_panels * KV_panel;
constexpr int Q_tile = K_panels * Q_panel, dO_tile = V_panels * Q_panel;

// Panels of dK and dV whose sums a consumer holds: of all every so many-th.
constexpr int K_blocks = (K_panels + consumers - 1) / consumers, V_blocks = (V_panels + consumers - 1) / consumers;

constexpr int KV_full = barriers;
constexpr int Q_full = KV_full + 8, Q_empty = Q_full + 8 * Q_stages;  // one for each buffer
constexpr int dO_full = Q_empty + 8 * Q_stages, dO_empty = dO_full + 8 * dO_stages;

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

// D (+)= A B: D [64, own_keys], A 16 columns of Q or dO, B 16 columns of K or V.
__device__ __forceinline__ void wgmma_scores(float (&D)[1][4][4], u64 A, u64 B, bool add)
{
    asm volatile("{\n"
                 ".reg .pred add;\n"
                 "setp.ne.b32 add, %18, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
                 "}, %16, %17, add, 1, 1, 0, 0;\n"
                 "}"
                 : "+f"(D[0][0][0]), "+f"(D[0][0][1]), "+f"(D[0][0][2]), "+f"(D[0][0][3]),
                   "+f"(D[0][1][0]), "+f"(D[0][1][1]), "+f"(D[0][1][2]), "+f"(D[0][1][3]),
                   "+f"(D[0][2][0]), "+f"(D[0][2][1]), "+f"(D[0][2][2]), "+f"(D[0][2][3]),
                   "+f"(D[0][3][0]), "+f"(D[0][3][1]), "+f"(D[0][3][2]), "+f"(D[0][3][3])
                 : "l"(A), "l"(B), "r"(static_cast<int>(add)));
}

// D += A B: D [64, Bc], A 16 rows of Q or dO, B 16 rows of dS or P.
__device__ __forceinline__ void wgmma_sums(float (&D)[1][12][4], u64 A, u64 B, bool add)
{
    asm volatile("{\n"
                 ".reg .pred add;\n"
                 "setp.ne.b32 add, %50, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
                 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
                 "}, %48, %49, add, 1, 1, 1, 1;\n"
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
                   "+f"(D[0][11][0]), "+f"(D[0][11][1]), "+f"(D[0][11][2]), "+f"(D[0][11][3])
                 : "l"(A), "l"(B), "r"(static_cast<int>(add)));
}

// S = Q K^T or dP = dO V^T    [64, own_keys] = [64, width] [width, own_keys], a group of its own. A step is 16 columns, 32 bytes
// in a row of a panel.
template <int width>
__device__ __forceinline__ void multiply_columns(Scores& D, u64 A, u64 B)
{
    #pragma unroll
    for (int x = 0; x < (width + 15) / 16; ++x)
        wgmma_scores(D, A + (x / 4 * Q_panel + x % 4 * 32) / 16, B + (x / 4 * KV_panel + x % 4 * 32) / 16, x > 0);
    wgmma_commit();
}

// dV^T += dO^T P or dK^T += Q^T dS    [columns, Bc] += [columns, Br] [Br, Bc], a group of its own, for every panel of which there
// are `panels` that this warpgroup owns. A step is 16 queries, 16 rows of a panel.
template <int panels, int blocks>
__device__ __forceinline__ void multiply_rows(Sums (&D)[blocks], u64 A, u64 B, int warpgroup)
{
    #pragma unroll
    for (int b = 0; b < blocks; ++b) {
        if (blocks * consumers > panels && b * consumers + warpgroup >= panels) continue;
        #pragma unroll
        for (int y = 0; y < Br / 16; ++y)
            wgmma_sums(D[b], A + (b * consumers * Q_panel + y * 16 * 128) / 16, B + y * 16 * 128 / 16, true);
    }
    wgmma_commit();
}

template <int blocks>
__device__ __forceinline__ void pin(Sums (&X)[blocks])
{
    #pragma unroll
    for (int b = 0; b < blocks; ++b) pin(X[b]);
}

// P or dS in 16 bits.
__device__ __forceinline__ void round(Rounded& R, const Scores& X)
{
    #pragma unroll
    for (int n = 0; n < own_keys / 8; ++n)
        #pragma unroll
        for (int h = 0; h < 2; ++h) R[n][h] = pack(X[0][n][2 * h], X[0][n][2 * h + 1]);
}

namespace score_mod {

using i64 = long long;

// A tensor of up to four dimensions. Strides count elements; dimensions that it has not got have stride 0 and size 1.
template <typename E>
struct Table {
    E* data;
    i64 stride[4];
    int size[4];
};

// Where an entry lies, in elements from the first. An index outside becomes the nearest inside: whatever a formula asks
// for, nothing outside the tensor is touched.
template <typename E, typename... Index>
__device__ __forceinline__ i64 offset(const Table<E>& table, Index... index)
{
    const int at[] = { index... };
    i64 sum = 0;
    #pragma unroll
    for (int k = 0; k < static_cast<int>(sizeof...(index)); ++k)
        sum += static_cast<unsigned int>(max(0, min(at[k], table.size[k] - 1))) * table.stride[k];
    return sum;
}

// Loads through the read-only path; not volatile, so that the compiler may take one out of a loop.
__device__ __forceinline__ float load(const float* address)
{
    float x;
    asm("ld.global.nc.f32 %0, [%1];" : "=f"(x) : "l"(address));
    return x;
}

// The entry of a table that nobody writes while the kernel runs.
template <typename E, typename... Index>
__device__ __forceinline__ float read(const Table<E>& table, Index... index)
{
    return load(table.data + offset(table, index...));
}

// The address of an entry: where its gradient is added up.
template <typename E, typename... Index>
__device__ __forceinline__ E* place(const Table<E>& table, Index... index)
{
    return table.data + offset(table, index...);
}

}  // namespace score_mod

// This warpgroup's keys of P or dS to shared memory.
__device__ __forceinline__ void put_scores(u32 destination, const Rounded& R, int warpgroup)
{
    const int thread = thread_index() % 128, row = thread / 32 * 16 + thread % 16;
    auto chunk = [&](int n) {
        const int c = warpgroup * (own_keys / 8) + n;
        return destination + c / 8 * Q_panel + row * 128 + ((c % 8 ^ row % 8) << 4);
    };
    #pragma unroll
    for (int n = 0; n + 1 < own_keys / 8; n += 2) {
        const u32 four[4] = {R[n][0], R[n][1], R[n + 1][0], R[n + 1][1]};
        stmatrix_x4(chunk(n + thread % 32 / 16), four);
    }
}

// 64 columns of dK or dV, which lie across, to a panel of K or V, times a factor. A lane stores 8 columns of a key.
__device__ __forceinline__ void put_columns(u32 panel, const Sums& X, float factor)
{
    const int thread = thread_index() % 128, lane = thread % 32, row = lane / 16 * 8 + lane % 8;
    const u32 place = panel + row * 128 + ((thread / 32 * 2 + lane / 8 % 2 ^ row % 8) << 4);
    auto pair = [&](int n, int h) { return pack(X[0][n][2 * h] * factor, X[0][n][2 * h + 1] * factor); };
    #pragma unroll
    for (int n = 0; n < Bc / 8; n += 2) {
        const u32 four[4] = {pair(n, 0), pair(n, 1), pair(n + 1, 0), pair(n + 1, 1)};
        stmatrix_x4_trans(place + n * 8 * 128, four);
    }
}

// Where [batch, head, row, column] lies. The strides are 64-bit, and so are all products.
template <typename E>
__device__ __forceinline__ E* at(const View<E>& X, int batch, int head, int row, int column)
{
    return X.data + batch * X.batch + head * X.head + row * X.row + column;
}

// Rows `from` and up of a tile become zeros, as they are where TMA reaches past the end of a tensor.
template <int panels, int rows>
__device__ __forceinline__ void clear_rows(u32 tile, int from)
{
    const u32 zeros[4] = {};
    const int thread = thread_index();
    for (int r = from + thread / 8; r < rows; r += 16 * consumers)
        for (int c = 0; c < panels; ++c) st_shared_v4(tile + (c * rows + r) * 128 + thread % 8 * 16, zeros);
}

// The first `count` rows of a panel to global memory, by a warpgroup: TMA would go on where a sequence ends.
__device__ __forceinline__ void store_panel(T* rows, i64 row, u32 panel, int count, int columns)
{
    const int thread = thread_index() % 128, chunk = thread % 8;
    if (8 * chunk >= columns) return;
    for (int r = thread / 8; r < count; r += 16) {
        u32 x[4];
        ld_shared_v4(x, panel + r * 128 + ((chunk ^ r % 8) << 4));
        *reinterpret_cast<uint4*>(rows + r * row + 8 * chunk) = make_uint4(x[0], x[1], x[2], x[3]);
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
    int key;  // the first of the K/V tile
    int head, batch;
};

// Query rows whose Q and dO fill half of the L2 cache.
constexpr int cached_queries = 34133;

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

extern "C" __global__ void __launch_bounds__(threads, 1) dkdv90_wide(
    const __grid_constant__ TensorMap Q_map,  // [B, Hq, Nq, d] in boxes of Br rows x 64 columns
    const __grid_constant__ TensorMap K_map,  // [B, Hk, Nk, d] in boxes of Bc rows x 64 columns
    const __grid_constant__ TensorMap V_map,  // [B, Hk, Nk, dv] in boxes of Bc rows x 64 columns
    const __grid_constant__ TensorMap dO_map,  // [B, Hq, Nq, dv] in boxes of Br rows x 64 columns
    View<T> dK,  // [B, Hk, Nk, d]
    View<T> dV,  // [B, Hk, Nk, dv]
    const float* stats,  // [B, Hq, Nq padded to 128 / 16, 3, 16]: -lse in base 2, -delta, huge m (see delta)
    int Hq,  // query heads
    int Hk,  // key/value heads; query head h reads head h / (Hq / Hk)
    int Nq,  // query rows of a head
    int max_Nk,  // keys of a head, of the longest sequence
    float score_scale,  // of Q K^T; then comes score_mod
    float score_scale_log2,  // scale * log2(e): exp(scale * x) = exp2(scale_log2 * x); then comes score_mod
    const int* k_lens,  // [B], keys of each sequence; the others are not seen
    score_mod::Table<float> table_bias,  // `bias` of score_mod
    score_mod::Table<float> grad_bias)  // the gradient of `bias`, added up
{
    const u32 smem = smem_base();
    const Place here = place(block_index(), Hq, Hk, Nq, max_Nk);
    const int Nk = max(0, min(k_lens[here.batch], max_Nk));
    if (here.key >= Nk) return;  // this sequence is shorter than the longest

    constexpr float scale = 1.f, scale_log2 = 1.4426950408889634f;  // of what score_mod returns

    // Its loop: the Q tiles of every query head that reads this K/V head, one after the other, so that dK and dV need
    // no atomic sums.
    const int diagonal = max_Nk - Nq;  // query i sees the keys up to i + diagonal
    const int first_row = max(0, here.key - diagonal) / Br * Br;  // of the first tile with a query that sees a key

    if (threadIdx.x == 0) {
        prefetch(Q_map);
        prefetch(K_map);
        prefetch(V_map);
        prefetch(dO_map);
        mbarrier_init(smem + KV_full, 1);
        for (int s = 0; s < Q_stages; ++s) {
            mbarrier_init(smem + Q_full + 8 * s, 1);
            mbarrier_init(smem + Q_empty + 8 * s, 4 * consumers);
        }
        for (int s = 0; s < dO_stages; ++s) {
            mbarrier_init(smem + dO_full + 8 * s, 1);
            mbarrier_init(smem + dO_empty + 8 * s, 4 * consumers);
        }
        fence_mbarrier_init();
    }
    __syncthreads();  // the mbarriers are set up before anybody arrives or waits

    // Through a shuffle, so that the compiler knows that a warp has one role: setmaxnreg and wgmma take whole warps.
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (warpgroup == consumers) {
        give_registers_back<producer_registers>();
        if (thread_index() % 128 > 0) return;
        if (first_row >= Nq) return;  // no query sees these keys
        mbarrier_arrive_expect(smem + KV_full, K_tile + V_tile);
        for (int c = 0; c < K_panels; ++c)
            tma_load(smem + K_smem + c * KV_panel, K_map, smem + KV_full, 64 * c, here.key, here.head, here.batch);
        for (int c = 0; c < V_panels; ++c)
            tma_load(smem + V_smem + c * KV_panel, V_map, smem + KV_full, 64 * c, here.key, here.head, here.batch);

        const int group = Hq / Hk;
        const int stats_rows = (Nq + 127) / 128 * 128;  // of a head
        Ring<Q_stages> Q_ring = {0, 1};  // parity 1: the first wait for each buffer passes at once
        Ring<dO_stages> dO_ring = {0, 1};
        #pragma unroll 1
        for (int head = here.head * group; head < (here.head + 1) * group; ++head) {
            const float* stats_head = stats + (static_cast<i64>(here.batch) * Hq + head) * stats_rows * 3;
            #pragma unroll 1
            for (int i0 = first_row; i0 < Nq; i0 += Br) {
                u32 full = smem + Q_full + 8 * Q_ring.stage, buffer = smem + Q_smem + Q_ring.stage * Q_tile;
                mbarrier_wait(smem + Q_empty + 8 * Q_ring.stage, Q_ring.parity);
                mbarrier_arrive_expect(full, Q_tile + stats_bytes);
                for (int c = 0; c < K_panels; ++c)
                    tma_load(buffer + c * Q_panel, Q_map, full, 64 * c, i0, head, here.batch);
                bulk_load(smem + stats_smem + Q_ring.stage * stats_bytes, stats_head + i0 * 3, stats_bytes, full);
                Q_ring.advance();

                full = smem + dO_full + 8 * dO_ring.stage, buffer = smem + dO_smem + dO_ring.stage * dO_tile;
                mbarrier_wait(smem + dO_empty + 8 * dO_ring.stage, dO_ring.parity);
                mbarrier_arrive_expect(full, dO_tile);
                for (int c = 0; c < V_panels; ++c)
                    tma_load(buffer + c * Q_panel, dO_map, full, 64 * c, i0, head, here.batch);
                dO_ring.advance();
            }
        }
        return;
    }

    take_registers<consumer_registers>();
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;  // this thread's first query of a tile
    // All of Q and dO and this warpgroup's keys of K and V make S and dP.
    u64 Q_desc = descriptor(smem + Q_smem, Q_panel), K_desc = descriptor(smem + K_smem + warpgroup * own_keys * 128, KV_panel);
    u64 dO_desc = descriptor(smem + dO_smem, Q_panel), V_desc = descriptor(smem + V_smem + warpgroup * own_keys * 128, KV_panel);
    // This warpgroup's columns of Q and dO and all of dS and P make dK^T and dV^T.
    u64 P_desc = descriptor(smem + P_smem, Q_panel), dS_desc = descriptor(smem + dS_smem, Q_panel);
    // At the top of each tile: else the compiler works out the descriptors of all steps ahead, and holds them in registers.
    auto hide_descriptors = [&] {
        asm volatile("" : "+l"(Q_desc), "+l"(K_desc), "+l"(dO_desc), "+l"(V_desc), "+l"(P_desc), "+l"(dS_desc));
    };
    const u32 stats_row = smem + stats_smem + stats_of(row);
    Ring<Q_stages> Q_ring = {0, 0};
    Ring<dO_stages> dO_ring = {0, 0};
    Ring<Q_stages> Q_behind = {0, 0};  // the tile before
    Ring<dO_stages> dO_behind = {0, 0};
    // Each warp for itself: that its own part of a product has finished is all that it knows.
    auto release = [&](int empty, auto& ring) {
        if (lane == 0) mbarrier_arrive(smem + empty + 8 * ring.stage);
        ring.advance();
    };

    Sums dK_rmem[K_blocks] = {}, dV_rmem[V_blocks] = {};
    Scores S, dP;
    Rounded P, dS;
    int i0 = first_row;  // of the tile
    const int batch = here.batch;
    int head = here.head * (Hq / Hk);  // of the tile

    // S gives way to P = exp(scale S - lse). Two branches, and not one for what is huge: a branch ends with all of its
    // exponentials, and ptxas moves none of them below the wait for dP, where less would be left to run under the products.
    auto weigh = [&](auto masked) {
        const u32 of_stage = stats_row + Q_ring.stage * stats_bytes;
        Rows m, minus_lse;
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            minus_lse[h] = ld_shared(of_stage + 32 * h);
            m[h] = ld_shared(of_stage + huge_m + 32 * h);
        }
        // What score_mod needs of this head.
        {
            // What score_mod makes of the scores.
            const int query0 = i0 + row;
            const int key0 = here.key + warpgroup * own_keys + lane % 4 * 2;
            #pragma unroll
            for (int n = 0; n < own_keys / 8; ++n)
                #pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float score = S[0][n][e] * score_scale;
                    const int query = query0 + e / 2 * 8;
                    const int key = key0 + 8 * n + e % 2;
                    S[0][n][e] = score + score_mod::read(table_bias, batch, head, query, key);
                }
        }
        if (masked.value) {
            // Of this thread's keys, the number of the last one that its first query sees.
            const int room = i0 + row + diagonal - here.key - warpgroup * own_keys - lane % 4 * 2;
            #pragma unroll
            for (int n = 0; n < own_keys / 8; ++n)
                #pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (8 * n + e % 2 > room + e / 2 * 8) S[0][n][e] = -infinity();
        }
        if (__any_sync(~0u, m[0] != 0.f || m[1] != 0.f)) {
            // Of a row with huge scores `delta` gives the max m apart; in lse it would have swallowed l.
            constexpr float log2_e = 1.4426950408889634f;
            #pragma unroll
            for (int n = 0; n < own_keys / 8; ++n)
                #pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float below_m = __fsub_rn(__fmul_rn(S[0][n][e], scale), m[e / 2]);  // not fused: exactly 0 at the max
                    S[0][n][e] = ex2(fmaf(below_m, log2_e, minus_lse[e / 2]));
                }
        } else {
            #pragma unroll
            for (int n = 0; n < own_keys / 8; ++n)
                #pragma unroll
                for (int e = 0; e < 4; ++e) S[0][n][e] = ex2(fmaf(S[0][n][e], scale_log2, minus_lse[e / 2]));
        }
        round(P, S);
    };
    // dP gives way to dS = P o (dP - delta).
    auto differentiate = [&] {
        const u32 of_stage = stats_row + Q_ring.stage * stats_bytes + minus_delta;
        // What score_mod needs of this head.
        const int query0 = i0 + row;
        const int key0 = here.key + warpgroup * own_keys + lane % 4 * 2;
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float minus_delta_of = ld_shared(of_stage + 32 * h);
            #pragma unroll
            for (int n = 0; n < own_keys / 8; ++n)
                #pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; ++e) {
                    float& s = dP[0][n][e];
                    s = S[0][n][e] * (s + minus_delta_of);
                    const int query = query0 + e / 2 * 8;
                    const int key = key0 + 8 * n + e % 2;
                    const float dS_of_mod = key < Nk ? s : 0.f;  // keys past the end have no say
                    atomicAdd(score_mod::place(grad_bias, batch, head, query, key), dS_of_mod * 1.f);
                }
        }
        round(dS, dP);
    };
    auto multiply_scores = [&](int Q_stage, int dO_stage) {
        const int own_panel = warpgroup * (Q_panel / 16);
        multiply_rows<V_panels>(dV_rmem, dO_desc + own_panel + dO_stage * (dO_tile / 16), P_desc, warpgroup);
        multiply_rows<K_panels>(dK_rmem, Q_desc + own_panel + Q_stage * (Q_tile / 16), dS_desc, warpgroup);
    };
    auto all_consumers = [] { barrier_sync<128 * consumers>(1); };

    // P and dS of a tile and, where one comes before it, dV^T += dO^T P and dK^T += Q^T dS of that.
    auto step = [&](auto masked, auto follows) {
        hide_descriptors();
        mbarrier_wait(smem + Q_full + 8 * Q_ring.stage, Q_ring.parity);
        wgmma_fence();  // for the sums as well, whose registers nothing else touches
        multiply_columns<d>(S, Q_desc + Q_ring.stage * (Q_tile / 16), K_desc);
        mbarrier_wait(smem + dO_full + 8 * dO_ring.stage, dO_ring.parity);
        multiply_columns<dv>(dP, dO_desc + dO_ring.stage * (dO_tile / 16), V_desc);
        if (follows.value) multiply_scores(Q_behind.stage, dO_behind.stage);
        wgmma_wait<follows.value ? 3 : 1>();  // S is there; the others may go on
        pin(S);
        weigh(masked);
        wgmma_wait<follows.value ? 2 : 0>();  // dP is there
        pin(dP);
        differentiate();
        if (follows.value) {
            // A loop that ends at once, for K has arrived long since; but it ends a basic block as well. Without it ptxas moves
            // all of dS below the next wait, and nothing is left to run under the sums.
            mbarrier_wait(smem + KV_full, 0);
            wgmma_wait<0>();
            pin(dK_rmem);
            pin(dV_rmem);
            release(Q_empty, Q_behind);
            release(dO_empty, dO_behind);
            all_consumers();  // they have read P and dS of the tile before
        }
        put_scores(smem + P_smem, P, warpgroup);
        put_scores(smem + dS_smem, dS, warpgroup);
        fence_proxy_async();
        all_consumers();  // P and dS of all keys are there
        Q_ring.advance();
        dO_ring.advance();
        i0 += Br;
    };
    if (first_row < Nq) {  // else no query sees these keys
        mbarrier_wait(smem + KV_full, 0);
        if (here.key + Bc > Nk) {
            // Behind the last key comes padding. It has no weight, but 0 times infinity would not be 0.
            clear_rows<K_panels, Bc>(smem + K_smem, Nk - here.key);
            clear_rows<V_panels, Bc>(smem + V_smem, Nk - here.key);
            fence_proxy_async();
            all_consumers();  // all consumers have cleared their share, and wgmma will see it
        }
        pin(dK_rmem);
        pin(dV_rmem);
        step(Bool<true>(), Bool<false>());
        for (int heads = Hq / Hk; heads > 0; --heads) {  // query head by query head
            while (i0 < Nq && i0 + diagonal < here.key + (warpgroup + 1) * own_keys - 1) step(Bool<true>(), Bool<true>());
            while (i0 < Nq) step(Bool<false>(), Bool<true>());
            i0 = first_row;
            ++head;
        }
        multiply_scores(Q_behind.stage, dO_behind.stage);
        wgmma_wait<0>();
        pin(dK_rmem);
        pin(dV_rmem);
    }

    // dK and dV in the places of K and V, which nobody has read since P and dS of the last tile were there, and from there to
    // memory, as many rows as there are. The block's place is worked out again rather than held in registers through the loop.
    const Place there = place(block_index(), Hq, Hk, Nq, max_Nk);
    const int Nk_again = max(0, min(k_lens[there.batch], max_Nk));
    #pragma unroll
    for (int b = 0; b < V_blocks; ++b)
        if (b * consumers + warpgroup < V_panels)
            put_columns(smem_base() + V_smem + (b * consumers + warpgroup) * KV_panel, dV_rmem[b], 1.f);
    #pragma unroll
    for (int b = 0; b < K_blocks; ++b)
        if (b * consumers + warpgroup < K_panels)
            put_columns(smem_base() + K_smem + (b * consumers + warpgroup) * KV_panel, dK_rmem[b], score_scale);
    barrier_sync<128>(2 + warpgroup);  // this warpgroup's columns have been written
    const int count = min(Bc, Nk_again - there.key);
    for (int c = warpgroup; c < V_panels; c += consumers)
        store_panel(at(dV, there.batch, there.head, there.key, 64 * c), dV.row, smem_base() + V_smem + c * KV_panel, count,
                    dv - 64 * c);
    for (int c = warpgroup; c < K_panels; c += consumers)
        store_panel(at(dK, there.batch, there.head, there.key, 64 * c), dK.row, smem_base() + K_smem + c * KV_panel, count,
                    d - 64 * c);
}
