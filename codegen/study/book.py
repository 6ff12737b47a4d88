"""Read a study: its trials in order -> what became of each tile, and what is still to do.

Nobody grants a tile. A worker writes a trial of it and then reads all trials: the first live trial of a tile holds it,
and all workers see the trials in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from ..objective import Candidate
from ..propose import Known
from ..spec.tile import Tile

RETRIES = 1  # of a tile whose worker died

Fate = Literal["running", "done", "lost", "stopped"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One trial."""

    trial: int  # the storage's own number of it
    tile: Tile
    fate: Fate  # lost: its worker died; stopped: its worker gave it back
    limit: int  # tiles that its worker was asked for
    candidate: Candidate | None = None  # if done
    reason: str = ""  # if lost


@dataclass(slots=True)
class Slot:
    """A tile and its trials, first to last."""

    tile: Tile
    entries: list[Entry] = field(default_factory=list)

    @property
    def candidate(self) -> Candidate | None:
        """What became of the tile, once that is known. It has failed if its worker died and so did the next one."""
        for entry in self.entries:
            if entry.candidate is not None:
                return entry.candidate
        lost = [entry for entry in self.entries if entry.fate == "lost"]
        return Candidate(self.tile, None, lost[-1].reason) if len(lost) > RETRIES else None

    @property
    def holder(self) -> int | None:
        """The trial that may go on; None if none runs or none is needed."""
        if self.candidate is not None:
            return None
        return next((entry.trial for entry in self.entries if entry.fate == "running"), None)


class Book:
    """Every tile of a study, in the order in which they were first tried."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._slots: dict[Tile, Slot] = {}
        for entry in entries:
            self._slots.setdefault(entry.tile, Slot(entry.tile)).entries.append(entry)

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, tile: Tile) -> bool:
        return tile in self._slots

    @property
    def candidates(self) -> list[Candidate]:
        """The tiles that are finished."""
        return [c for slot in self._slots.values() if (c := slot.candidate) is not None]

    @property
    def known(self) -> list[Known]:
        """The same as a proposer takes them."""
        return [Known(c.tile, None if c.time is None else c.time.seconds) for c in self.candidates]

    @property
    def running(self) -> list[Tile]:
        """The tiles that are not finished: tried now, or to be tried again."""
        return [slot.tile for slot in self._slots.values() if slot.candidate is None]

    def abandoned(self, limit: int) -> Tile | None:
        """The first tile among `limit` that nobody works on and that is not finished."""
        for slot in self._first(limit):
            if slot.candidate is None and slot.holder is None:
                return slot.tile
        return None

    def holds(self, tile: Tile, trial: int, limit: int) -> bool:
        """Whether that trial is the one that may try the tile, and the tile is one of the first `limit`."""
        return any(slot.tile == tile and slot.holder == trial for slot in self._first(limit))

    def settled(self, limit: int) -> bool:
        """Whether `limit` tiles need nobody any more. A trial too many, which is about to yield, is waited for."""
        if any(slot.candidate is None for slot in self._first(limit)):
            return False
        entries = (entry for slot in self._slots.values() for entry in slot.entries)
        return not any(entry.fate == "running" and entry.limit <= limit for entry in entries)

    def _first(self, limit: int) -> list[Slot]:
        return list(self._slots.values())[:limit]
