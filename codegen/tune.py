"""Tune a pass for a GPU: search each of its kernels, check the winners on the emulator, write their records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from .choose import Winner
from .compile import version_text
from .engines.emulated import EmulatedEngine
from .errors import UsageError
from .fleet import Job, search_measured, search_predicted
from .forms import FORMS, of_other_widths, timed_kernels
from .load import source_sha256
from .measure import Timing
from .objective import Candidate, Time, build
from .spec.defaults import default_tile
from .spec.gpu import Gpu
from .spec.kernel import HOPPER, KernelName, KernelSpec
from .spec.problem import Pass, Problem
from .spec.record import Evidence, Record, check_writable, read_records, record_path, write_record
from .spec.search import Search, TimedTile
from .spec.tile import Tile
from .verify import why_wrong

By = Literal["auto", "measured", "predicted"]


def tuned_kernels(which: Pass, problem: Problem, gpu: Gpu) -> tuple[KernelName, ...]:
    """The kernels of a pass that are searched on `gpu`: those of its forms that have records and serve the width."""
    every = (kernel for form in FORMS[which] for kernel in timed_kernels(form))
    fitting = (kernel for kernel in every if not of_other_widths(kernel, problem))
    return tuple(dict.fromkeys(kernel for kernel in fitting if kernel not in HOPPER or gpu.sm == 90))


@dataclass(frozen=True, slots=True)
class Tuned:
    """One kernel's search and the record that it left."""

    winner: Winner
    record: Record
    path: Path
    unchanged: bool = False  # the record was there already


def tune_kernel(
    kernel: KernelName,
    problem: Problem,
    gpu: Gpu,
    folder: Path,
    *,
    trials: int,
    seed: int = 0,
    by: By = "auto",
    storage: str | None = None,
    workers: int = 1,
    progress: Callable[[Candidate], None] = lambda candidate: None,
) -> Tuned:
    """Search the tiles of one kernel and record the winner, once the emulator finds it right.

    By measured time if `gpu` is present, else by predicted time, unless `by` says which. What the study in `storage`
    knows is not tried again; without a storage the search leaves nothing but its record. `workers` processes share the
    work. Raises UsageError before any work if `folder` cannot be written, if it holds a measured record that a
    predicted one would replace, or if `storage` cannot be opened; NothingFound if no candidate is valid;
    MeasuringBroken; StorageLost.
    """
    check_writable(folder)
    job = Job(kernel=kernel, problem=problem, gpu=gpu, trials=trials, seed=seed, storage=storage, workers=workers)
    devices = devices_for(gpu, by)

    def verify(spec: KernelSpec) -> str:
        if _verified(folder, job, spec):
            return ""
        return why_wrong(build(spec), problem, gpu, partial(EmulatedEngine, check_races=True))

    if devices:
        winner = search_measured(job, devices, verify=verify, progress=progress)
    else:
        _refuse_to_replace(folder, kernel, problem, gpu)
        winner = search_predicted(job, verify=verify, progress=progress)
    record, path = record_of(winner, problem, gpu, seed=seed), record_path(folder, gpu.key)
    unchanged = record in read_records(path)
    return Tuned(winner, record, path if unchanged else write_record(folder, record), unchanged)


def devices_for(gpu: Gpu, by: By) -> Sequence[int]:
    """The indices of the present devices that are a `gpu`; none if times are to be predicted.

    Raises UsageError if they must be measured and cannot be.
    """
    if by == "predicted":
        return ()
    from .engines.driver import find_devices, why_no_cuda

    indices = find_devices(gpu)
    reason = why_no_cuda() if indices else f"no {gpu.key} is here to measure on."
    if reason and by == "measured":
        raise UsageError(f"{reason} Without --times measured, times are predicted.")
    return () if reason else indices


def _verified(folder: Path, job: Job, spec: KernelSpec) -> bool:
    """Whether a record says of this very text that it passed the check."""
    return any(
        record.spec == spec and record.source_sha256 == source_sha256(spec) and record.nvrtc == version_text()
        for record in read_records(record_path(folder, job.gpu.key))
    )


def _refuse_to_replace(folder: Path, kernel: KernelName, problem: Problem, gpu: Gpu) -> None:
    """A predicted time says less than a measured one of the same text."""
    path = record_path(folder, gpu.key)
    asked = (kernel, problem.Nq, problem.keys)
    for record in read_records(path):
        at = (record.kernel, record.Nq, record.Nk)
        shape = (record.B, record.Hq, record.Hk) == (problem.B, problem.Hq, problem.kv_heads)
        fresh = record.evidence.kind == "measured" and source_sha256(record.spec) == record.source_sha256
        if at == asked and record.serves_text_of(problem) and shape and fresh:
            raise UsageError(
                f"{path} holds a measured record for this ({record.evidence.by}); a predicted one does not replace it. "
                "Name another folder with --out."
            )


def record_of(winner: Winner, problem: Problem, gpu: Gpu, *, seed: int) -> Record:
    """What is kept of a search."""
    spec, time = winner.spec, winner.time
    wrong = {text.partition(": ")[0] for text in winner.rejected}  # keys: fast, and no answer

    def valid(tile: Tile, time: Time | None) -> float | None:
        return None if time is None or replace(spec, tile=tile).key in wrong else _ms(time)

    tile = default_tile(spec.kernel, problem, gpu)
    ms = valid(tile, winner.default)
    default = None if ms is None else TimedTile(tile=tile, time_ms=ms)
    tried = [(c.tile, valid(c.tile, c.time)) for c in winner.candidates]
    return Record(
        gpu=gpu.key, sm=gpu.sm, kernel=spec.kernel, dtype=spec.dtype, d=spec.d, causal=spec.causal,
        dv=0 if spec.dv == spec.d else spec.dv, features=spec.features,
        B=problem.B, Hq=problem.Hq, Hk=problem.kv_heads, Nq=problem.Nq, Nk=problem.keys, tile=spec.tile,
        evidence=Evidence(
            kind=time.kind, time_ms=_ms(time), tflops=round(time.tflops, 1), spread=round(time.spread, 3), by=time.by,
            trials=len(winner.candidates), samples=time.samples if isinstance(time, Timing) else 0,
        ),
        source_sha256=source_sha256(spec), nvrtc=version_text(),
        search=Search.of(tried, spec.tile, default, seed=seed, pruned=winner.saved),
    )  # fmt: skip


def _ms(time: Time) -> float:
    return round(time.seconds * 1e3, 5)
