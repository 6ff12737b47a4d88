namespace {

namespace kernels = flashsmith_backward_bf16_d64_causal_kernels;
using Args = flashsmith_backward_bf16_d64_causal_args;

constexpr int64_t element = 2;  // bytes
constexpr int64_t longest = 2147483392;  // what 32-bit numbers count, up to the end of the last tile
constexpr int64_t most_rows = int64_t(1) << 40;  // of all heads: more than any memory holds; no formula below wraps

int64_t ceil_div(int64_t n, int64_t step) { return (n + step - 1) / step; }

// Whether there is no row or no key at all: outputs are set, and nothing is launched.
bool nothing(const Args& args) { return args.B == 0 || args.Hq == 0 || args.Nq == 0 || args.Nk == 0; }

// Why sizes cannot be launched; null if they can.
const char* why_bad_sizes(const Args& args)
{
    if (args.B < 0 || args.B > longest) return "B must be 0 to 2147483392";
    if (args.Hq < 0 || args.Hq > longest) return "Hq must be 0 to 2147483392";
    if (args.Hk < 0 || args.Hk > longest) return "Hk must be 0 to 2147483392";
    if (args.Nq < 0 || args.Nq > longest) return "Nq must be 0 to 2147483392";
    if (args.Nk < 0 || args.Nk > longest) return "Nk must be 0 to 2147483392";
    if (args.Hq > 0 && (args.Hk == 0 || args.Hq % args.Hk != 0)) return "Hq must be a multiple of Hk";
    const int64_t query_rows = std::max<int64_t>(args.Nq, 1), key_rows = std::max<int64_t>(args.Nk, 1);
    if (args.B * args.Hq > most_rows / query_rows || args.B * args.Hk > most_rows / key_rows)
        return "B * Hq * Nq and B * Hk * Nk must be at most 2^40";
    if (nothing(args)) return nullptr;
    if (ceil_div(args.Nq, 128) * args.B * args.Hq > 2147483647)
        return "ceil_div(Nq, 128) * B * Hq must be at most 2147483647";
    if (ceil_div(args.Nk, 128) * args.B * args.Hk > 2147483647)
        return "ceil_div(Nk, 128) * B * Hk must be at most 2147483647";
    if (ceil_div(args.Nq, 64) * args.B * args.Hq > 2147483647)
        return "ceil_div(Nq, 64) * B * Hq must be at most 2147483647";
    return nullptr;
}

// Whether a tensor is there, and every row starts on 16 bytes; a stride that nothing steps over is free.
template <typename Tensor>
bool usable(const Tensor& x, int64_t batches, int64_t heads, int64_t rows)
{
    if (batches * heads * rows == 0) return true;
    return x.data && reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && (batches == 1 || x.batch * element % 16 == 0) &&
           (heads == 1 || x.head * element % 16 == 0) && (rows == 1 || x.row * element % 16 == 0);
}

// Set the rows of a tensor [batches, heads, rows, columns] to 0.
cudaError_t clear(const flashsmith_output& x, int64_t batches, int64_t heads, int64_t rows, int64_t columns,
                  cudaStream_t stream)
{
    const int64_t width = columns * element, step = x.row * element;
    for (int64_t matrix = 0; rows > 0 && matrix < batches * heads; ++matrix) {
        char* lowest = static_cast<char*>(x.data) + (matrix / heads * x.batch + matrix % heads * x.head) * element;
        if (step < 0) lowest += step * (rows - 1);
        const int64_t pitch = rows == 1 ? width : step < 0 ? -step : step;
        if (const cudaError_t error = cudaMemset2DAsync(lowest, pitch, 0, width, rows, stream)) return error;
    }
    return cudaSuccess;
}

// What a pass without a row or a key leaves.
cudaError_t write_nothing(const Args& args)
{
    if (const cudaError_t error = clear(args.dQ, args.B, args.Hq, args.Nq, 64, args.stream)) return error;
    if (const cudaError_t error = clear(args.dK, args.B, args.Hk, args.Nk, 64, args.stream)) return error;
    if (const cudaError_t error = clear(args.dV, args.B, args.Hk, args.Nk, 64, args.stream)) return error;
    return cudaSuccess;
}

// Bytes of the buffers of the workspace, which lie one after the other.
struct Workspace {
    int64_t stats;  // [B, Hq, Nq padded to 128 / 16, 3, 16]: -lse in base 2, -delta, huge m
    int64_t dQ_acc;  // [B, Hq, Tr, Br * columns], sums of dQ / scale in the order of the fragments

    explicit Workspace(const Args& args)
        : stats(ceil_div(args.B * args.Hq * (ceil_div(args.Nq, 128) * 128) * 3 * 4, 256) * 256)
        , dQ_acc(ceil_div(args.B * args.Hq * ceil_div(args.Nq, 64) * 64 * 64 * 4, 256) * 256)
    {
    }

    int64_t bytes() const { return stats + dQ_acc; }
};

// Let a kernel have its shared memory, of which it gets 48 KB unasked: once on each of the first 64 devices.
// NOTE: whoever resets a device takes that back.
template <auto kernel>
cudaError_t allow_smem(int bytes)
{
    static std::atomic<uint64_t> done{0};
    int device = 0;
    if (const cudaError_t error = cudaGetDevice(&device)) return error;
    const uint64_t bit = device < 64 ? uint64_t(1) << device : 0;
    if (done & bit) return cudaSuccess;
    const cudaFuncAttribute attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
    const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, bytes);
    if (!error) done |= bit;
    return error;
}

