// forward90_bf16_d128_causal_left_mod03fc722d_sm90_Br128_Bc128_s2_pp0_ov1_ek1
// O = softmax(scale Q K^T) V, and of each row the max m and the sum l. A block takes tile after tile of Br query rows.
// With left, score_mod '30.0 * tanh(score / 30.0)'.
//
// Rendered by flashsmith from forward90.cu.j2.
// grid   min(tiles, multiprocessors) blocks for Tr * Hq * B tiles of Br query rows, flat in x
// block  384 threads, 12 warps
// smem        0  Q_smem     32768 B  [2][128][64]
//         32768  K_smem     65536 B  [2][2][128][64]
//         98304  V_smem     65536 B  [2][2][128][64]
//        163840  barriers      80 B  [10] mbarriers
//        163920  slack       1024 B  the first buffer begins at the next multiple of 1024 B
//        164944  in all, dynamic

// The last warpgroup, the producer, has TMA copy Q and then tile after tile of K and V into rings of buffers. Each of the
// others, the consumers, owns 64 query rows. A buffer goes back and forth between them by two mbarriers: `full` when the
// bytes have arrived, `empty` when every warp of the consumers has done with them. The producer does not stop at the end
// of a query tile: the last products and the way of O to memory hide the first copies for the next.
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

constexpr int d = 128;  // head dimension of Q and K
constexpr int dv = 128;  // of V and O
constexpr int Br = 128;  // query rows of a tile
constexpr int Bc = 128;  // keys of a K/V tile
constexpr int stages = 2;  // buffers of K, and of V
constexpr int consumers = Br / 64;
constexpr int threads = 128 * (consumers + 1);
constexpr int warp_rows = 16;  // query rows of a warp
constexpr int m_tiles = 1;     // in tiles of 16

// Registers of a thread once the roles are given out. All threads start with the same number, which lies between the two.
constexpr int producer_registers = 24;
constexpr int consumer_registers = 240;

// What a thread holds of its warp's rows, for row 8 h + lane / 4:
using Rows = float[m_tiles][2];             // [h], one number a row
using Scores = float[m_tiles][Bc / 8][4];   // [n][2 h + c], key 8 n + lane % 4 * 2 + c
using Outputs = float[m_tiles][dv / 8][4];  // [n][2 h + c], column 8 n + lane % 4 * 2 + c
using Weights = u32[Bc / 16][4];            // [y], P of 16 keys as the left operand of a product

// Byte offsets in shared memory. A matrix lies in panels of 64 columns, zeros beyond its last. A row of a panel is 128 bytes
// or eight chunks, and chunk c of row r lies in place c ^ r % 8: TMA writes them so, and wgmma reads them so.
constexpr int Q_smem = 0;  // [2][128][64]
constexpr int K_smem = 32768;  // [2][2][128][64]
constexpr int V_smem = 98304;  // [2][2][128][64]
constexpr int barriers = 163840;  // [10] mbarriers
constexpr int K_panels = (d + 63) / 64, V_panels = (dv + 63) / 64;
constexpr int Q_panel = Br * 128, KV_panel = Bc * 128;                     // bytes
constexpr int K_tile = K_panels * KV_panel, V_tile = V_panels * KV_panel;  // bytes

constexpr int Q_full = barriers, Q_empty = Q_full + 8;
constexpr int K_full = Q_empty + 8, K_empty = K_full + 8 * stages;  // one for each buffer
constexpr int V_full = K_empty + 8 * stages, V_empty = V_full + 8 * stages;

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

