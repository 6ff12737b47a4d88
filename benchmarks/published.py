"""Hold the published speeds that the timing model is compared with, each with its source."""

from __future__ import annotations

from typing import NamedTuple

from flashsmith.spec.problem import Pass, Problem
from flashsmith.spec.tile import ForwardTile, KeyBlockTile

SOURCES = {
    "FA2": 'Dao, "FlashAttention-2", 2023, arXiv 2307.08691, section 4; where it gives a range, the middle of it',
    "FA3": 'Shah et al., "FlashAttention-3", 2024, arXiv 2407.08608, figures 5 and 6, read off the charts by others',
    "TVM": "apache/tvm, tl_doc/flash_perf.md: CUDA 12.2, batch and heads not stated",
    "3090": "README of kalyani-25's fork of sonnyli/flash_attention_from_scratch",
    "5090": "gau-nernst/learn-cuda, 07_attention/README.md: one sequence, 8 heads, 4096 queries, 8192 keys, 400 W",
    "TileIR": "performance notes of Triton's CUDA Tile IR backend: 850 W, 1.8 GHz; where they give a range, its middle",
    "Triton": "triton-lang.org, tutorial 06-fused-attention: batch 4, 32 heads, fp16; GPU not stated, A100-class",
    "comment": "Dao-AILab/flash-attention, csrc/flash_attn/src/flash_{fwd,bwd}_launch_template.h, on an A100",
}

TOKENS = 16384  # batch * length, unless a source says otherwise: the convention of FlashAttention-2's benchmark
WIDTH = 2048  # heads * d


class Speed(NamedTuple):
    """What FlashAttention-2 reached, and the tile it did it with (its launch templates)."""

    gpu: str
    which: Pass
    problem: Problem
    tile: ForwardTile | KeyBlockTile
    sm: int  # of the machine code that its build has for the GPU: 80 on compute capability 8.6 and 8.9 too
    tflops: float  # by Problem.flops
    source: str  # of SOURCES


class TritonSpeed(NamedTuple):
    """What a forward of Triton's reached, and the tile that ours is compiled with."""

    gpu: str
    d: int
    causal: bool
    N: int
    batch: int
    heads: int
    Br: int
    Bc: int
    warps: int
    stages: int
    tflops: float
    source: str


class Comment(NamedTuple):
    """What FlashAttention-2's authors say of a tile that they did not take, beside the one they took."""

    which: Pass
    d: int
    taken: ForwardTile | KeyBlockTile
    other: ForwardTile | KeyBlockTile
    says: str  # always that the other is slower


