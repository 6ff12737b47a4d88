"""What race detectors share: granules of shared memory, and a log that counts races and keeps a few of each pair."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .report import Race

if TYPE_CHECKING:
    from .batch import Batch

Array: TypeAlias = "NDArray[Any]"

_STORED = 48
_STORED_OF_A_PAIR = 4  # so that one race does not crowd out the others


class RaceLog:
    """Races of a launch."""

    def __init__(self) -> None:
        self.races: list[Race] = []
        self.count = 0

    def add(self, batch: Batch, kind: str, offset: Array, before: Array, first: Array, second: Array, at: int) -> None:
        """Races of instruction `at` at offsets into the shared memory of the batch.

        `before` are the earlier instructions, `first` and `second` the warps in their block of both accesses.
        """
        self.count += offset.size
        instructions = batch.program.instructions
        now = str(instructions[at])
        rows = zip(offset.tolist(), before.tolist(), first.tolist(), second.tolist(), strict=True)
        for place, index, early, late in rows:
            if len(self.races) >= _STORED:
                return
            then = str(instructions[index])
            if (
                sum((race.kind, race.first, race.second) == (kind, then, now) for race in self.races)
                < _STORED_OF_A_PAIR
            ):
                block, address = divmod(place, batch.shared_stride)
                x, y, z = (int(v) for v in batch.block_ids[block])
                self.races.append(Race(kind, address, (x, y, z), then, now, (early, late)))


class Detector:
    """What detectors have in common: shared memory cut into granules, and a log."""

    def __init__(self, granule: int) -> None:
        self.granule = granule
        self.log = RaceLog()

    def _granules(self, offset: Array, size: int, threads: Array) -> tuple[Array, Array]:
        """Granules touched, and the warp (number in the batch) that touches each."""
        first, warp = offset // self.granule, threads >> 5
        parts = size // self.granule
        if parts <= 1:
            return first, warp
        return (first[:, None] + np.arange(parts)).reshape(-1), np.repeat(warp, parts)


def overruled(where: Array, lost: Array, pieces: Array) -> Array:
    """Which of the lost writes of one instruction wanted another value than the last write to the same granule."""
    order = np.argsort(where, kind="stable")
    winner = order[np.searchsorted(where[order], where[lost], "right") - 1]
    wrong: Array = lost[(pieces[winner] != pieces[lost]).any(1)]
    return wrong
