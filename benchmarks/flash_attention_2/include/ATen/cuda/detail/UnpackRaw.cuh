// Stands in for PyTorch's header: seed and offset of dropout, which kernels without dropout never read.
#pragma once

#include <cstdint>
#include <tuple>

#include "../CUDAGeneratorImpl.h"

namespace at::cuda::philox {
__device__ inline std::tuple<uint64_t, uint64_t> unpack(PhiloxCudaState) { return {0, 0}; }
}  // namespace at::cuda::philox
