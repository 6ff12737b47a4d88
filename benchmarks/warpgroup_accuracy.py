"""Compare the model of kernels with warpgroups with what FlashAttention-3 reached. No GPU is needed.

    python benchmarks/warpgroup_accuracy.py            the tables of docs/model.md, as Markdown
    python benchmarks/warpgroup_accuracy.py --write    the same, into the document

A kernel of ours in FlashAttention-3's tile stands in for its own: the same products, exponentials and turns, and in the
loop of the forward of 128x176 as many instructions (594), in that of the backward of 80x128 459 where it has 510.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache

import document
from flash_attention_3 import ABLATIONS, GPU, LENGTHS, LINES, Ablation, Line
from flashsmith.compile import Binary, compile_source, version_text
from flashsmith.predict import WARPGROUP_MODEL, board_of, predict, sizes_of, work_of
from flashsmith.render import render
from flashsmith.sass import Function, disassemble, predict_time
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import FUSED90, KernelSpec
from flashsmith.spec.problem import Problem
from flashsmith.spec.tile import RowTile, WarpgroupKeyTile, WarpgroupTile
from markdown_table import table
from model_accuracy import SUMMARY_HEAD, summary
from published import SOURCES, problem
from published_rows import Compared

DOCUMENT = document.DOCS / "model.md"
COMMAND = "python benchmarks/warpgroup_accuracy.py --write"
HEAD = ("pass", "d", "tile", "N", "predicted", "published", "difference")
ABLATION_HEAD = ("FlashAttention-3, d = 128, 128x176", "predicted", "published", "difference")


def tables() -> Iterable[str]:
    """The section of docs/model.md, line by line."""
    yield f"{WARPGROUP_MODEL}, machine code by NVRTC {version_text()}. TFLOP/s on {GPU}."
    yield ""
    rows = [compare(line, N) for line in LINES for N in LENGTHS]
    yield from table(HEAD, [cells for _, cells in rows])
    yield ""
    yield from table(SUMMARY_HEAD, [row for row in summary([row for row, _ in rows]) if row[0] != GPU])
    yield ""
    yield from table(ABLATION_HEAD, map(compare_ablation, ABLATIONS))
    yield ""
    yield f"- FA3: {SOURCES['FA3']}; the last table: its table 2"


def compare(line: Line, N: int) -> tuple[Compared, tuple[str, ...]]:
    """One point of a chart, and the cells of its row."""
    asked = problem(line.d, line.causal, N)
    seconds = forward_seconds(line, asked) if line.which == "forward" else backward_seconds(line, asked)
    predicted, published = round(asked.flops(line.which) / seconds / 1e12, 1), line.tflops[LENGTHS.index(N)]
    kind = line.which + (" causal" if line.causal else "")
    row = Compared(GPU, kind, predicted, published)
    tile = f"{line.Br}x{line.Bc}"
    return row, (kind, str(line.d), tile, str(N), f"{predicted:.1f}", f"{published:g}", f"{row.difference or 0:+.0%}")


def compare_ablation(ablation: Ablation) -> tuple[str, ...]:
    """A row of the paper's table 2."""
    asked = Problem(dtype="fp16", d=128, B=4, Hq=16, Nq=8448)
    seconds = _seconds(in_pairs(ablation.tile, asked), asked)
    predicted = asked.flops("forward") / seconds / 1e12
    return ablation.says, f"{predicted:.1f}", f"{ablation.tflops:g}", f"{predicted / ablation.tflops - 1:+.0%}"


def forward_seconds(line: Line, asked: Problem) -> float:
    """A forward of ours in the line's tile."""
    tile = WarpgroupTile(Br=line.Br, Bc=line.Bc, pingpong=True)
    return _seconds(in_pairs(tile, asked) if line.pairs else tile, asked)


def in_pairs(tile: WarpgroupTile, asked: Problem) -> WarpgroupTile:
    """A tile of blocks that load for each other, which FlashAttention-3 has where a head's tiles are even in number."""
    return replace(tile, cluster=2 - -(-asked.Nq // tile.Br) % 2)


def backward_seconds(line: Line, asked: Problem) -> float:
    """A backward of ours in the line's tile: its three launches."""
    keys, gpu = WarpgroupKeyTile(Br=line.Br, Bc=line.Bc), find_gpu(GPU)
    tiles = (RowTile(), keys, keys)
    specs = (KernelSpec.of(kernel, asked, tile, gpu.sm) for kernel, tile in zip(FUSED90, tiles, strict=True))
    return sum(predict(_binary(spec), asked, gpu).seconds for spec in specs)


def _seconds(tile: WarpgroupTile, asked: Problem) -> float:
    binary, function = _compiled(tile, asked)
    return predict_time(function, board_of(find_gpu(GPU)), work_of(binary.spec, sizes_of(asked))).seconds


def _compiled(tile: WarpgroupTile, asked: Problem) -> tuple[Binary, Function]:
    spec = KernelSpec.of(
        "forward90", Problem(dtype=asked.dtype, d=asked.d, causal=asked.causal), tile, find_gpu(GPU).sm
    )
    binary = _binary(spec)
    return binary, _function(binary)


@cache
def _binary(spec: KernelSpec) -> Binary:
    print(spec.key, file=sys.stderr)
    return compile_source(render(spec))


@cache
def _function(binary: Binary) -> Function:
    return disassemble(binary.cubin).functions[binary.spec.kernel]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="How accurate the model of kernels with warpgroups is.")
    parser.add_argument("--write", action="store_true", help=f"put the tables into {DOCUMENT.name}")
    asked = parser.parse_args(arguments)
    document.give(DOCUMENT, COMMAND, "\n".join(tables()) + "\n", write_it=asked.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