// One launch, flat in x. What it returns is its own error, not one that an earlier call has left behind.
template <typename... Parameters>
cudaError_t launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int smem_bytes, cudaStream_t stream,
                   std::common_type_t<Parameters>... values)
{
    void* pointers[] = {&values...};
    const dim3 grid(static_cast<unsigned>(blocks)), block(static_cast<unsigned>(threads));
    return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, pointers, smem_bytes, stream);
}

}  // namespace

const char* flashsmith_backward_bf16_d64_causal_why_refused(const Args* given)
{
    if (!given) return "args must not be null";
    const Args& args = *given;
    if (const char* why = why_bad_sizes(args)) return why;
    if (!(args.scale >= 0 && args.scale <= 3e38))
        return "scale must be positive and finite; 0 stands for 0.125";
    if (!usable(args.Q, args.B, args.Hq, args.Nq))
        return "Q must not be null, and its rows must start on 16 bytes: strides are multiples of 8";
    if (!usable(args.K, args.B, args.Hk, args.Nk))
        return "K must not be null, and its rows must start on 16 bytes: strides are multiples of 8";
    if (!usable(args.V, args.B, args.Hk, args.Nk))
        return "V must not be null, and its rows must start on 16 bytes: strides are multiples of 8";
    if (!usable(args.O, args.B, args.Hq, args.Nq))
        return "O must not be null, and its rows must start on 16 bytes: strides are multiples of 8";
    if (!usable(args.dO, args.B, args.Hq, args.Nq))
        return "dO must not be null, and its rows must start on 16 bytes: strides are multiples of 8";
    if (!usable(args.dQ, args.B, args.Hq, args.Nq))
        return "dQ must not be null, and its rows must start on 16 bytes: strides are multiples of 8";
    if (!usable(args.dK, args.B, args.Hk, args.Nk))
        return "dK must not be null, and its rows must start on 16 bytes: strides are multiples of 8";
    if (!usable(args.dV, args.B, args.Hk, args.Nk))
        return "dV must not be null, and its rows must start on 16 bytes: strides are multiples of 8";
    if (args.B * args.Hq * args.Nq > 0 && !args.m) return "m must not be null";
    if (args.B * args.Hq * args.Nq > 0 && !args.l) return "l must not be null";
    if (nothing(args)) return nullptr;
    if (args.workspace_bytes < static_cast<uint64_t>(Workspace(args).bytes()))
        return "workspace_bytes must be at least flashsmith_backward_bf16_d64_causal_workspace_bytes()";
    if (!args.workspace || reinterpret_cast<uintptr_t>(args.workspace) % 16 != 0)
        return "workspace must not be null, and must start on 16 bytes";
    return nullptr;
}

