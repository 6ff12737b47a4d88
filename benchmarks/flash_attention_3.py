"""Hold what FlashAttention-3 reached on an H100, and with which tiles."""

from __future__ import annotations

from typing import NamedTuple

from flashsmith.spec.problem import Pass
from flashsmith.spec.tile import WarpgroupTile

GPU = "h100-sxm"
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


class Line(NamedTuple):
    """One line of a chart: TFLOP/s at LENGTHS, 16k tokens and heads * d = 2048."""

    which: Pass
    d: int
    causal: bool
    Br: int
    Bc: int
    pairs: bool  # two blocks load K and V for each other (a cluster with multicast), where a head's tiles are even
    tflops: tuple[float, ...]


# Figures 5 and 6 of the paper, and the tiles that its code had then. The figure's labels of two cells may have been
# swapped by who read them (forward, d = 128, N = 512: 467 or 497).
LINES = (
    Line("forward", 64, False, 192, 128, False, (333, 392, 460, 476, 496, 497)),
    Line("forward", 64, True, 192, 128, False, (197, 265, 371, 420, 460, 473)),
    Line("forward", 128, False, 128, 176, True, (467, 565, 625, 638, 646, 648)),
    Line("forward", 128, True, 128, 128, False, (292, 423, 521, 579, 602, 616)),
    Line("forward", 256, False, 128, 80, True, (482, 639, 707, 736, 746, 756)),
    Line("forward", 256, True, 128, 80, False, (286, 427, 537, 612, 628, 642)),
    Line("backward", 64, False, 128, 128, False, (272, 363, 422, 453, 472, 474)),
    Line("backward", 128, False, 80, 128, False, (316, 424, 501, 542, 559, 561)),
)


class Ablation(NamedTuple):
    """Table 2 of the paper: four sequences of 8448 tokens, 16 heads of d = 128, fp16."""

    says: str
    tile: WarpgroupTile
    tflops: float


ABLATIONS = (
    Ablation("as it is", WarpgroupTile(Br=128, Bc=176, pingpong=True), 661),
    Ablation("without products under the softmax of the same warpgroup",
             WarpgroupTile(Br=128, Bc=176, pingpong=True, overlap=False), 582),
)  # fmt: skip
