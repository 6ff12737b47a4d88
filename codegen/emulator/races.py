"""Find accesses to the same shared bytes by different warps that no barrier orders.

Lock-step execution hides a missing barrier: the numbers come out right. So each warp carries a vector clock, barriers
join the clocks of those who meet there, and each granule of shared memory remembers its last write and two last reads
(by different warps). An access races with an earlier one that its warp's clock does not cover.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .errors import Uninitialised
from .report import Race

if TYPE_CHECKING:
    from .batch import Batch

Array = NDArray[Any]

STORED = 48


class _Access:
    """For each granule: clock (0 = none), warp and instruction of an access."""

    def __init__(self, granules: int) -> None:
        self.clock = np.zeros(granules, "i4")
        self.warp = np.zeros(granules, "i4")
        self.at = np.zeros(granules, "i4")

    def set(self, where: Array, clock: Array, warp: Array, at: int) -> None:
        """Remember accesses; of several to one granule the last lane's stays."""
        self.clock[where] = clock
        self.warp[where] = warp
        self.at[where] = at


class RaceDetector:
    """Happens-before between the warps of each block of a batch."""

    def __init__(self, granule: int) -> None:
        self.granule = granule
        self.races: list[Race] = []
        self.count = 0
        self._batch: Batch | None = None

    def start(self, batch: Batch) -> None:
        """Forget everything: a batch begins with new blocks."""
        self._batch = batch
        granules = batch.shared.size // self.granule
        warps = batch.blocks * batch.warps_per_block
        self._write, self._read, self._other_read = _Access(granules), _Access(granules), _Access(granules)
        self._written = np.zeros(granules, bool)
        # clock[w, v]: what warp w knows of the clock of warp v of its block; its own starts at 1
        self._clock = np.zeros((warps, batch.warps_per_block), "i4")
        self._clock[np.arange(warps), np.arange(warps) % batch.warps_per_block] = 1

    def access(self, offset: Array, size: int, threads: Array, at: int, write: bool) -> None:
        """Check and remember a read or a write of `size` bytes by each thread."""
        where, warp = self._granules(offset, size, threads)
        if write:
            self._check(self._write, "WAW", where, warp, at)
            self._check(self._read, "WAR", where, warp, at)
            self._check(self._other_read, "WAR", where, warp, at)
            self._note_write(where, warp, at, True)
            return
        if not self._written[where].all():
            self._uninitialised(where, threads, at)
        self._check(self._write, "RAW", where, warp, at)
        own = self._own_clock(warp)
        second = (self._read.clock[where] > 0) & (self._read.warp[where] != warp)
        # the first reader's place goes to a reader of the same warp or to whoever finds it empty
        self._other_read.set(where[second], own[second], warp[second], at)
        first = ~second
        self._read.set(where[first], own[first], warp[first], at)
        lost = first & (self._read.warp[where] != warp)
        if lost.any():
            self._other_read.set(where[lost], own[lost], warp[lost], at)

    def landed(self, offset: Array, size: int, threads: Array, at: int) -> None:
        """The data of asynchronous copies is there: readers must be ordered after this wait."""
        where, warp = self._granules(offset, size, threads)
        self._note_write(where, warp, at, False)

    def barrier(self, warps: Array, waiting: Array) -> None:
        """Warps (numbers in the batch) of one block meet; those that wait learn what all of them know."""
        known = self._clock[warps].max(0)
        self._clock[waiting] = np.maximum(self._clock[waiting], known)
        self._tick(warps)

    def barrier_all(self, low: int, high: int) -> None:
        """All warps low .. high, whole blocks, meet block by block."""
        assert self._batch is not None
        per_block = self._batch.warps_per_block
        clocks = self._clock[low:high].reshape(-1, per_block, per_block)
        clocks[:] = clocks.max(1, keepdims=True)
        self._tick(np.arange(low, high))

    def _tick(self, warps: Array) -> None:
        assert self._batch is not None
        self._clock[warps, warps % self._batch.warps_per_block] += 1

    def _own_clock(self, warp: Array) -> Array:
        assert self._batch is not None
        return self._clock[warp, warp % self._batch.warps_per_block]

    def _granules(self, offset: Array, size: int, threads: Array) -> tuple[Array, Array]:
        parts = max(size // self.granule, 1)
        where = (offset // self.granule)[:, None] + np.arange(parts)
        return where.reshape(-1), np.repeat(threads >> 5, parts)

    def _note_write(self, where: Array, warp: Array, at: int, check: bool) -> None:
        self._write.set(where, self._own_clock(warp), warp, at)
        self._written[where] = True
        self._read.clock[where] = 0
        self._other_read.clock[where] = 0
        if check:
            # another warp wrote the same granule in this very instruction
            lost = np.flatnonzero(self._write.warp[where] != warp)
            if lost.size:
                self._report("WAW", where[lost], warp[lost], self._write, at)

    def _check(self, earlier: _Access, kind: str, where: Array, warp: Array, at: int) -> None:
        assert self._batch is not None
        other = earlier.warp[where]
        unordered = earlier.clock[where] > self._clock[warp, other % self._batch.warps_per_block]
        unordered &= other != warp
        unordered &= earlier.clock[where] > 0
        if unordered.any():
            bad = np.flatnonzero(unordered)
            self._report(kind, where[bad], warp[bad], earlier, at)

    def _report(self, kind: str, where: Array, warp: Array, earlier: _Access, at: int) -> None:
        batch = self._batch
        assert batch is not None
        self.count += where.size
        text = batch.program.instructions
        for k in range(where.size):
            if len(self.races) >= STORED:
                return
            granule = int(where[k])
            block, address = divmod(granule * self.granule, batch.shared_stride)
            x, y, z = (int(v) for v in batch.block_ids[block])
            per_block = batch.warps_per_block
            race = Race(
                kind=kind,
                address=address,
                block=(x, y, z),
                first=str(text[int(earlier.at[granule])]),
                second=str(text[at]),
                warps=(int(earlier.warp[granule]) % per_block, int(warp[k]) % per_block),
            )
            same = [r for r in self.races if (r.kind, r.first, r.second) == (race.kind, race.first, race.second)]
            if len(same) < 4:  # a few of each pair of instructions, so that one race does not hide the others
                self.races.append(race)

    def _uninitialised(self, where: Array, threads: Array, at: int) -> None:
        batch = self._batch
        assert batch is not None
        bad = int(np.flatnonzero(~self._written[where])[0])
        thread = int(threads[bad // (where.size // threads.size)])
        address = int(where[bad]) * self.granule % batch.shared_stride
        raise Uninitialised(
            f"{batch.program.instructions[at]}\n  {batch.describe_thread(thread)}: "
            f"reads shared address {address:#x}, which nobody has written"
        )