size_t flashsmith_backward_bf16_d64_causal_workspace_bytes(const Args* args)
{
    if (!args || why_bad_sizes(*args) || nothing(*args)) return 0;
    return static_cast<size_t>(Workspace(*args).bytes());
}

int flashsmith_backward_bf16_d64_causal(const Args* given)
{
    if (flashsmith_backward_bf16_d64_causal_why_refused(given)) return cudaErrorInvalidValue;
    Args args = *given;
    if (args.scale == 0) args.scale = 0.125;
    if (nothing(args)) return write_nothing(args);

    const Workspace bytes(args);
    char* next = static_cast<char*>(args.workspace);
    float* const stats = reinterpret_cast<float*>(next);
    next += bytes.stats;
    float* const dQ_acc = reinterpret_cast<float*>(next);

    cudaError_t error = cudaSuccess;
    if (!error) error = cudaMemsetAsync(dQ_acc, 0, static_cast<size_t>(bytes.dQ_acc), args.stream);
    if (!error) {
        using namespace kernels::delta;
        // B * Hq * ceil(Nq / 128)
        const int64_t blocks = ceil_div(args.Nq, 128) * args.B * args.Hq;
        error = launch(
            flashsmith_backward_bf16_d64_causal_delta, blocks, 256, 0, args.stream,
            View<const T>{static_cast<const T*>(args.O.data), args.O.batch, args.O.head, args.O.row},
            View<const T>{static_cast<const T*>(args.dO.data), args.dO.batch, args.dO.head, args.dO.row},
            args.m,
            args.l,
            args.dlse,
            stats,
            static_cast<int>(args.Hq),
            static_cast<int>(args.Nq));
    }
    if (!error) error = allow_smem<kernels::fused::flashsmith_backward_bf16_d64_causal_fused>(67072);
    if (!error) {
        using namespace kernels::fused;
        // B * Hk * Tc: batch, K/V head, K/V tile
        const int64_t blocks = ceil_div(args.Nk, 128) * args.B * args.Hk;
        error = launch(
            flashsmith_backward_bf16_d64_causal_fused, blocks, 128, 67072, args.stream,
            View<const T>{static_cast<const T*>(args.Q.data), args.Q.batch, args.Q.head, args.Q.row},
            View<const T>{static_cast<const T*>(args.K.data), args.K.batch, args.K.head, args.K.row},
            View<const T>{static_cast<const T*>(args.V.data), args.V.batch, args.V.head, args.V.row},
            View<const T>{static_cast<const T*>(args.dO.data), args.dO.batch, args.dO.head, args.dO.row},
            stats,
            dQ_acc,
            View<T>{static_cast<T*>(args.dK.data), args.dK.batch, args.dK.head, args.dK.row},
            View<T>{static_cast<T*>(args.dV.data), args.dV.batch, args.dV.head, args.dV.row},
            Walk{32 * args.Q.row, 128 * args.Q.row},
            Walk{32 * args.dO.row, 128 * args.dO.row},
            static_cast<int>(args.Hq),
            static_cast<int>(args.Hk),
            static_cast<int>(args.Nq),
            static_cast<int>(args.Nk),
            static_cast<float>(args.scale));
    }
    if (!error) {
        using namespace kernels::convert;
        // B * Hq * Tr: batch, query head, Q tile
        const int64_t blocks = ceil_div(args.Nq, 64) * args.B * args.Hq;
        error = launch(
            flashsmith_backward_bf16_d64_causal_convert, blocks, 128, 0, args.stream,
            dQ_acc,
            View<T>{static_cast<T*>(args.dQ.data), args.dQ.batch, args.dQ.head, args.dQ.row},
            static_cast<int>(args.Hq),
            static_cast<int>(args.Nq),
            static_cast<float>(args.scale));
    }
    return error;
}
