"""Describe a GPU by its limits and rates: the one that is present, or one that is not."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import UnknownGpu

KB = 1024
REGISTERS_PER_SM = 65536
WGMMA_FLOPS_CLK = {90: 4096}  # dense fp16/bf16 with fp32 accumulation, FLOP per clock and SM (H100 white paper)
RESERVED_SMEM = 1 * KB  # shared memory that the driver keeps of every resident block, sm_80 and later (CUDA C++ guide)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Limits and rates of one part.

    Sources: NVIDIA's data sheet or architecture white paper of the part for sms, clock, memory and bandwidth; the CUDA
    C++ Programming Guide's table of compute capabilities for shared memory and threads; `tensor_source` for the tensor
    rate. L2: latencies of published microbenchmarks; rates of parts that were measured (A100: fitted to the slowdown
    that FlashAttention-2 reports for a 64x256 tile; RTX 4090: smallscientist1/cuda_microbenchmark), others by likeness.
    """

    key: str  # on the command line and in file names
    name: str  # as NVIDIA sells it
    sm: int  # compute capability times ten
    sms: int
    clock_ghz: float  # that sustained tensor work runs at, nominal
    tensor_flops_clk: int  # dense fp16/bf16 with fp32 accumulation through mma.sync, FLOP per clock and SM
    tensor_source: str
    smem_sm_kb: int  # shared memory of an SM
    threads_sm: int  # resident threads of an SM
    hbm_gbs: float  # memory bandwidth, GB/s
    memory_gb: int
    l2_mb: float
    source: str
    l2_bytes_clk: float  # that cp.async of every SM at once reads from L2, per clock and SM
    l2_latency: int  # clocks

    @property
    def reserved_smem_bytes(self) -> int:
        """Shared memory that the driver keeps of every resident block."""
        return RESERVED_SMEM if self.sm >= 80 else 0

    @property
    def smem_block_bytes(self) -> int:
        """Shared memory that one block may have, dynamic and static together."""
        return self.smem_sm_kb * KB - self.reserved_smem_bytes

    @property
    def smem_sm_bytes(self) -> int:
        """Shared memory of an SM."""
        return self.smem_sm_kb * KB

    @property
    def peak_tflops(self) -> float:
        """Tensor peak with fp32 accumulation through mma.sync, in TFLOP/s."""
        return self.sms * self.clock_ghz * self.tensor_flops_clk / 1e3

    @property
    def wgmma_flops_clk(self) -> int:
        """The same through wgmma, the instructions of warpgroups, FLOP per clock and SM; 0 where there are none."""
        return WGMMA_FLOPS_CLK.get(self.sm, 0)

    @property
    def wgmma_tflops(self) -> float:
        """Tensor peak through wgmma, in TFLOP/s; 0 where there is none."""
        return self.sms * self.clock_ghz * self.wgmma_flops_clk / 1e3

    @property
    def sm_class(self) -> tuple[int, int, int]:
        """What is the same in parts whose SMs are alike: a tile that is good on one is worth a look on the others."""
        return (self.sm, self.smem_sm_kb, self.tensor_flops_clk)

    @property
    def served(self) -> bool:
        """Whether the templates make kernels for it: ldmatrix and mma.sync m16n8k8 need sm_75."""
        return self.sm >= 75


_AMPERE = "A100 white paper, table 4: 1024 FMA a clock and SM"
_GA102 = "GA102 white paper: GeForce runs fp32 accumulation at half rate, 256 FMA a clock and SM"
_PRO = "data sheet: fp32 accumulation at the full rate of the part, 512 FMA a clock and SM"
_HOPPER = "mma.sync on sm_90 issues every 6 cycles (ptxas' own table): 2/3 of the 4096 FLOP that wgmma reaches"

