"""Tune a pass for a GPU: search each of its kernels, check the winners on the emulator, write their records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from .choose import Winner, choose
from .compile import version_text
from .engines.emulated import EmulatedEngine
from .errors import NothingFound, UsageError
from .load import source_sha256
from .measure import Timing
from .measuring.contention import device_identity, device_lock
from .measuring.process import Measurer
from .measuring.trial import on_device
from .objective import Candidate, Measured, build
from .spec.gpu import Gpu
from .spec.kernel import KernelName, KernelSpec
from .spec.problem import Pass, Problem
from .spec.record import Evidence, Record, check_writable, read_records, record_path, write_record
from .spec.tile import Tile
from .verify import why_wrong

By = Literal["auto", "measured", "predicted"]

TUNED: dict[Pass, tuple[KernelName, ...]] = {"forward": ("forward",), "backward": ("fused", "dkdv", "dq")}


@dataclass(frozen=True, slots=True)
class Tuned:
    """One kernel's search and the record that it left."""

    winner: Winner
    record: Record
    path: Path


def tune_kernel(
    kernel: KernelName,
    problem: Problem,
    gpu: Gpu,
    folder: Path,
    *,
    trials: int,
    seed: int = 0,
    by: By = "auto",
    progress: Callable[[Candidate], None] = lambda candidate: None,
) -> Tuned:
    """Search the tiles of one kernel and record the winner, once the emulator finds it right.

    By measured time if `gpu` is present, else by predicted time, unless `by` says which. Raises UsageError before any
    work if `folder` cannot be written, or if it holds a measured record that a predicted one would replace;
    NothingFound if no candidate is valid; MeasuringBroken.
    """
    check_writable(folder)
    device = device_for(gpu, by)

    def verify(spec: KernelSpec) -> str:
        return why_wrong(build(spec), problem, gpu, partial(EmulatedEngine, check_races=True))

    search = partial(choose, kernel, problem, gpu, seed=seed, verify=verify, progress=progress)
    if device is None:
        _refuse_to_replace(folder, kernel, problem, gpu)
        winner = search(trials=trials)
    else:
        with ExitStack() as held:
            held.enter_context(device_lock(device_identity(device)))
            first = predicted_order(kernel, problem, gpu, trials=trials // 2, seed=seed)
            measurer = held.enter_context(Measurer(partial(on_device, kernel, problem, gpu, device)))
            winner = search(trials=trials, first=first, objective=partial(Measured, kernel, problem, gpu, measurer))
    record = record_of(winner, problem, gpu)
    return Tuned(winner, record, write_record(folder, record))


def device_for(gpu: Gpu, by: By) -> int | None:
    """The index of the present device that is a `gpu`; None if times are to be predicted.

    Raises UsageError if they must be measured and cannot be.
    """
    if by == "predicted":
        return None
    from .engines.driver import find_device, why_no_cuda

    index = find_device(gpu)
    reason = f"no {gpu.key} is here to measure on." if index is None else why_no_cuda()
    if reason and by == "measured":
        raise UsageError(f"{reason} Without --times measured, times are predicted.")
    return None if reason else index


def predicted_order(
    kernel: KernelName, problem: Problem, gpu: Gpu, *, trials: int, seed: int, count: int = 8
) -> Sequence[Tile]:
    """The tiles that the model would try first. It orders them and no more: its times stay in its own search."""
    if trials < 1:
        return ()
    try:
        winner = choose(kernel, problem, gpu, trials=trials, seed=seed)
    except NothingFound:
        return ()
    timed = [(c.time.seconds, n, c.tile) for n, c in enumerate(winner.candidates) if c.time is not None]
    return [tile for _, _, tile in sorted(timed)[:count]]


def _refuse_to_replace(folder: Path, kernel: KernelName, problem: Problem, gpu: Gpu) -> None:
    """A predicted time says less than a measured one of the same text."""
    path = record_path(folder, gpu.key)
    asked = (kernel, problem.dtype, problem.d, problem.causal, problem.Nq, problem.keys)
    for record in read_records(path):
        at = (record.kernel, record.dtype, record.d, record.causal, record.Nq, record.Nk)
        shape = (record.B, record.Hq, record.Hk) == (problem.B, problem.Hq, problem.kv_heads)
        fresh = record.evidence.kind == "measured" and source_sha256(record.spec) == record.source_sha256
        if at == asked and shape and fresh:
            raise UsageError(
                f"{path} holds a measured record for this ({record.evidence.by}); a predicted one does not replace it. "
                "Name another folder with --out."
            )


def record_of(winner: Winner, problem: Problem, gpu: Gpu) -> Record:
    """What is kept of a search."""
    spec, time = winner.spec, winner.time
    return Record(
        gpu=gpu.key, sm=gpu.sm, kernel=spec.kernel, dtype=spec.dtype, d=spec.d, causal=spec.causal,
        B=problem.B, Hq=problem.Hq, Hk=problem.kv_heads, Nq=problem.Nq, Nk=problem.keys, tile=spec.tile,
        evidence=Evidence(
            kind=time.kind, time_ms=round(time.seconds * 1e3, 5),
            tflops=round(time.tflops, 1), spread=round(time.spread, 3), by=time.by, trials=len(winner.candidates),
            samples=time.samples if isinstance(time, Timing) else 0,
        ),
        source_sha256=source_sha256(spec), nvrtc=version_text(),
    )  # fmt: skip
