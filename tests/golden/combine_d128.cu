// combine_bf16_d128_sm80_w8
// O, m and l of a row from those that `partial` left for each part of its keys, always added up in the same order.
//
// Rendered by flashsmith from combine.cu.j2.
// grid   B * Hq * Nq blocks, one for each query row, flat in x
// block  256 threads, 8 warps
// smem        0  O_smem      8192 B  [16][128] floats
//          8192  in all, dynamic

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
constexpr int threads = 256;
constexpr int row_lanes = 16;  // threads that share a part of O, eight columns each
constexpr int slices = threads / row_lanes;  // parts that the block reads at once
constexpr float lowest = -3.402823466e38f;  // m of a part without a key

// Byte offsets in shared memory.
constexpr int O_smem = 0;  // [16][128] floats

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

// Sums over the lanes of a warp.
__device__ __forceinline__ float sum_of_lanes(float x)
{
    #pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
    return x;
}

__device__ __forceinline__ float max_of_lanes(float x)
{
    #pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x = max_f32(x, __shfl_xor_sync(~0u, x, distance));
    return x;
}

extern "C" __global__ void __launch_bounds__(threads) combine(
    const float* O_part,  // [B, Hq, Nq, parts, d], sum of exp(scale (S - m)) V over the keys of a part
    const float* m_part,  // [B, Hq, Nq, parts], max of the unscaled scores; the lowest float without a key
    const float* l_part,  // [B, Hq, Nq, parts], sum of exp(scale (S - m))
    View<T> O,  // [B, Hq, Nq, d]
    float* m,  // [B, Hq, Nq], max of the scaled scores of a row; -inf if it sees no key
    float* l,  // [B, Hq, Nq], sum of exp(S - m) of a row; 0 if it sees no key
    int Hq,  // query heads
    int Nq,  // query rows of a head
    float scale,  // of Q K^T
    float scale_log2,  // scale * log2(e): exp(scale * x) = exp2(scale_log2 * x)
    int parts)  // into which the keys that a block sees are cut
{
    const i64 row = blockIdx.x;
    const int lane = threadIdx.x % 32, slice = threadIdx.x / row_lanes, column = threadIdx.x % row_lanes * 8;
    const float* const m_row = m_part + row * parts;
    const float* const l_row = l_part + row * parts;
    const float* const O_row = O_part + row * parts * d + column;

    // m = max of the parts' m,  l = sum of exp(scale (m_part - m)) l_part. Each warp works out both.
    float top = lowest, sum = 0.f;
    for (int part = lane; part < parts; part += 32) top = max_f32(top, m_row[part]);
    top = max_of_lanes(top);
    for (int part = lane; part < parts; part += 32) sum += ex2((m_row[part] - top) * scale_log2) * l_row[part];
    sum = sum_of_lanes(sum);

    // O l = sum of exp(scale (m_part - m)) O_part: of every slices-th part here, of all below.
    float O_rmem[8] = {};
    if (column < d) {
        #pragma unroll 4
        for (int part = slice; part < parts; part += slices) {
            const float alpha = ex2((m_row[part] - top) * scale_log2);
            const float4* const eight = reinterpret_cast<const float4*>(O_row + static_cast<i64>(part) * d);
            const float4 a = eight[0], b = eight[1];
            O_rmem[0] += alpha * a.x;
            O_rmem[1] += alpha * a.y;
            O_rmem[2] += alpha * a.z;
            O_rmem[3] += alpha * a.w;
            O_rmem[4] += alpha * b.x;
            O_rmem[5] += alpha * b.y;
            O_rmem[6] += alpha * b.z;
            O_rmem[7] += alpha * b.w;
        }
        #pragma unroll
        for (int e = 0; e < 8; ++e)
            st_shared(smem_base() + O_smem + (slice * d + column + e) * 4, __float_as_uint(O_rmem[e]));
    }
    __syncthreads();  // the sums of all slices have been written
    if (slice != 0 || column >= d) return;

    #pragma unroll
    for (int other = 1; other < slices; ++other)
        #pragma unroll
        for (int e = 0; e < 8; ++e) O_rmem[e] += ld_shared(smem_base() + O_smem + (other * d + column + e) * 4);

    if (threadIdx.x == 0) {
        m[row] = sum == 0.f ? -infinity() : __fmul_rn(top, scale);
        l[row] = sum;
    }
    const float inverse = sum == 0.f ? 0.f : rcp(sum);  // a row that saw no key is 0; NaN stays NaN
    u32 pairs[4];
    #pragma unroll
    for (int x = 0; x < 4; ++x) pairs[x] = pack(O_rmem[2 * x] * inverse, O_rmem[2 * x + 1] * inverse);
    const int matrix = row / Nq;
    *reinterpret_cast<uint4*>(at(O, matrix / Hq, matrix % Hq, row % Nq, column)) =
        make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}
