"""Machine code of early kernels of ours, with the figures that two independent versions of the model gave for it.

data/*.cubin.xz hold what NVRTC of CUDA 13.5 made of them. Their options (WQ: warps that share keys; QR: steps of Q in
registers; NST: stages; SW: slice; VREG, VAL: V in registers and without memory of its own; LATE: weave):

    forward_d128           BC=48,KPOS=4,LPOS=1 on sm_80; BC=48,SPRE=2,BPOS=0 on sm_90; BR=64,BC=48 on sm_89
    forward_d128_8warps    BR=256,BC=48,W=8,MINB=1
    forward_d64            D=64,BC=64,QR=4,BPOS=0
    fused_d128             BR=64,BC=128,W=8,WQ=2,NST=2,LATE=2; on sm_89 W=8,WQ=1,VREG=1,VAL=1,SW=32,NST=1,LATE=2
    fused_d128_wq1         BR=64,BC=128,W=8,WQ=1,NST=2,LATE=2
    fused_d64              D=64,BR=64,BC=128,W=4,WQ=1,SW=16,VREG=1,NST=2,LATE=2

The machine code is kept, not the source, because each compiler schedules anew and the figures are of this code.
"""

import lzma
from functools import cache
from pathlib import Path
from typing import NamedTuple

from flashsmith.sass import Board, Function, Work, disassemble

from .boards import A100, H100, RTX4090

DATA = Path(__file__).parent / "data"
TOKENS = 16384  # batch * length of every figure
WIDTH = 2048  # heads * d


class Recorded(NamedTuple):
    """A kernel, its launch, and TFLOP/s that it should come to."""

    cubin: str
    kernel: str
    board: Board
    warps: int
    smem_bytes: int
    d: int
    rows: int  # of a block
    products: int  # matrix products of one tile
    length: int
    documented: float  # noted when the kernel was written
    first: float | None  # by the first version of the model, on this very cubin


FORWARD = [
    Recorded("forward_d128_sm80", "fwd", A100, 4, 272 * (128 + 2 * 48), 128, 128, 2, 16384, 253, 252.88),
    Recorded("forward_d64_sm80", "fwd", A100, 4, 144 * (128 + 2 * 64), 64, 128, 2, 16384, 253, 252.65),
    Recorded("forward_d128_sm90", "fwd", H100, 4, 272 * (128 + 2 * 48), 128, 128, 2, 16384, 448, 447.51),
    Recorded("forward_d64_sm90", "fwd", H100, 4, 144 * (128 + 2 * 64), 64, 128, 2, 16384, 427, 427.18),
    Recorded("forward_d128_sm89", "fwd", RTX4090, 4, 272 * (64 + 2 * 48), 128, 64, 2, 16384, 166, 167.30),
]
BACKWARD = [
    Recorded("fused_d128_sm80", "fused", A100, 8, 164864, 128, 128, 5, 16384, 222, 222.39),
    Recorded("fused_d64_sm80", "fused", A100, 4, 82944, 64, 128, 5, 16384, 225, 225.21),
    Recorded("fused_d128_sm89", "fused", RTX4090, 8, 82432, 128, 128, 5, 2048, 140, 139.63),
]
EIGHT_WARPS = Recorded("forward_d128_8warps_sm80", "fwd", A100, 8, 272 * (256 + 2 * 48), 128, 256, 2, 16384, 0, 239.29)
FUSED_WQ1 = Recorded("fused_d128_wq1_sm80", "fused", A100, 8, 148480, 128, 128, 5, 16384, 0, 184.52)
HOPPER_FUSED = Recorded("fused_d128_sm90", "fused", H100, 8, 164864, 128, 128, 5, 16384, 377, 376.81)


@cache
def function_of(cubin: str, kernel: str) -> Function:
    """The disassembled kernel."""
    return disassemble(lzma.decompress((DATA / f"{cubin}.cubin.xz").read_bytes())).functions[kernel]


def work_of(case: Recorded) -> Work:
    """The launch that the documents' figure is for; backward figures include 14 B per element for the helpers."""
    blocks = TOKENS // case.rows * (WIDTH // case.d)
    flops = case.products * 2.0 * case.rows * case.length * case.d * blocks
    helpers = 14.0 * TOKENS * WIDTH if case.products == 5 else 0.0
    return Work(blocks, case.warps, case.smem_bytes, flops, serial_hbm_bytes=helpers)
