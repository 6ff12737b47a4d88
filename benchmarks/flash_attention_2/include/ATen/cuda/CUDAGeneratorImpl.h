// Stands in for PyTorch's header: the state of its random generator, which kernels without dropout never read.
#pragma once

namespace at {
struct PhiloxCudaState {};
}  // namespace at
