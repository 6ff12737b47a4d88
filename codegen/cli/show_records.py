"""Lay tuned records out for people: a line a record, a table for each kind of evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..spec.gpu import GPUS, find_gpu
from ..spec.tile import tile_text
from .console import print_lines, table
from .show_predict import how_sure, never_compared

if TYPE_CHECKING:
    from ..catalog import Entry


def records(found: Sequence[Entry], folders: Sequence[Path], *, filtered: bool) -> None:
    """Measured ones, then predicted ones; and why those that do not serve do not."""
    if not found:
        which = "such records" if filtered else "records"
        return print_lines(f"no {which} in {', '.join(map(str, folders))}; flashsmith tune makes them.")
    for kind in ("measured", "predicted"):
        part = [entry for entry in found if entry.record.evidence.kind == kind]
        if part:
            _of_one_kind(kind, part)
    reasons = Counter((entry.state, entry.why) for entry in found if entry.state != "serves")
    print_lines(*(f"{state}, {count} of {len(found)}: {why}" for (state, why), count in reasons.items()))


def _of_one_kind(kind: str, entries: Sequence[Entry]) -> None:
    from ..predict import error_of

    numbers = ("Nq", "Nk", f"{kind} ms", "TFLOP/s")
    lines = table("gpu", "problem", "kernel", *numbers, "", "by", "tile", right=numbers)
    for entry in entries:
        r = entry.record
        text = r.text
        state = "" if entry.state == "serves" else entry.state
        lines.add_row(
            r.gpu, text, r.kernel, str(r.Nq), str(r.Nk), f"{r.evidence.time_ms:.3f}", f"{r.evidence.tflops:.1f}",
            state, r.evidence.by, tile_text(r.tile),
        )  # fmt: skip
    if kind == "measured":
        return print_lines(lines)
    gpus = (find_gpu(name) for name in dict.fromkeys(entry.record.gpu for entry in entries) if name in GPUS)
    unknown = (never_compared(gpu) for gpu in gpus if error_of(gpu) is None)
    return print_lines(lines, how_sure(margin=True), *dict.fromkeys(unknown))
