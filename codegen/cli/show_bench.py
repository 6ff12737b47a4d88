"""Lay bench rows out for people: a line a length, a column a backend, and which kind of evidence it is."""

from __future__ import annotations

from collections.abc import Sequence

from ..bench import Row, peak_tflops
from ..spec.gpu import Gpu
from .console import print_lines, table
from .show_predict import how_sure


def rows(found: Sequence[Row], gpu: Gpu) -> None:
    """A table for each pass and kind of evidence."""
    for which, evidence in dict.fromkeys((row.which, row.evidence) for row in found):
        part = [row for row in found if (row.which, row.evidence) == (which, evidence)]
        names = tuple(dict.fromkeys(row.backend for row in part))
        lines = table("N", *names, right=("N", *names))
        for n in dict.fromkeys(row.n for row in part):
            cells = {row.backend: cell(row) for row in part if row.n == n}
            lines.add_row(str(n), *(cells.get(name, "") for name in names))
        first = part[0]
        text = f"{first.dtype} d={first.d}{' causal' if first.causal else ''}"
        print_lines(f"{which} {text} on {gpu.key}, {evidence}: TFLOP/s, % of {peak_tflops(gpu):.0f}", lines)
        notes = dict.fromkeys(f"{row.backend}: {row.note}" for row in part if row.note)
        print_lines(*notes, *([how_sure(gpu, margin=True)] if evidence == "predicted" else []))


def cell(row: Row) -> str:
    """TFLOP/s and the share of the part's peak, or a dash."""
    return "-" if row.tflops is None or row.peak_share is None else f"{row.tflops:.1f} {row.peak_share:.0%}"
