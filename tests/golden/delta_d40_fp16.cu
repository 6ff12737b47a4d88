// delta_fp16_d40_sm80_w8
// What the backward needs of each query row: delta = rowsum(dO o O), and the softmax's m and l folded into one.
//
// Rendered by flashsmith from delta.cu.j2.
// grid   B * Hq * ceil(Nq / 128), flat in x
// block  256 threads, 8 warps

using u32 = unsigned int;
using i64 = long long;
using T = unsigned short;  // the bits of a __half

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

constexpr int d = 40;  // head dimension
constexpr int warps = 8;
constexpr int threads = 32 * warps;
constexpr int block_rows = 128;  // rows of this block; the statistics of a head end with a whole block
constexpr int row_lanes = 8;  // lanes that sum a row, eight elements each

// The two halves of a pair, as floats.
__device__ __forceinline__ void unpack(u32 packed, float& low, float& high)
{
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }" : "=f"(low), "=f"(high) : "r"(packed));
}

// Where [batch, head, row, column] lies. The strides are 64-bit, and so are all products.
template <typename E>
__device__ __forceinline__ E* at(const View<E>& X, int batch, int head, int row, int column)
{
    return X.data + batch * X.batch + head * X.head + row * X.row + column;
}

extern "C" __global__ void __launch_bounds__(threads) delta(
    View<const T> O,  // [B, Hq, Nq, d]
    View<const T> dO,  // [B, Hq, Nq, d]
    const float* m,  // [B, Hq, Nq]
    const float* l,  // [B, Hq, Nq]
    const float* dlse,  // [B, Hq, Nq], the gradient of lse = m + ln l; null if there is none
    float* stats,  // [B, Hq, Nq padded to 128 / 16, 3, 16]: -lse in base 2, -delta, huge m
    int Hq,  // query heads
    int Nq)  // query rows of a head

{
    constexpr float log2_e = 1.4426950408889634f;
    const int blocks = (Nq + block_rows - 1) / block_rows;  // of a head
    const int head = blockIdx.x / blocks;  // of all B * Hq
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
        const i64 place = static_cast<i64>(head) * Nq + row;
        if (row < Nq && l[place] != 0) {
            const float row_m = m[place], log2_l = __log2f(l[place]);
            // Beside a huge m, l would be rounded away. Such a row keeps them apart, and the kernels take m off first.
            const bool huge = fabsf(row_m * log2_e) > 8192.0;
            minus_lse = huge ? -log2_l : -__fmaf_rn(row_m, log2_e, log2_l);
            minus_delta = dlse ? dlse[place] - sum : -sum;  // dS = P o (dP - delta + dlse)
            huge_m = huge ? row_m : 0;
        }

        // [16-row group][-lse, -delta, huge m][16]
        const i64 stats_row = static_cast<i64>(head) * blocks * block_rows + row;
        float* const to = stats + stats_row / 16 * 48 + row % 16;
        to[0] = minus_lse;
        to[16] = minus_delta;
        to[32] = huge_m;
    }
}
