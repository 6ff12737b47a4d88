// convert_bf16_d64_sm90_Br64_Bc128_w4_rs1_sl32_s1_vreg0_weave0_b2
// dQ = scale times the sums that `fused` left, in rows of 16-bit numbers.
//
// Rendered by flashsmith from convert.cu.j2.
// grid   B * Hq * Tr: batch, query head, Q tile, flat in x
// block  128 threads, 4 warps

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
constexpr int columns = 64;  // of a row of the sums
constexpr int Br = 64;  // query rows of this block
constexpr int threads = 32 * 4;
constexpr int dQ_down = 2, dQ_across = 2;  // warps along the rows and along the columns of dQ
constexpr int dQ_rows = Br / 16 / dQ_down;  // a warp's row blocks of dQ: down, down + dQ_down, ...
constexpr int dQ_columns = columns / 16 / dQ_across;  // and column blocks: across, across + dQ_across, ...

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

// Where [batch, head, row, column] lies. The strides are 64-bit, and so are all products.
template <typename E>
__device__ __forceinline__ E* at(const View<E>& X, int batch, int head, int row, int column)
{
    return X.data + batch * X.batch + head * X.head + row * X.row + column;
}

extern "C" __global__ void __launch_bounds__(threads) convert(
    const float* dQ_acc,  // [B, Hq, Tr, Br * columns], sums of dQ / scale in the order of the fragments
    View<T> dQ,  // [B, Hq, Nq, d]
    int Hq,  // query heads
    int Nq,  // query rows of a head
    float scale)  // of Q K^T
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int down = warp % dQ_down, across = warp / dQ_down;  // this warp's blocks of dQ, as in `fused`
    const int Tr = (Nq + Br - 1) / Br;
    const int batch = blockIdx.x / Tr / Hq, head = blockIdx.x / Tr % Hq;
    const int lane_query = blockIdx.x % Tr * Br + down * 16 + lane / 4;  // this lane's first row

    // The sums of a tile lie in the order [register][thread], four registers at a time.
    const float* const tile = dQ_acc + static_cast<i64>(blockIdx.x) * (Br * columns);
    #pragma unroll
    for (int r = 0; r < dQ_rows; ++r)
        #pragma unroll
        for (int n = 0; n < 2 * dQ_columns; ++n) {
            const int column = (n / 2 * dQ_across + across) * 16 + n % 2 * 8;
            const int x = r * 2 * dQ_columns + n;
            const float4 four = reinterpret_cast<const float4*>(tile)[x * threads + threadIdx.x];
            const float sums[4] = {four.x, four.y, four.z, four.w};
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int q = lane_query + r * dQ_down * 16 + h * 8;
                if (q >= Nq) continue;
                T* const pair = at(dQ, batch, head, q, column + lane % 4 * 2);
                *reinterpret_cast<u32*>(pair) = pack(scale * sums[2 * h], scale * sums[2 * h + 1]);
            }
        }
}
