"""Lay results out for people: tables, highlighted code, a progress bar."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.syntax import Syntax

from ..spec.gpu import Gpu
from ..spec.limits import why_no_dtype
from ..spec.problem import Problem
from ..spec.tile import tile_text
from .console import print_lines as _print
from .console import table as _table
from .show_predict import how_sure

if TYPE_CHECKING:
    from ..check import Verdict
    from ..objective import Candidate
    from ..tune import Tuned


def code(text: str, language: str) -> None:
    """Text to stdout, highlighted when that is a terminal, byte for byte when it is not."""
    if sys.stdout.isatty():
        Console().print(Syntax(text, language, background_color="default"))
    else:
        sys.stdout.write(text)


def difference(old: str, new: str, old_name: str, new_name: str) -> str:
    """A unified diff."""
    lines = difflib.unified_diff(old.splitlines(True), new.splitlines(True), old_name, new_name)
    return "".join(lines)


def gpus(known: Iterable[Gpu], present: Gpu | None) -> None:
    """One line a GPU."""
    numbers = ("sm", "SMs", "GHz", "TFLOP/s", "GB/s", "GB", "KB/block")
    table = _table("gpu", "name", *numbers, "", right=numbers)
    for gpu in known:
        note = "present" if gpu is present else "" if why_no_dtype("bf16", gpu) is None else "fp16 only"
        table.add_row(
            gpu.key, gpu.name, str(gpu.sm), str(gpu.sms), f"{gpu.clock_ghz:.2f}", f"{gpu.peak_tflops:.0f}",
            f"{gpu.hbm_gbs:.0f}", str(gpu.memory_gb), str(gpu.smem_block_bytes // 1024), note,
        )  # fmt: skip
    _print(table, "TFLOP/s: nominal peak of mma.sync, 16-bit inputs, fp32 accumulation.")


def facts(values: dict[str, Any]) -> None:
    """Name and value, a line each."""
    table = _table("", "")
    table.show_header = False
    for name, value in values.items():
        table.add_row(name, ", ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value))
    _print(table)


def verdict(result: Verdict) -> None:
    """Each tensor's error beside that of plain attention and the bound."""
    p = result.problem
    lengths = f"B={p.B} heads {p.Hq} over {p.kv_heads}, Nq={p.Nq} Nk={p.keys}"
    table = _table("tensor", "largest error", f"plain {p.dtype}", "allowed", "", right=("largest error", "allowed"))
    for line in result.lines:
        mark = "ok" if line.ok else "WRONG"
        table.add_row(line.tensor, f"{line.error:.2e}", f"{line.plain:.2e}", f"{line.bound:.2e}", mark)
    _print(f"{result.which} {p.text}, {lengths}, on the {result.engine}", *result.kernels, table)
    _print(*(f"race: {race}" for race in result.races), "ok" if result.ok else f"WRONG: {result.reason}")


def tuned(results: Sequence[Tuned], problem: Problem, gpu: Gpu) -> None:
    """Each winner beside the default, where the record went, and how to see the kernel."""
    kind = results[0].record.evidence.kind
    numbers = (f"{kind} ms", "TFLOP/s", "default ms", "tried")
    table = _table("kernel", "tile", *numbers, right=numbers)
    for result in results:
        winner = result.winner
        default = f"{winner.default.seconds * 1e3:.3f}" if winner.default else ""
        table.add_row(
            winner.spec.kernel, tile_text(winner.spec.tile), f"{winner.time.seconds * 1e3:.3f}",
            f"{winner.time.tflops:.1f}", default, str(len(winner.candidates)),
        )  # fmt: skip
    _print(table, *(f"rejected: {reason}" for result in results for reason in result.winner.rejected))
    _print(*map(_study, results), *([how_sure(gpu, margin=True)] if kind == "predicted" else []))
    options = f"--gpu {gpu.key} {problem.options}"
    written = dict.fromkeys(str(result.path) for result in results if not result.unchanged)
    _print(
        *(f"recorded in {path}" for path in written),
        f"read it: flashsmith render {results[0].winner.spec.kernel} {options}",
    )


def _study(result: Tuned) -> str:
    """What the search found in its study, and what it added."""
    winner, count = result.winner, len(result.winner.candidates)
    told = f"{winner.spec.kernel}: the study {winner.study} holds"
    record = "; record unchanged" if result.unchanged else ""
    saved = f"; the model saved the GPU {winner.saved} of them" if winner.saved else ""
    if winner.reused == count:
        return f"{told} all {count} trials; nothing to do{record}{saved}"
    return f"{told} {count} trials, {winner.reused} of them reused{saved}{record}"


class Progress:
    """A bar on stderr: candidates tried, and the best so far."""

    def __init__(self, title: str, trials: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        words = TextColumn("{task.description}", markup=False)  # a formula has brackets
        columns = (words, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Bar(*columns, TextColumn("{task.fields[best]}"), console=Console(stderr=True))
        self._task = self._bar.add_task(title, total=trials, best="")
        self._best = math.inf
        self.count = 0

    def candidate(self, candidate: Candidate) -> None:
        """One more was tried."""
        self.count += 1
        time = candidate.time
        if time and time.seconds < self._best:
            self._best = time.seconds
            best = f"{time.kind} {self._best * 1e3:.3f} ms, {time.tflops:.0f} TFLOP/s"
            self._bar.update(self._task, best=best)
        self._bar.advance(self._task)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # a space smaller than the trials ends early, and full
            self._bar.update(self._task, total=max(1, int(self._bar.tasks[0].completed)))
        self._bar.stop()
