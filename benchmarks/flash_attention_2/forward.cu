// One forward kernel of FlashAttention-2: bf16, no dropout, no local window, no ALiBi, no softcap.
#include "flash_fwd_launch_template.h"

using Traits = Flash_fwd_kernel_traits<HEAD_DIM, BLOCK_M, BLOCK_N, WARPS, /*Is_Q_in_regs=*/false,
                                       /*Share_Q_K_smem=*/false, cutlass::bfloat16_t>;
static_assert(Traits::kSmemSize == SMEM_BYTES);

template __global__ void flash::flash_fwd_kernel<Traits, /*Is_dropout=*/false, CAUSAL, /*Is_local=*/false,
                                                 /*Has_alibi=*/false, EVEN_MN, /*Is_even_K=*/true,
                                                 /*Is_softcap=*/false, /*Return_softmax=*/false>(
    __grid_constant__ const flash::Flash_fwd_params params);
