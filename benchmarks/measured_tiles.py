"""Predict the tiles that a GPU day measured, and say how far and in which order the predictions are off.

The report is what `make gpu` writes (flashsmith.gpuday): its parts "tiles KERNEL" hold one line a tile with measured
seconds, its part "environment" the GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple, cast

from flashsmith.compile import compile_source
from flashsmith.predict import MODEL, predict
from flashsmith.render import render
from flashsmith.spec.gpu import Gpu, find_gpu
from flashsmith.spec.kernel import TILE_OF, KernelName, KernelSpec
from flashsmith.spec.problem import Problem
from flashsmith.spec.tile import tile_text
from markdown_table import table

PART = "tiles "


class Pair(NamedTuple):
    """One tile of one kernel and problem, predicted and measured."""

    kernel: KernelName
    problem: str
    tile: str
    predicted: float  # seconds
    measured: float

    @property
    def difference(self) -> float:
        """Relative to what was measured."""
        return self.predicted / self.measured - 1


def tables(files: Sequence[Path]) -> Iterable[str]:
    """For each report: every tile, then each kernel and problem. Nothing for a report without measured tiles."""
    for file in files:
        gpu, lines = read_report(file)
        pairs = [pair_of(kernel, line, gpu) for kernel, line in lines]
        if not pairs:
            continue
        yield f"{file}: {gpu.name}, {len(pairs)} tiles measured, beside predictions by {MODEL}"
        yield ""
        yield from table(("kernel", "problem", "tile", "predicted ms", "measured ms", "difference"), map(_cells, pairs))
        yield ""
        yield from table(
            ("kernel", "problem", "tiles", "mean difference", "bias", "worst", "Kendall tau"), summary(pairs)
        )
        yield ""


def read_report(file: Path) -> tuple[Gpu, list[tuple[KernelName, dict[str, Any]]]]:
    """The GPU of a report, and the kernel and line of each tile that has a measured time."""
    parts = json.loads(file.read_text())["parts"]
    gpu = find_gpu(parts["environment"]["found"]["gpu"])
    lines = [
        (cast(KernelName, name.removeprefix(PART)), line)
        for name, part in parts.items()
        if name.startswith(PART)
        for line in part["found"] or ()
        if "seconds" in line
    ]
    return gpu, lines


def pair_of(kernel: KernelName, line: dict[str, Any], gpu: Gpu) -> Pair:
    """Compile the tile of a measured line anew and predict it."""
    problem, tile = Problem(**line["problem"]), TILE_OF[kernel](**line["tile"])
    spec = KernelSpec.of(kernel, problem, tile, gpu.sm)
    print(spec.key, file=sys.stderr)
    predicted = predict(compile_source(render(spec)), problem, gpu).seconds
    return Pair(kernel, problem.text, tile_text(tile), predicted, line["seconds"])


def summary(pairs: Sequence[Pair]) -> list[tuple[str, ...]]:
    """Differences and rank agreement of each kernel and problem: tiles of different ones are never ranked together."""
    rows = []
    for kernel, problem in dict.fromkeys((pair.kernel, pair.problem) for pair in pairs):
        group = [pair for pair in pairs if (pair.kernel, pair.problem) == (kernel, problem)]
        differences = [pair.difference for pair in group]
        tau = kendall_tau([pair.predicted for pair in group], [pair.measured for pair in group])
        rows.append(
            (kernel, problem, str(len(group)), f"{mean(map(abs, differences)):.0%}", f"{mean(differences):+.0%}",
             f"{max(differences, key=abs):+.0%}", "" if tau is None else f"{tau:.2f}")
        )  # fmt: skip
    return rows


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Pairs in the same order less pairs in opposite order, over all pairs; None for fewer than two values.

    >>> kendall_tau([1, 2, 3], [1, 3, 2])
    0.3333333333333333
    """
    pairs = list(combinations(zip(first, second, strict=True), 2))
    if not pairs:
        return None
    products = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in pairs]
    return (sum(p > 0 for p in products) - sum(p < 0 for p in products)) / len(pairs)


def _cells(pair: Pair) -> tuple[str, ...]:
    times = (f"{pair.predicted * 1e3:.3f}", f"{pair.measured * 1e3:.3f}", f"{pair.difference:+.0%}")
    return (pair.kernel, pair.problem, pair.tile, *times)
