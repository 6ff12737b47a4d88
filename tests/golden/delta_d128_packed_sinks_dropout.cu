// delta_bf16_d128_sinks_dropout_packed_sm80_w8
// What the backward needs of each query row: delta = rowsum(dO o O), and the softmax's m and l folded into one.
// With sinks, dropout, packed.
//
// Rendered by flashsmith from delta.cu.j2.
// grid   B * Hq * ceil(Nq / 128), flat in x
// block  256 threads, 8 warps

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
constexpr int warps = 8;
constexpr int threads = 32 * warps;
constexpr int block_rows = 128;  // rows of this block; the statistics of a head end with a whole block
constexpr int row_lanes = 16;  // lanes that sum a row, eight elements each

// The two halves of a pair, as floats.
__device__ __forceinline__ void unpack(u32 packed, float& low, float& high)
{
    low = __uint_as_float(packed << 16);
    high = __uint_as_float(packed & 0xffff0000u);
}

// Where [batch, head, row, column] lies. The strides are 64-bit, and so are all products.
template <typename E>
__device__ __forceinline__ E* at(const View<E>& X, int batch, int head, int row, int column)
{
    return X.data + batch * X.batch + head * X.head + row * X.row + column;
}

// A sequence of the batch: where its rows begin in Q and in K, and how many they are.
struct Sequence {
    int q0, Nq, k0, Nk;
};

__device__ __forceinline__ Sequence sequence_of(const int* cu_q, const int* cu_k, int batch)
{
    return {cu_q[batch], cu_q[batch + 1] - cu_q[batch], cu_k[batch], cu_k[batch + 1] - cu_k[batch]};
}

extern "C" __global__ void __launch_bounds__(threads) delta(
    View<const T> O,  // [1, Hq, all_q, d]
    View<const T> dO,  // [1, Hq, all_q, d]
    const float* m,  // [Hq, all_q]
    const float* l,  // [Hq, all_q]
    const float* dlse,  // [Hq, all_q], the gradient of lse = m + ln l; null if there is none
    float* stats,  // [1, Hq, all_q padded to 128 / 16, 3, 16]: -lse in base 2, -delta, huge m
    int Hq,  // query heads
    int max_Nq,  // query rows of a head, of the longest sequence
    const int* cu_q,  // [B + 1], where the rows of each sequence begin in Q; the last: how many there are
    const int* cu_k,  // [B + 1], and in K and V
    int all_q,  // query rows of all sequences
    int B,  // sequences
    const float* sinks,  // [Hq], a logit of each head that has no value
    float* dsinks,  // [B, Hq, Nq], what each row adds to the gradient of its head's sink
    float keep)  // the share of the weights that is kept, keep_below / 65536

{
    constexpr float log2_e = 1.4426950408889634f;
    const int blocks = (max_Nq + block_rows - 1) / block_rows;  // of a head
    const int head = blockIdx.x / blocks;  // of all B * Hq
    const Sequence sequence = sequence_of(cu_q, cu_k, head / Hq);
    const int Nq = sequence.Nq, Nk = sequence.Nk;
    if (blockIdx.x % blocks * block_rows >= Nq) return;  // this sequence is shorter than the longest
    O.data += sequence.q0 * O.row;
    dO.data += sequence.q0 * dO.row;
    const int lane = threadIdx.x % row_lanes;

    #pragma unroll
    for (int r = threadIdx.x / row_lanes; r < block_rows; r += threads / row_lanes) {
        const int row = blockIdx.x % blocks * block_rows + r;

        // delta = rowsum(dO o O), fp32
        float sum = 0;
        if (row < Nq && lane < d / 8) {
            const uint4 o = *reinterpret_cast<const uint4*>(at(O, head / Hq, head % Hq, row, lane * 8));
            const uint4 g = *reinterpret_cast<const uint4*>(at(dO, head / Hq, head % Hq, row, lane * 8));
            const u32 o_pairs[4] = {o.x, o.y, o.z, o.w}, g_pairs[4] = {g.x, g.y, g.z, g.w};
            #pragma unroll
            for (int x = 0; x < 4; ++x) {
                float o0, o1, g0, g1;
                unpack(o_pairs[x], o0, o1);
                unpack(g_pairs[x], g0, g1);
                sum += o0 * g0 + o1 * g1;
            }
        }
        #pragma unroll
        for (int x = row_lanes / 2; x > 0; x /= 2) sum += __shfl_xor_sync(~0u, sum, x);
        if (lane != 0) continue;

        // P = exp(S - m) / l = exp2(scale_log2 * (q . k) - lse). Past the end, and where no key was seen, lse = inf:
        // P = 0.
        float minus_lse = __int_as_float(0xff800000), minus_delta = 0, huge_m = 0;
        const i64 place = static_cast<i64>(head % Hq) * all_q + sequence.q0 + row;
        if (row < Nq && l[place] != 0) {
            const float row_m = m[place], log2_l = __log2f(l[place]);
            // Beside a huge m, l would be rounded away. Such a row keeps them apart, and the kernels take m off first.
            const bool huge = fabsf(row_m * log2_e) > 8192.0;
            minus_lse = huge ? -log2_l : -__fmaf_rn(row_m, log2_e, log2_l);
            minus_delta = dlse ? dlse[place] - sum : -sum;  // dS = P o (dP - delta + dlse)
            // The weight of the sink times its dS, whose dP is 0.
            dsinks[place] = exp2f((sinks[head % Hq] - row_m) * log2_e - log2_l) * minus_delta;
            minus_delta *= keep;  // beside a dP that is not divided by keep
            huge_m = huge ? row_m : 0;
        }
        else if (row < Nq) dsinks[place] = 0;  // neither a key nor a sink

        // [16-row group][-lse, -delta, huge m][16]
        const int tile = blockIdx.x % blocks;
        const i64 stats_tile = tile + (head % Hq * (static_cast<i64>(all_q / block_rows) + B) + sequence.q0 / block_rows + head / Hq);
        const i64 stats_row = stats_tile * block_rows + r;
        float* const to = stats + stats_row / 16 * 48 + row % 16;
        to[0] = minus_lse;
        to[16] = minus_delta;
        to[32] = huge_m;
    }
}
