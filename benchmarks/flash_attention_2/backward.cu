// The main backward kernel of FlashAttention-2: bf16, no dropout, no local window, no ALiBi, no softcap.
#include "flash_bwd_launch_template.h"

using Traits = Flash_bwd_kernel_traits<HEAD_DIM, BLOCK_M, BLOCK_N, WARPS, ATOMS_M_SDP, ATOMS_N_DKV, ATOMS_M_DQ,
                                       V_IN_REGS, /*No_double_buffer=*/false, cutlass::bfloat16_t>;
static_assert(Traits::kSmemSize1colblock == SMEM_BYTES);

template __global__ void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<
    Traits, /*Is_dropout=*/false, CAUSAL, /*Is_local=*/false, /*Has_alibi=*/false, EVEN_MN, /*Is_even_K=*/true,
    /*Is_softcap=*/false>(__grid_constant__ const flash::Flash_bwd_params params);
