"""Hold what a time depends on besides the code: the board it runs on and the work of the launch."""

from collections.abc import Sequence
from dataclasses import dataclass

from .rates import MEMORY_PATH, MemoryPath, PipeRates

HBM_SHARE = 0.85  # of the data sheet's rate that a streaming kernel reaches [?]


@dataclass(frozen=True, slots=True)
class Board:
    """A GPU as the model sees it. Bytes per clock hold for one multiprocessor (SM) at `clock_ghz`.

    `tensor_flops_per_clock_sm` is the dense fp16/bf16 rate with fp32 accumulators that *mma.sync* reaches: 2048 on an
    A100, 2731 on Hopper (ptxas spaces independent HMMA.16816 by 6 cycles), 512 on GeForce. `wgmma_flops_per_clock_sm`
    is the same for the asynchronous warpgroup instructions; only sm_90 has them.
    """

    name: str
    sm: int  # compute capability: 80, 86, 89, 90, 100, 120
    sms: int
    clock_ghz: float  # sustained under tensor load; nominal if unknown
    tensor_flops_per_clock_sm: float
    smem_per_sm_bytes: int
    max_threads_per_sm: int
    registers_per_sm: int
    l2_bytes_per_clock_sm: float  # what cp.async of every SM at once reaches
    l2_latency: float  # cycles
    hbm_gb_per_s: float
    max_blocks_per_sm: int = 32
    wgmma_flops_per_clock_sm: float = 4096.0
    path: MemoryPath = MEMORY_PATH
    pipes: PipeRates | None = None  # None: those of the architecture in rates.py


@dataclass(frozen=True, slots=True)
class Work:
    """One launch. `tensor_flops` are those the tensor cores execute, masked halves of a tile included.

    `unequal` gives the relative work of the blocks in launch order: one number for each block, or a pattern that
    repeats (the tiles of one head), whose length divides `blocks`. None: all alike. `hbm_bytes` (read and written once)
    alone times a kernel without tensor instructions; in others, and `l2_bytes` likewise, it is a lower bound, because
    copies overlap with computing. `serial_hbm_bytes` do not: the time to clear an accumulator first, say, is added.

    `rare_share` is the share of iterations in which blocks behind a branch that neither compute on tensor cores nor
    touch global memory (masks, rescue code, lazy rescaling) are executed: 1 counts them always, as the comparison with
    published figures did; for a mask on the diagonal only it is masked tiles / all tiles. `twin_share` is the share of
    iterations that run in a twin of the main loop, which has its products and more besides: loops of warpgroups have
    one for masked tiles.

    Of kernels whose warpgroups have roles: `producer_warps` of a block only copy (None: four if the code gives
    registers away), `first_bytes` is what a block loads before its first product, `loaded_bytes` what all blocks copy
    from L2 to shared memory past the registers, `multicast_bytes` what comes there of what another block of the cluster
    has loaded, `reduced_bytes` what they add to global memory from there. `persistent`: as
    many blocks as there are SMs take one tile after another, the longest first, dealt to and fro; `blocks` are tiles.
    """

    blocks: int
    warps: int  # per block
    dynamic_smem_bytes: int = 0  # per block
    tensor_flops: float = 0.0
    unequal: Sequence[float] | None = None
    hbm_bytes: float | None = None
    l2_bytes: float | None = None
    serial_hbm_bytes: float = 0.0
    rare_share: float = 1.0
    twin_share: float = 0.0
    producer_warps: int | None = None
    first_bytes: float = 0.0
    loaded_bytes: float = 0.0
    multicast_bytes: float = 0.0
    reduced_bytes: float = 0.0
    persistent: bool = False
