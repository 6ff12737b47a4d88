"""Draw a bench: TFLOP/s against N, a panel a pass; measured lines solid, predicted ones dashed and named so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..bench import OURS, Row, series
from ..errors import UsageError
from ..spec.gpu import Gpu

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg")


def check_plot(path: Path) -> None:
    """Raise UsageError, before anything is timed, for a file that is no PNG or SVG, or without matplotlib."""
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"--plot {path}: the name must end in {' or '.join(FORMATS)}.")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: {path.parent} is no folder.")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(f"--plot needs matplotlib: pip install 'flashsmith[plot]' ({error}).") from error


def draw(rows: Sequence[Row], gpu: Gpu, path: Path) -> None:
    """Write the plot. Each line is one backend and one kind of evidence. Raises UsageError if it cannot be written."""
    from matplotlib.figure import Figure  # no pyplot: nothing global, no display

    passes = tuple(dict.fromkeys(row.which for row in rows))
    figure = Figure(figsize=(6 * len(passes), 4.5), layout="constrained")
    for panel, which in zip(figure.subplots(1, len(passes), squeeze=False)[0], passes, strict=True):
        for (backend, evidence), points in series(row for row in rows if row.which == which).items():
            ours, predicted = backend == OURS, evidence == "predicted"
            panel.plot(
                [n for n, _ in points], [tflops for _, tflops in points], marker="o",
                linestyle="--" if predicted else "-", linewidth=2.5 if ours else 1.2, label=f"{backend}, {evidence}",
            )  # fmt: skip
        ticks = sorted({row.n for row in rows})
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [str(n) for n in ticks])
        panel.set(title=which, xlabel="N", ylabel="TFLOP/s", ylim=(0, None))
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    first = rows[0]
    figure.suptitle(f"{gpu.name}, {first.dtype} d={first.d}{' causal' if first.causal else ''}, 16k tokens")
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write a figure to its file. Raises UsageError if it cannot be written."""
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UsageError(f"--plot {path}: {error.strerror}") from error