GPUS: dict[str, Gpu] = {
    gpu.key: gpu
    for gpu in (
        Gpu(key="t4", name="Tesla T4", sm=75, sms=40, clock_ghz=1.59, tensor_flops_clk=1024,
            tensor_source="Turing white paper: 512 FMA a clock and SM, fp16 only", smem_sm_kb=64, threads_sm=1024,
            hbm_gbs=320, memory_gb=16, l2_mb=4, l2_bytes_clk=16, l2_latency=235, source="T4 data sheet"),
        Gpu(key="a100", name="NVIDIA A100 80GB", sm=80, sms=108, clock_ghz=1.41, tensor_flops_clk=2048,
            tensor_source=_AMPERE, smem_sm_kb=164, threads_sm=2048, hbm_gbs=2039, memory_gb=80, l2_mb=40,
            l2_bytes_clk=16, l2_latency=270, source="A100 80GB data sheet"),
        Gpu(key="a100-40gb", name="NVIDIA A100 40GB", sm=80, sms=108, clock_ghz=1.41, tensor_flops_clk=2048,
            tensor_source=_AMPERE, smem_sm_kb=164, threads_sm=2048, hbm_gbs=1555, memory_gb=40, l2_mb=40,
            l2_bytes_clk=16, l2_latency=270, source="A100 40GB data sheet"),
        Gpu(key="a10", name="NVIDIA A10", sm=86, sms=72, clock_ghz=1.695, tensor_flops_clk=1024, tensor_source=_PRO,
            smem_sm_kb=100, threads_sm=1536, hbm_gbs=600, memory_gb=24, l2_mb=6, l2_bytes_clk=20, l2_latency=260,
            source="A10 data sheet"),
        Gpu(key="rtx3090", name="NVIDIA GeForce RTX 3090", sm=86, sms=82, clock_ghz=1.695, tensor_flops_clk=512,
            tensor_source=_GA102, smem_sm_kb=100, threads_sm=1536, hbm_gbs=936, memory_gb=24, l2_mb=6,
            l2_bytes_clk=20, l2_latency=260, source="GA102 white paper, appendix A"),
        Gpu(key="l4", name="NVIDIA L4", sm=89, sms=58, clock_ghz=2.04, tensor_flops_clk=1024, tensor_source=_PRO,
            smem_sm_kb=100, threads_sm=1536, hbm_gbs=300, memory_gb=24, l2_mb=48, l2_bytes_clk=15, l2_latency=300,
            source="L4 data sheet"),
        Gpu(key="l40s", name="NVIDIA L40S", sm=89, sms=142, clock_ghz=2.52, tensor_flops_clk=1024, tensor_source=_PRO,
            smem_sm_kb=100, threads_sm=1536, hbm_gbs=864, memory_gb=48, l2_mb=96, l2_bytes_clk=15, l2_latency=300,
            source="L40S data sheet"),
        Gpu(key="rtx4090", name="NVIDIA GeForce RTX 4090", sm=89, sms=128, clock_ghz=2.52, tensor_flops_clk=512,
            tensor_source="Ada white paper, appendix A: 165 TFLOP/s with fp32 accumulation", smem_sm_kb=100,
            threads_sm=1536, hbm_gbs=1008, memory_gb=24, l2_mb=72, l2_bytes_clk=15, l2_latency=300,
            source="Ada white paper, appendix A"),
        Gpu(key="h100-sxm", name="NVIDIA H100 80GB HBM3", sm=90, sms=132, clock_ghz=1.755, tensor_flops_clk=2731,
            tensor_source=_HOPPER, smem_sm_kb=228, threads_sm=2048, hbm_gbs=3350, memory_gb=80, l2_mb=50,
            l2_bytes_clk=32, l2_latency=280, source="H100 data sheet"),
        Gpu(key="h100-pcie", name="NVIDIA H100 PCIe", sm=90, sms=114, clock_ghz=1.62, tensor_flops_clk=2731,
            tensor_source=_HOPPER, smem_sm_kb=228, threads_sm=2048, hbm_gbs=2039, memory_gb=80, l2_mb=50,
            l2_bytes_clk=32, l2_latency=280, source="H100 data sheet"),
        Gpu(key="h200", name="NVIDIA H200", sm=90, sms=132, clock_ghz=1.755, tensor_flops_clk=2731,
            tensor_source=_HOPPER, smem_sm_kb=228, threads_sm=2048, hbm_gbs=4800, memory_gb=141, l2_mb=50,
            l2_bytes_clk=32, l2_latency=280, source="H200 data sheet"),
        Gpu(key="b200", name="NVIDIA B200", sm=100, sms=148, clock_ghz=1.80, tensor_flops_clk=2048,
            tensor_source="mma.sync on sm_100 issues every 8 cycles (ptxas' own table); tcgen05 reaches 8192",
            smem_sm_kb=228, threads_sm=2048, hbm_gbs=8000, memory_gb=180, l2_mb=126, l2_bytes_clk=32, l2_latency=350,
            source="B200 data sheet"),
        Gpu(key="rtx5090", name="NVIDIA GeForce RTX 5090", sm=120, sms=170, clock_ghz=2.41, tensor_flops_clk=512,
            tensor_source="RTX Blackwell white paper, appendix A: 209.5 TFLOP/s with fp32 accumulation",
            smem_sm_kb=100, threads_sm=1536, hbm_gbs=1792, memory_gb=32, l2_mb=96, l2_bytes_clk=15, l2_latency=360,
            source="RTX Blackwell white paper, appendix A"),
        Gpu(key="orin", name="NVIDIA Jetson AGX Orin", sm=87, sms=16, clock_ghz=1.30, tensor_flops_clk=2048,
            tensor_source="Jetson AGX Orin technical brief: 85 dense INT8 TOPS on the GPU, half of that in fp16",
            smem_sm_kb=164, threads_sm=1536, hbm_gbs=204.8, memory_gb=64, l2_mb=4, l2_bytes_clk=16, l2_latency=270,
            source="Jetson AGX Orin data sheet"),
    )
}  # fmt: skip