def problem(d: int, causal: bool, N: int) -> Problem:
    """One length of FlashAttention-2's benchmark."""
    return Problem(dtype="bf16", d=d, causal=causal, B=TOKENS // N, Hq=WIDTH // d, Nq=N)


def F(Br: int, Bc: int, warps: int) -> ForwardTile:
    """Q read from shared memory in every tile, O rescaled in every tile, as FlashAttention-2 does it."""
    return ForwardTile(Br=Br, Bc=Bc, warps=warps, q_steps=0, lazy=False)


def B(Br: int, Bc: int, warps: int, row_split: int, *, v_regs: bool = False) -> KeyBlockTile:
    """`row_split` is its AtomLayoutMSdP, `v_regs` its Is_V_in_regs; Q and dO have two buffers."""
    return KeyBlockTile(Br=Br, Bc=Bc, warps=warps, row_split=row_split, v_regs=v_regs)


def _on_4090(which: Pass, d: int, causal: bool, tile: ForwardTile | KeyBlockTile, tflops: float) -> Speed:
    return Speed("rtx4090", which, problem(d, causal, 2048), tile, 80, tflops, "TVM")


SPEEDS = (
    Speed("a100", "forward", problem(128, False, 16384), F(128, 64, 4), 80, 225.5, "FA2"),
    Speed("a100", "forward", problem(64, False, 16384), F(128, 128, 4), 80, 183, "FA2"),
    Speed("a100", "forward", problem(128, True, 16384), F(128, 64, 4), 80, 200, "FA2"),
    Speed("a100", "backward", problem(128, False, 16384), B(64, 128, 8, 2), 80, 196, "FA2"),
    Speed("a100", "backward", problem(64, False, 16384), B(128, 128, 8, 4), 80, 170, "FA2"),
    Speed("h100-sxm", "forward", problem(128, False, 16384), F(128, 64, 4), 90, 370, "FA3"),
    Speed("h100-sxm", "forward", problem(64, False, 16384), F(128, 128, 4), 90, 324, "FA3"),
    Speed("h100-sxm", "forward", problem(256, False, 16384), F(64, 64, 4), 90, 326, "FA3"),
    Speed("h100-sxm", "forward", problem(128, True, 16384), F(128, 64, 4), 90, 335, "FA3"),
    Speed("h100-sxm", "forward", problem(64, True, 16384), F(128, 128, 4), 90, 299, "FA3"),
    Speed("h100-sxm", "forward", problem(256, True, 16384), F(64, 64, 4), 90, 298, "FA3"),
    Speed("h100-sxm", "backward", problem(128, False, 16384), B(64, 128, 8, 2), 90, 322, "FA3"),
    Speed("h100-sxm", "backward", problem(64, False, 16384), B(128, 128, 8, 4), 90, 291, "FA3"),
    _on_4090("forward", 128, False, F(128, 32, 4), 169.28),
    _on_4090("forward", 64, False, F(128, 128, 4), 168.91),
    _on_4090("forward", 256, False, F(64, 64, 4), 156.15),
    _on_4090("forward", 32, False, F(128, 128, 4), 159.79),
    _on_4090("forward", 128, True, F(64, 64, 4), 151.19),
    _on_4090("forward", 64, True, F(128, 128, 4), 142.23),
    _on_4090("forward", 256, True, F(64, 64, 4), 144.12),
    _on_4090("forward", 32, True, F(128, 128, 4), 126.78),
    _on_4090("backward", 128, False, B(64, 64, 8, 4, v_regs=True), 124.57),
    _on_4090("backward", 64, False, B(64, 128, 8, 2, v_regs=True), 124.81),
    _on_4090("backward", 32, False, B(128, 128, 8, 4, v_regs=True), 115.12),
    _on_4090("backward", 128, True, B(64, 64, 8, 4, v_regs=True), 99.23),
    _on_4090("backward", 64, True, B(64, 128, 8, 2, v_regs=True), 96.53),
    _on_4090("backward", 32, True, B(128, 128, 8, 4, v_regs=True), 86.48),
    Speed("rtx3090", "forward", problem(128, False, 4096), F(128, 32, 4), 80, 67.3, "3090"),
    Speed("b200", "forward", problem(128, False, 16384), F(128, 64, 4), 100, 416, "TileIR"),
    Speed("b200", "forward", problem(128, True, 16384), F(128, 64, 4), 100, 409.5, "TileIR"),
    Speed("b200", "backward", problem(128, False, 16384), B(64, 128, 8, 2), 100, 370, "TileIR"),
    Speed("b200", "backward", problem(128, True, 16384), B(64, 128, 8, 2), 100, 327, "TileIR"),
    Speed(
        "rtx5090", "forward", Problem(dtype="bf16", d=128, B=1, Hq=8, Nq=4096, Nk=8192), F(128, 64, 4), 120, 190.58,
        "5090",
    ),
)  # fmt: skip

TRITON_SPEEDS = (
    TritonSpeed("a100", 64, False, 1024, 4, 32, 128, 64, 4, 3, 141.41, "Triton"),
    TritonSpeed("a100", 64, False, 16384, 4, 32, 128, 64, 4, 3, 166.63, "Triton"),
    TritonSpeed("a100", 64, True, 1024, 4, 32, 128, 64, 4, 3, 111.68, "Triton"),
    TritonSpeed("a100", 64, True, 16384, 4, 32, 128, 64, 4, 3, 164.26, "Triton"),
    TritonSpeed("h100-sxm", 64, False, 16384, 1, 32, 128, 128, 8, 2, 403, "FA3"),
    TritonSpeed("h100-sxm", 128, False, 16384, 1, 16, 128, 128, 8, 2, 395, "FA3"),
)

COMMENTS = (
    Comment("forward", 64, F(128, 128, 4), F(128, 128, 8), "18% slower"),
    Comment("forward", 64, F(128, 128, 4), F(64, 256, 4), "27% slower"),
    Comment("forward", 64, F(128, 128, 4), F(256, 64, 4), "85% slower: registers spill"),
    Comment("forward", 64, F(128, 128, 4), F(128, 128, 2), "5% slower"),
    Comment("forward", 128, F(128, 64, 4), F(128, 128, 8), "28% slower"),
    Comment("forward", 128, F(128, 64, 4), F(256, 64, 8), "28% slower"),
    Comment("forward", 128, F(128, 64, 4), F(128, 64, 8), "slower"),
    Comment("forward", 128, F(128, 64, 4), F(128, 32, 4), "the second choice"),
    Comment("backward", 64, B(128, 128, 8, 4), B(128, 128, 8, 4, v_regs=True), "a lot of spilling"),
    Comment("backward", 64, B(128, 128, 8, 4), B(128, 64, 8, 4), "quite slow"),
    Comment("backward", 64, B(128, 128, 8, 4), B(64, 128, 8, 2, v_regs=True), "slightly slower"),
    Comment("backward", 128, B(64, 128, 8, 2), B(128, 64, 8, 4), "left out"),
)
COMMENT_GPU, COMMENT_LENGTH = "a100", 2048
