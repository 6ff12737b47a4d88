"""Draw a search: the best time so far against the trials."""

from __future__ import annotations

from pathlib import Path

from ..spec.gpu import GPUS
from ..spec.record import Record
from ..spec.search import Search
from .plot import save


def draw_search(record: Record, search: Search, path: Path) -> None:
    """Write the plot: a step down at each improvement, and the default tile's time. Raises UsageError as save does."""
    from matplotlib.figure import Figure  # no pyplot: nothing global, no display

    kind = record.evidence.kind
    points = [*search.curve, (record.evidence.trials, search.curve[-1][1])]
    figure = Figure(figsize=(6, 4), layout="constrained")
    panel = figure.subplots()
    panel.step(*zip(*points, strict=True), where="post", marker="o", markevery=range(len(search.curve)), label="best")
    if search.default:
        panel.axhline(search.default.time_ms, linestyle=":", color="gray", label="default tile")
    panel.set(xlabel="trial", ylabel=f"{kind} ms")
    panel.locator_params(axis="x", integer=True)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
    mask = " causal" if record.causal else ""
    name = GPUS[record.gpu].name if record.gpu in GPUS else record.gpu
    figure.suptitle(f"{name}, {record.kernel} {record.dtype} d={record.d}{mask}, Nq={record.Nq}, Nk={record.Nk}")
    save(figure, path)
