// Stands in for PyTorch's header: checks of the host side, none of which is compiled into a cubin.
#pragma once

#define C10_CUDA_CHECK(call) (call)
#define C10_CUDA_KERNEL_LAUNCH_CHECK()