// Where [batch, head, row, column] lies. The strides are 64-bit, and so are all products.
template <typename E>
__device__ __forceinline__ E* at(const View<E>& X, int batch, int head, int row, int column)
{
    return X.data + batch * X.batch + head * X.head + row * X.row + column;
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

// D (+)= A B: D [64, Bc], A 16 columns of Q, B 16 columns of K.
__device__ __forceinline__ void wgmma_QK(float (&D)[1][16][4], u64 A, u64 B, bool add)
{
    asm volatile("{\n"
                 ".reg .pred add;\n"
                 "setp.ne.b32 add, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
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

// D (+)= A B: D [64, dv], A [64, 16] of P, B 16 rows of V.
__device__ __forceinline__ void wgmma_PV(float (&D)[1][16][4], const u32 (&A)[4], u64 B, bool add)
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

// S = Q K^T    [64, Bc] = [64, d] [d, Bc], a group of its own. A step is 16 columns, 32 bytes in a row of a panel.
__device__ __forceinline__ void multiply_QK(Scores& S, u64 Q, u64 K)
{
    #pragma unroll
    for (int x = 0; x < (d + 15) / 16; ++x)
        wgmma_QK(S, Q + (x / 4 * Q_panel + x % 4 * 32) / 16, K + (x / 4 * KV_panel + x % 4 * 32) / 16, x > 0);
    wgmma_commit();
}

// O += P V    [64, dv] += [64, Bc] [Bc, dv], a group of its own. A step is 16 keys, 16 rows of a panel.
__device__ __forceinline__ void multiply_PV(Outputs& O, const Weights& P, u64 V)
{
    #pragma unroll
    for (int y = 0; y < Bc / 16; ++y) wgmma_PV(O, P[y], V + y * 16 * 128 / 16, true);
    wgmma_commit();
}

// Keys that a row does not see score -inf: those past the tile's key `end`, and past its diagonal, `last` for the block's first row,
// and before `first`, of that row.
__device__ __forceinline__ void mask(Scores& S, int end, int last, int first)
{
    const int thread = thread_index(), lane = thread % 32;
    #pragma unroll
    for (int t = 0; t < m_tiles; ++t)
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int column = lane % 4 * 2;
            const int row = thread / 32 * warp_rows + 16 * t + 8 * h + lane / 4;  // of the block
            const int room = min(last + row, end) - column;  // the last of this thread's keys that the row sees
            const int before = first + row - column;  // and the first
            #pragma unroll
            for (int n = 0; n < Bc / 8; ++n)
                #pragma unroll
                for (int c = 0; c < 2; ++c)
                    if (8 * n + c > room || 8 * n + c < before) S[t][n][2 * h + c] = -infinity();
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

// S gives way to P = exp(scale (S - m)), m and l follow, and what was summed before is to be multiplied by alpha.
__device__ __forceinline__ void weigh(Scores& S, Rows& m, Rows& l, Rows& alpha, float scale_log2)
{
    Rows m_new, shift;
    const bool huge = follow_max(m_new, alpha, shift, S, m, scale_log2);
    if (__any_sync(~0u, huge)) take_off_max(S, shift, m_new);
    #pragma unroll
    for (int h = 0; h < 2; ++h) {
        m[0][h] = m_new[0][h];
        l[0][h] *= alpha[0][h];
        #pragma unroll
        for (int n = 0; n < Bc / 8; ++n)
            #pragma unroll
            for (int c = 2 * h; c < 2 * h + 2; ++c) {
                S[0][n][c] = ex2(fmaf(S[0][n][c], scale_log2, -shift[0][h]));
                l[0][h] += S[0][n][c];
            }
    }
}

// P in 16 bits. The sums of S lie in a thread as the left operand of O += P V must lie, so P needs no exchange.
__device__ __forceinline__ void round_weights(Weights& P, const Scores& S)
{
    #pragma unroll
    for (int y = 0; y < Bc / 16; ++y)
        #pragma unroll
        for (int e = 0; e < 4; ++e) P[y][e] = pack(S[0][2 * y + e / 2][e % 2 * 2], S[0][2 * y + e / 2][e % 2 * 2 + 1]);
}

__device__ __forceinline__ void multiply_rows(Outputs& O, const Rows& factor)
{
    #pragma unroll
    for (int n = 0; n < dv / 8; ++n)
        #pragma unroll
        for (int e = 0; e < 4; ++e) O[0][n][e] *= factor[0][e / 2];
}

// A row of X, columns 8 n + lane % 4 * 2 and the next in X[n], to global memory in 16 bits. The four lanes that share it
// transpose what they hold of 32 columns, so that each stores 16 bytes and together they store 64.
template <int blocks>
__device__ __forceinline__ void store_row(T* row, const float (&X)[1][blocks][4], int h, bool wanted)
{
    const int member = thread_index() % 4;
    const bool odd = member % 2, upper = member / 2;
    #pragma unroll
    for (int n = 0; n + 4 <= blocks; n += 4) {
        u32 x[4];
        #pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = pack(X[0][n + e][2 * h], X[0][n + e][2 * h + 1]);
        #pragma unroll
        for (int e = 0; e < 4; e += 2) {
            const u32 other = __shfl_xor_sync(~0u, odd ? x[e] : x[e + 1], 1);
            x[e] = odd ? other : x[e];
            x[e + 1] = odd ? x[e + 1] : other;
        }
        #pragma unroll
        for (int e = 0; e < 2; ++e) {
            const u32 other = __shfl_xor_sync(~0u, upper ? x[e] : x[e + 2], 2);
            x[e] = upper ? other : x[e];
            x[e + 2] = upper ? x[e + 2] : other;
        }
        if (wanted) *reinterpret_cast<uint4*>(row + 8 * (n + member)) = make_uint4(x[0], x[1], x[2], x[3]);
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

struct Place {
    int i0;  // the first query row
    int q_head, batch;
};

constexpr int cached_keys = 51200;  // keys whose K and V fill half of the L2 cache

// The place of a tile. Tiles are dealt out in the order of their number, and late query tiles take longest, so all heads' last
// tiles should come first; but the heads in work at once share the L2 cache. So heads are dealt with in groups whose K and
// V take half of it, longest tiles first within a group. The last group takes the heads that are left over as well.
__device__ __forceinline__ Place place(int number, int Hq, int Hk, int Nq, int Nk, int tiles)
{
    const int Tr = (Nq + Br - 1) / Br, matrices = tiles / Tr;  // the B x Hq matrices of Q
    const int group = min(max(1, cached_keys / Nk) * (Hq / Hk), matrices);
    const int first = min(number / (Tr * group), matrices / group - 1) * group;
    const int members = first + 2 * group <= matrices ? group : matrices - first;
    const int tile = Tr - 1 - (number - first * Tr) / members, matrix = first + (number - first * Tr) % members;
    return {tile * Br, matrix % Hq, matrix / Hq};
}

// The number of a block's tile in a round. The longest have the lowest numbers: dealt out forwards and backwards in turn
// they give all blocks nearly the same work.
__device__ __forceinline__ u32 dealt(int round)
{
    const u32 block = block_index();
    return round * gridDim.x + (round % 2 == 0 ? block : gridDim.x - 1 - block);
}

extern "C" __global__ void __launch_bounds__(threads, 1) forward90(
    const __grid_constant__ TensorMap Q_map,  // [B, Hq, Nq, d] in boxes of Br rows x 64 columns
    const __grid_constant__ TensorMap K_map,  // [B, Hk, Nk, d] in boxes of Bc rows x 64 columns
    const __grid_constant__ TensorMap V_map,  // [B, Hk, Nk, dv] in boxes of Bc rows x 64 columns
    View<T> O,  // [B, Hq, Nq, dv]
    float* m,  // [B, Hq, Nq], max of the scaled scores of a row; -inf if it sees no key
    float* l,  // [B, Hq, Nq], sum of exp(S - m) of a row; 0 if it sees no key
    int Hq,  // query heads
    int Hk,  // key/value heads; query head h reads head h / (Hq / Hk)
    int Nq,  // query rows of a head
    int Nk,  // keys of a head
    float score_scale,  // of Q K^T; then comes score_mod
    float score_scale_log2,  // scale * log2(e): exp(scale * x) = exp2(scale_log2 * x); then comes score_mod
    int tiles,  // of Br query rows, of all heads; the blocks share them
    int left)  // keys that a query sees before its own
{
    const u32 smem = smem_base();
    auto tile_of = [&](int round) { return place(dealt(round), Hq, Hk, Nq, Nk, tiles); };
    constexpr float scale = 1.f, scale_log2 = 1.4426950408889634f;  // of what score_mod returns
    const int diagonal = Nk - Nq;  // query i sees the keys up to i + diagonal
    const int farthest = Nk - Nq - left;  // and those from i + farthest on

    // Some row of a query tile sees the first of so many tiles of keys, whose last may be incomplete. There is always one, of
    // which all keys may be masked: m and l of rows without a key come out of it as well.
    auto key_tiles = [&](const Place& here) {
        const int seen_keys = min(here.i0 + Br, Nq) + diagonal;
        return max((seen_keys + Bc - 1) / Bc, 1);
    };
    // The last tile of a walk that begins with tile Tc - 1: none before it is seen.
    auto first_tile = [&](const Place& here, int Tc) { return min(max(0, here.i0 + farthest) / Bc, Tc - 1); };

    if (threadIdx.x == 0) {
        prefetch(Q_map);
        prefetch(K_map);
        prefetch(V_map);
        mbarrier_init(smem + Q_full, 1);
        mbarrier_init(smem + Q_empty, 4 * consumers);
        for (int s = 0; s < stages; ++s) {
            mbarrier_init(smem + K_full + 8 * s, 1);
            mbarrier_init(smem + K_empty + 8 * s, 4 * consumers);
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
        Ring K_ring = {0, 1}, V_ring = {0, 1};  // parity 1: the first wait for each buffer passes at once
        for (int round = 0; dealt(round) < tiles; ++round) {
            const Place here = tile_of(round);
            const int Tc = key_tiles(here), kv_head = here.q_head / (Hq / Hk), first = first_tile(here, Tc);
            auto load_Q = [&] {
                mbarrier_wait(smem + Q_empty, round % 2 ^ 1);
                mbarrier_arrive_expect(smem + Q_full, K_panels * Q_panel);
                for (int c = 0; c < K_panels; ++c)
                    tma_load(smem + Q_smem + c * Q_panel, Q_map, smem + Q_full, 64 * c, here.i0, here.q_head, here.batch);
            };
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
            // From the last tile to the first, in the order in which the consumers need them: one buffer is enough to go on.
            load_K(Tc - 1);
            load_Q();
            for (int j = Tc - 1; j > first; --j) {
                load_K(j - 1);
                load_V(j);
            }
            load_V(first);
        }
        return;
    }

    take_registers<consumer_registers>();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 Q_rows = smem + Q_smem + warpgroup * 64 * 128;  // of this warpgroup, in each panel
    const u64 Q_desc = descriptor(Q_rows, Q_panel);
    const u64 K_desc = descriptor(smem + K_smem, KV_panel), V_desc = descriptor(smem + V_smem, KV_panel);
    Ring K_ring = {0, 0}, V_ring = {0, 0};
    auto wait_K = [&] { mbarrier_wait(smem + K_full + 8 * K_ring.stage, K_ring.parity); };
    auto wait_V = [&] { mbarrier_wait(smem + V_full + 8 * V_ring.stage, V_ring.parity); };
    // Each warp for itself: that its own part of a product has finished is all that it knows.
    auto release = [&](int empty, Ring& ring) {
        if (lane == 0) mbarrier_arrive(smem + empty + 8 * ring.stage);
        ring.advance();
    };
    auto release_Q = [&] {
        if (lane == 0) mbarrier_arrive(smem + Q_empty);
    };
    // Query row 8 h + lane / 4 of the warp.
    auto row_of = [](const Place& here, int h) {
        const int thread = thread_index();
        return here.i0 + thread / 32 * warp_rows + 8 * h + thread % 32 / 4;
    };

    for (int round = 0; dealt(round) < tiles; ++round) {
        const Place here = tile_of(round);
        int j = key_tiles(here) - 1;  // the tile
        const int first = first_tile(here, j + 1);
        // The last key that this warpgroup's first row sees, and the first that its last row sees.
        const int own_last = min(here.i0 + warpgroup * 64 + diagonal, Nk - 1);
        const int own_first = here.i0 + warpgroup * 64 + 63 + farthest;
        auto incomplete = [&] { return (j + 1) * Bc - 1 > own_last || j * Bc < own_first; };

        // What score_mod needs of this head.
        const int head = here.q_head, batch = here.batch;
        Outputs O_rmem = {};
        Scores S;
        auto modify = [&] {
            // What score_mod makes of the scores.
            #pragma unroll
            for (int t = 0; t < m_tiles; ++t)
                #pragma unroll
                for (int n = 0; n < Bc / 8; ++n)
                    #pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const float score = S[t][n][e] * score_scale;
                        S[t][n][e] = 30.f * score_mod::tanh(score * 0.033333335f);
                    }
        };
        Weights P;
        Rows m_rmem, l_rmem = {}, alpha;
        m_rmem[0][0] = m_rmem[0][1] = lowest;

        // The scores of the last tile.
        mbarrier_wait(smem + Q_full, round % 2);
        wait_K();
        pin(O_rmem);
        wgmma_fence();
        multiply_QK(S, Q_desc, K_desc + K_ring.stage * (K_tile / 16));
        wgmma_wait<0>();
        pin(S);
        release(K_empty, K_ring);
        modify();
        if (j == first) release_Q();
        if (incomplete()) mask(S, Nk - 1 - j * Bc, here.i0 + diagonal - j * Bc, here.i0 + farthest - j * Bc);
        weigh(S, m_rmem, l_rmem, alpha, scale_log2);
        round_weights(P, S);
        --j;
        if (j >= first) wait_K();

        // The scores of tile j and, of the tile before, O += P V. K(j) has arrived on entry.
        auto step = [&] {
            wgmma_fence();
            multiply_QK(S, Q_desc, K_desc + K_ring.stage * (K_tile / 16));
            wait_V();
            multiply_PV(O_rmem, P, V_desc + V_ring.stage * (V_tile / 16));
            wgmma_wait<1>();  // S is there; O += P V may go on under the softmax
            pin(S);
            release(K_empty, K_ring);
            if (j == first) release_Q();
            modify();
            if (incomplete()) mask(S, Nk - 1 - j * Bc, here.i0 + diagonal - j * Bc, here.i0 + farthest - j * Bc);
            weigh(S, m_rmem, l_rmem, alpha, scale_log2);
            pin(S);
            // Not for the sake of K does this wait stand here: its loop ends a basic block. Without it ptxas moves the exponentials,
            // on which nothing depends yet, below the wait for O, and nothing is left to run under the product.
            if (j > first) wait_K();
            wgmma_wait<0>();
            pin(O_rmem);
            pin(S);  // it is rounded after the wait: till then P is being read
            release(V_empty, V_ring);
            round_weights(P, S);
            multiply_rows(O_rmem, alpha);
            --j;
        };
        while (j >= first) step();

        wait_V();
        pin(O_rmem);
        wgmma_fence();
        multiply_PV(O_rmem, P, V_desc + V_ring.stage * (V_tile / 16));

        // m, l and O / l. The tile's place is worked out again rather than held in registers through the loop.
        const Place there = tile_of(round);
        Rows inverse;
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            float sum = l_rmem[0][h];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            const int i = row_of(there, h);
            if (thread_index() % 4 == 0 && i < Nq) {
                const i64 index = (static_cast<i64>(there.batch) * Hq + there.q_head) * Nq + i;
                m[index] = sum == 0.f ? -infinity() : __fmul_rn(m_rmem[0][h], scale);
                l[index] = sum;
            }
            inverse[0][h] = sum == 0.f ? 0.f : rcp(sum);  // a row that saw no key is 0; NaN stays NaN
        }
        wgmma_wait<0>();
        pin(O_rmem);
        release(V_empty, V_ring);
        multiply_rows(O_rmem, inverse);
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int i = row_of(there, h);
            store_row(at(O, there.batch, there.q_head, i, 0), O_rmem, h, i < Nq);
        }
    }
}
