"""Collect races for the report: all are counted, and a few of each pair of instructions are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

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
