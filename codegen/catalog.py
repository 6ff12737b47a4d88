"""List the tuned records that there are, and say which of them serve: folders -> Entries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .load import why_stale
from .lookup import why_refused
from .spec.gpu import GPUS
from .spec.kernel import TILE_OF
from .spec.record import Record, read_records, record_path

State = Literal["serves", "hidden", "stale"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A record, where it lies, and what a load of its own lengths makes of it."""

    record: Record
    path: Path
    state: State
    why: str  # it does not serve; "" if it does


def catalog(folders: Sequence[Path], gpus: Iterable[str] = tuple(GPUS)) -> tuple[Entry, ...]:
    """Every record of the GPUs named, sorted by GPU, kernel, problem and lengths; then in the order of `folders`.

    As in a load, earlier folders go before later ones, and of one file the first record of some lengths, whatever its
    batch and heads: the others are hidden. A record that no load takes, stale or in the wrong file, hides none.
    """
    entries: list[Entry] = []
    serving: dict[tuple[object, ...], Path] = {}
    for name in gpus:
        for path in (record_path(folder, name) for folder in folders):
            for record in read_records(path):
                refused = why_refused(record, name, GPUS[name], why_stale)
                hider = serving.get(_lengths(record))
                if refused:
                    entries.append(Entry(record=record, path=path, state="stale", why=refused))
                elif hider:
                    entries.append(Entry(record=record, path=path, state="hidden", why=f"by one in {hider}"))
                else:
                    serving[_lengths(record)] = path
                    entries.append(Entry(record=record, path=path, state="serves", why=""))
    return tuple(sorted(entries, key=_order))


def _lengths(record: Record) -> tuple[object, ...]:
    """What a load asks for."""
    return (record.gpu, record.kernel, record.text, record.Nq, record.Nk)


def _order(entry: Entry) -> tuple[object, ...]:
    r = entry.record
    gpu = list(GPUS).index(r.gpu) if r.gpu in GPUS else len(GPUS)
    return (gpu, list(TILE_OF).index(r.kernel), r.dtype, r.d, r.causal, r.text, r.Nq, r.Nk)
