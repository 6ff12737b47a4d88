"""Look a kernel up in the tuned records: rung by rung, with a reason for each record that is passed over."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from .errors import LowerRung, StaleRecord
from .spec.feature_shape import why_not_cheap
from .spec.forward_defaults import SHORT, short_forward
from .spec.gpu import GPUS, Gpu
from .spec.kernel import KernelName, KernelSpec
from .spec.limits import why_illegal
from .spec.problem import Problem
from .spec.record import Record, read_records, record_path
from .spec.tile import ForwardTile

Rung = Literal["record", "near length", "same class", "without features", "default"]
WhyStale = Callable[[Record], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One file that was looked into, and what came of it."""

    rung: Rung
    path: Path
    record: Record | None
    why: str  # this record, or none

    @property
    def found(self) -> str:
        """The file and the lengths of the record."""
        return f"{self.path}, Nq={self.record.Nq}, Nk={self.record.Nk}" if self.record else f"{self.path}: {self.why}"


def steps(
    problem: Problem, kernel: KernelName, target: Gpu, folders: Sequence[Path], why_stale: WhyStale
) -> Iterator[Step]:
    """The files of each rung in order, read when they are reached.

    Of the same GPU a record of these lengths, then of the nearest; then of GPUs of the same sm, shared memory and rate.
    For features that take few registers, the same again for the problem without them.
    A record that is stale or of another part is passed over with one warning that names the field.
    """
    own: list[tuple[Rung, str]] = [("record", target.key), ("near length", target.key)]
    of_class: list[tuple[Rung, str]] = [("same class", name) for name in _same_class(target)]
    for rung, name in (*own, *of_class):
        for path in (record_path(folder, name) for folder in folders):
            yield _look(rung, path, name, problem, kernel, target, why_stale)
    if problem.features.plain:
        return
    for name in (target.key, *_same_class(target)):
        for path in (record_path(folder, name) for folder in folders):
            step = _look("without features", path, name, problem.plain, kernel, target, why_stale)
            yield _with_features(step, problem, target)


def _with_features(step: Step, problem: Problem, target: Gpu) -> Step:
    """The step, unless its tile does not go with the features of `problem`, or may spill with them."""
    if step.record is None:
        return step
    spec = KernelSpec.of(step.record.kernel, problem, step.record.tile, target.sm)
    why = why_illegal(spec, target)
    if why is None and why_not_cheap(spec.features):
        why = f"{why_not_cheap(spec.features)} takes registers that its tile may not have"
    return step if why is None else replace(step, record=None, why=f"{step.found}: {why}")


def fitting(
    problem: Problem, kernel: KernelName, target: Gpu, folders: Sequence[Path], why_stale: WhyStale
) -> Iterator[Record]:
    """Every record that may serve `problem`: of the same GPU, then of its class, in the order of `folders`."""
    for name in (target.key, *_same_class(target)):
        for path in (record_path(folder, name) for folder in folders):
            records, _ = _sorted_out(path, name, problem, kernel, target, why_stale)
            yield from records


def why_refused(record: Record, name: str, target: Gpu, why_stale: WhyStale) -> str | None:
    """Why a record in the file of GPU `name` cannot serve `target`; None if it can."""
    if record.gpu != name:
        return f"gpu is {record.gpu}, in a file of {name}"
    if record.sm != target.sm:
        return f"sm is {record.sm}, and {target.key} has {target.sm}"
    illegal = why_illegal(record.spec, target)
    return f"tile is not legal: {illegal}" if illegal else why_stale(record)


def why_unfit(record: Record, problem: Problem, target: Gpu) -> str | None:
    """Why a tile that was found for other lengths cannot be near these; None if it can be.

    Up to SHORT query rows, how many there are decides the rows of a forward's block, and above it they are many.
    """
    tile = record.tile
    if not isinstance(tile, ForwardTile):
        return None
    if tile.packed and problem.Hq == problem.kv_heads:
        return "packed=1 packs the query heads of a key/value head, and here it has one"
    short, recorded = short_forward(problem, target), f"the record of Nq={record.Nq}"
    if distance(record, problem) == 0 or (short is None and record.Nq > SHORT):
        return None
    if short is None:
        return f"{recorded} has a tile for at most {SHORT} query rows"
    if (tile.Br, tile.packed) == (short.Br, short.packed):
        return None
    wanted = f"Br={short.Br}{', packed=1' if short.packed else ''}"
    return f"{recorded} has Br={tile.Br}, and for Nq={problem.Nq} rows are right in blocks of {wanted}"


def distance(record: Record, problem: Problem) -> float:
    """How far apart the lengths are, in powers of two; 0 if they are equal."""
    pairs = ((record.Nq, problem.Nq), (record.Nk, problem.keys))
    return sum(abs(math.log2(max(1, a) / max(1, b))) for a, b in pairs)


def warn_once(key: Hashable, message: str, category: type[Warning] = LowerRung) -> None:
    """One warning for each key in the life of the process, whichever thread comes first."""
    with _lock:
        if (category, key) in _warned:
            return
        _warned.add((category, key))
    warnings.warn(message, category, stacklevel=4)


_lock = threading.Lock()
_warned: set[tuple[type[Warning], Hashable]] = set()


def _look(
    rung: Rung, path: Path, name: str, problem: Problem, kernel: KernelName, target: Gpu, why_stale: WhyStale
) -> Step:
    records, refused = _sorted_out(path, name, problem, kernel, target, why_stale)
    best = min(records, key=lambda record: distance(record, problem), default=None)
    if best is not None and (rung != "record" or distance(best, problem) == 0):
        return Step(rung=rung, path=path, record=best, why=f"Nq={best.Nq}, Nk={best.Nk}")
    if best is not None:
        why = f"no record of these lengths; the nearest is Nq={best.Nq}, Nk={best.Nk}"
    elif refused:
        why = "; ".join(dict.fromkeys(refused))
    else:
        there = _records(path)
        why = f"{len(there)} records, none of {kernel} {problem.text}" if there else "no records"
    return Step(rung=rung, path=path, record=None, why=why)


def _sorted_out(
    path: Path, name: str, problem: Problem, kernel: KernelName, target: Gpu, why_stale: WhyStale
) -> tuple[list[Record], list[str]]:
    """The records of a file that may serve, and why the others of the same kernel and problem may not."""
    asked = (kernel, problem.dtype, problem.d, problem.ends)
    serving, refused = [], []
    for record in _records(path):
        if (record.kernel, record.dtype, record.d, record.causal) != asked or not record.serves_text_of(problem):
            continue
        reason = why_refused(record, name, target, why_stale)
        if reason is None:
            unfit = why_unfit(record, problem, target)
            if unfit is None:
                serving.append(record)
            else:
                refused.append(unfit)
            continue
        refused.append(reason)
        which = f"the record of {record.spec.key}, Nq={record.Nq}, Nk={record.Nk}"
        told = f"{path}: {which} is passed over: {reason.rstrip('.')}."
        warn_once((path, record, reason), told, StaleRecord)
    return serving, refused


def _records(path: Path) -> tuple[Record, ...]:
    """The records of a file: parsed, and its damage named, once for each state of the file."""
    try:
        state = path.stat()
    except OSError:
        return ()
    return _read(path, (state.st_mtime_ns, state.st_size, state.st_ino))


@lru_cache(maxsize=64)
def _read(path: Path, state: tuple[int, int, int]) -> tuple[Record, ...]:
    return read_records(path)


def _same_class(target: Gpu) -> list[str]:
    return [g.key for g in GPUS.values() if g.key != target.key and g.sm_class == target.sm_class]
