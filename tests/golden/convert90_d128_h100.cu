// convert90_bf16_d128_sm90_Br80_Bc128_s2_ds2
// dQ = scale times the sums that `fused90` left, in rows of 16-bit numbers.
//
// Rendered by flashsmith from convert90.cu.j2.
// grid   B * Hq * Tr: batch, query head, Q tile, flat in x
// block  384 threads, 12 warps
// smem        0  dQ_smem    21760 B  [80][128], rows of 272 B
//         21760  in all, dynamic

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
constexpr int columns = 128;  // of a row of the sums
constexpr int Br = 80;  // query rows of this block
constexpr int warps = 12;
constexpr int threads = 32 * warps;

// Of a tile the sums of 16 columns lie together, [query / 8][lane][4], as a warp of `fused90` held dQ^T.
constexpr int block_rows = Br;
constexpr int blocks = columns / 16 * Br / block_rows;
constexpr int dQ_smem = 0;  // [80][128], rows of 272 B
constexpr int row_bytes = 272;  // in shared memory, where 8 rows of a chunk lie in 8 groups of banks

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

// Address of the block's dynamic shared memory.
__device__ __forceinline__ u32 smem_base()
{
    extern __shared__ __align__(1024) char smem[];
    return static_cast<u32>(__cvta_generic_to_shared(smem));
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

// Four 8x8 matrices to shared memory, each transposed.
__device__ __forceinline__ void stmatrix_x4_trans(u32 address, const u32 (&R)[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], { %1,%2,%3,%4};"
                 :: "r"(address), "r"(R[0]), "r"(R[1]), "r"(R[2]), "r"(R[3]) : "memory");
}

// Where [batch, head, row, column] lies. The strides are 64-bit, and so are all products.
template <typename E>
__device__ __forceinline__ E* at(const View<E>& X, int batch, int head, int row, int column)
{
    return X.data + batch * X.batch + head * X.head + row * X.row + column;
}

extern "C" __global__ void __launch_bounds__(threads) convert90(
    const float* dQ_acc,  // [B, Hq, Tr, Br * columns], sums of dQ / scale in the order of the fragments
    View<T> dQ,  // [B, Hq, Nq, d]
    int Hq,  // query heads
    int Nq,  // query rows of a head
    float scale)  // of Q K^T
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int Tr = (Nq + Br - 1) / Br;
    const int batch = blockIdx.x / Tr / Hq, head = blockIdx.x / Tr % Hq, i0 = blockIdx.x % Tr * Br;
    const float4* const tile = reinterpret_cast<const float4*>(dQ_acc + static_cast<i64>(blockIdx.x) * (Br * columns));

    // A warp takes 16 queries of a block of 16 columns, and transposes them.
    for (int x = warp; x < blocks * (block_rows / 16); x += warps) {
        const int block = x / (block_rows / 16), pair = x % (block_rows / 16);
        u32 R[4];
        #pragma unroll
        for (int n = 0; n < 2; ++n) {
            const float4 sums = tile[(x * 2 + n) * 32 + lane];
            R[2 * n] = pack(scale * sums.x, scale * sums.y);
            R[2 * n + 1] = pack(scale * sums.z, scale * sums.w);
        }
        const int row = block / (columns / 16) * block_rows + pair * 16 + lane / 16 * 8 + lane % 8;
        const int chunk = block % (columns / 16) * 2 + lane / 8 % 2;
        stmatrix_x4_trans(smem_base() + dQ_smem + row * row_bytes + chunk * 16, R);
    }
    __syncthreads();  // the rows are there

    for (int x = threadIdx.x; x < Br * (d / 8); x += threads) {
        const int row = x / (d / 8), chunk = x % (d / 8);
        if (i0 + row >= Nq) break;
        u32 R[4];
        ld_shared_v4(R, smem_base() + dQ_smem + row * row_bytes + chunk * 16);
        *reinterpret_cast<uint4*>(at(dQ, batch, head, i0 + row, chunk * 8)) = make_uint4(R[0], R[1], R[2], R[3]);
    }
}