# NVIDIA's own names, lower case and reduced to words, beside our keys. A part that is not listed is unknown:
# a laptop GPU or a MIG slice shares the name of a part whose rates it has not got.
_NAMES: tuple[tuple[str, str], ...] = (
    (r"(tesla )?t4", "t4"),
    (r"a100( sxm4| sxm| pcie| pg509| 80gb pcie)* 40gb|a100 40gb( pcie| sxm4)?", "a100-40gb"),
    (r"a100( sxm4| sxm| pcie| x)* 80gb|a100 80gb( pcie| sxm4| sxm)?|a100", "a100"),
    (r"a10", "a10"),
    (r"(geforce )?rtx 3090", "rtx3090"),
    (r"l4", "l4"),
    (r"l40s", "l40s"),
    (r"(geforce )?rtx 4090", "rtx4090"),
    (r"h100( sxm5?)?( 80gb hbm3)?|h100 80gb( hbm3)?( sxm5?)?", "h100-sxm"),
    (r"h100( 80gb)? pcie( 80gb)?", "h100-pcie"),
    (r"h200( sxm5?)?( 141gb)?( hbm3e)?", "h200"),
    (r"b200( sxm)?( 180gb)?( hbm3e)?", "b200"),
    (r"(geforce )?rtx 5090", "rtx5090"),
    (r"(jetson )?(agx )?orin", "orin"),
)
_NOT_THE_PART: tuple[tuple[str, str], ...] = (
    (r"\bmig\b", "a MIG slice has some of its GPU's SMs and bandwidth"),
    (r"\blaptop\b|\bmax q\b|\bmobile\b", "a laptop part shares the name of a desktop part, not its SMs or clocks"),
    (r"\bnvl\b", "an NVL card has other clocks and memory than the SXM module"),
)


def find_gpu(name: str) -> Gpu:
    """The GPU of a key (`a100`), or of NVIDIA's own name (`NVIDIA A100-SXM4-80GB`); `auto` is the one present.

    Raises UnknownGpu for a name that the table does not hold; laptop parts and MIG slices are not the full part.

    >>> find_gpu("NVIDIA A100-SXM4-80GB").key
    'a100'
    """
    if name == "auto":
        return present_gpu()
    if name in GPUS:
        return GPUS[name]
    words = " ".join(re.sub(r"[ _-]+", " ", name.lower()).removeprefix("nvidia ").split())
    for pattern, key in _NAMES:
        if re.fullmatch(pattern, words):
            return GPUS[key]
    reason = next((f" ({why})" for pattern, why in _NOT_THE_PART if re.search(pattern, words)), "")
    raise UnknownGpu(f"GPU {name!r} is not in the table{reason}; it knows {', '.join(GPUS)}.")


def served_gpu(name: str) -> Gpu:
    """find_gpu, and UnknownGpu unless the templates make kernels for it."""
    gpu = find_gpu(name)
    if not gpu.served:
        raise UnknownGpu(
            f"{gpu.key} has compute capability {gpu.sm / 10}; the kernels need 7.5 (ldmatrix, mma.sync m16n8k8)."
        )
    return gpu


def present_gpu() -> Gpu:
    """The current CUDA device's entry. Raises UnknownGpu where there is no device, or none that the table knows."""
    from cupy.cuda import runtime

    try:
        seen = runtime.getDeviceProperties(runtime.getDevice())
    except runtime.CUDARuntimeError as error:
        raise UnknownGpu(f"--gpu auto: no CUDA device here ({error}); name one of {', '.join(GPUS)}.") from error
    return identify(seen["name"].decode(), sms=seen["multiProcessorCount"], sm=10 * seen["major"] + seen["minor"])


def identify(name: str, *, sms: int, sm: int) -> Gpu:
    """The entry of a device by its name, if it has the SMs and the compute capability of that part.

    Raises UnknownGpu for another part of the same name: what was tuned and timed for one is not true of the other.
    """
    gpu = find_gpu(name)
    if (gpu.sms, gpu.sm) != (sms, sm):
        raise UnknownGpu(
            f"{name!r} here has {sms} SMs and compute capability {sm / 10}; {gpu.key} has {gpu.sms} and {gpu.sm / 10}. "
            f"It is another part of that name, or a slice of one. The table knows {', '.join(GPUS)}."
        )
    return gpu
