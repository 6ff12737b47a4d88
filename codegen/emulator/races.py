"""Find accesses to the same shared bytes by different warps that no barrier orders.

Lock-step execution hides a missing barrier: the numbers come out right. So each warp carries a vector clock, barriers
join the clocks of those who meet there, and each granule of shared memory remembers its last write and two last reads
(by different warps). An access races with an earlier one that its warp's clock does not cover.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import Uninitialised
from .race_log import Detector, overruled

if TYPE_CHECKING:
    from .batch import Batch

Array: TypeAlias = "NDArray[Any]"

# a stamp is clock << 40 | instruction << 8 | warp in its block; 0 stands for no access, clocks start at 1
_CLOCK = 40
_AT = 8
_WARP_MASK = 0xFF


class RaceDetector(Detector):
    """Happens-before between the warps of each block of a batch."""

    def start(self, batch: Batch) -> None:
        """Forget everything: a batch begins with new blocks."""
        self._batch = batch
        granules = batch.shared.size // self.granule
        warps, per_block = batch.blocks * batch.warps_per_block, batch.warps_per_block
        self._write = np.zeros(granules, "i8")
        self._reads = (np.zeros(granules, "i8"), np.zeros(granules, "i8"))
        self._atomics: tuple[Array, ...] = ()  # like reads; made when the first atomic comes
        self._own = batch.warp_in_block
        # clock[w, v]: what warp w knows of the clock of warp v of its block
        self._clock = np.zeros((warps, per_block), "i8")
        self._clock[np.arange(warps), self._own] = 1
        self._changed()

    def _changed(self) -> None:
        """Derive what most checks need: the least that a warp knows of any other."""
        others = self._clock.copy()
        others[np.arange(len(others)), self._own] = np.iinfo("i8").max
        self._floor = others.min(1)

    # ---- accesses

    def read(self, offset: Array, size: int, threads: Array, at: int) -> None:
        """Check and remember a read of `size` bytes by each thread."""
        where, warp = self._granules(offset, size, threads)
        before = self._write[where]
        if not before.all():
            self._uninitialised(where, before, threads, at)
        self._check(before, "RAW", where, warp, at)
        for atomics in self._atomics:
            self._check(atomics[where], "RAW", where, warp, at)
        self._note(self._reads, where, warp, at)

    def atomic(self, offset: Array, size: int, threads: Array, at: int) -> None:
        """Check and remember atomics: they do not race with each other, but with every other access."""
        where, warp = self._granules(offset, size, threads)
        self._check(self._write[where], "RAW", where, warp, at)
        for reads in self._reads:
            self._check(reads[where], "WAR", where, warp, at)
        if not self._atomics:
            self._atomics = (np.zeros_like(self._write), np.zeros_like(self._write))
        self._note(self._atomics, where, warp, at)

    def write(self, offset: Array, size: int, threads: Array, at: int, data: Array | None) -> None:
        """Check and remember a write of `size` bytes by each thread, before it is done.

        Two warps that write the same values do not race. `data` has the bytes of all writes; None stands for
        asynchronous copies, whose values are not known yet.
        """
        where, warp = self._granules(offset, size, threads)
        pieces = None if data is None else data.reshape(-1).view("u1").reshape(where.size, -1)
        different = None
        if pieces is not None:
            here = self._batch.shared.reshape(-1, self.granule)[:, : pieces.shape[1]]

            def different(index: Array) -> Array:
                return (here[where[index]] != pieces[index]).any(1)

        self._check(self._write[where], "WAW", where, warp, at, different)
        for reads in self._reads:
            self._check(reads[where], "WAR", where, warp, at)
        for atomics in self._atomics:
            self._check(atomics[where], "WAW", where, warp, at)
        self._note_write(where, warp, at)
        self._check_rivals(where, warp, at, pieces)

    def landed(self, offset: Array, size: int, threads: Array, at: int) -> None:
        """The data of asynchronous copies is there: readers must be ordered after this wait."""
        where, warp = self._granules(offset, size, threads)
        self._note_write(where, warp, at)

    # ---- barriers

    def arrive(self, warps: Array) -> Array:
        """Warps (numbers in the batch) of one block come to a barrier: what they know, to be handed to `release`."""
        known: Array = self._clock[warps].max(0)
        # what they do from here on, be it while others still wait, is not covered by this barrier
        self._clock[warps, self._own[warps]] += 1
        self._changed()
        return known

    def release(self, known: list[Array], waiting: Array) -> None:
        """Warps go on behind a barrier and know what all who arrived knew."""
        self._clock[waiting] = np.maximum(self._clock[waiting], np.max(known, axis=0))
        self._changed()

    def barrier_all(self, low: int, high: int) -> None:
        """All warps low .. high, whole blocks, meet block by block."""
        teams, per_block = self._batch.teams, self._batch.warps_per_block
        clocks = self._clock[low:high].reshape(teams, -1, per_block // teams, per_block)
        clocks[:] = clocks.max((0, 2), keepdims=True)
        warps = np.arange(low, high)
        self._clock[warps, self._own[warps]] += 1
        self._changed()

    # ---- memories of granules

    def _stamp(self, warp: Array, at: int) -> Array:
        own = self._own[warp]
        stamp: Array = self._clock[warp, own] << _CLOCK | (at << _AT) | own
        return stamp

    def _note_write(self, where: Array, warp: Array, at: int) -> None:
        self._write[where] = self._stamp(warp, at)
        for other in (*self._reads, *self._atomics):
            other[where] = 0

    def _note(self, memory: tuple[Array, ...], where: Array, warp: Array, at: int) -> None:
        """Remember reads or atomics: the last one, and the last one by another warp."""
        first, second = memory
        stamp = self._stamp(warp, at)
        before = first[where]
        # a reader that this one is ordered after needs no memory: who races with it races with this one as well
        beside = (before & _WARP_MASK != self._own[warp]) & (before >> _CLOCK > self._floor[warp])
        if beside.any():
            second[where[beside]] = stamp[beside]
            free = ~beside
            where, stamp = where[free], stamp[free]
        first[where] = stamp
        lost = first[where] != stamp
        if lost.any():
            second[where[lost]] = stamp[lost]

    # ---- reports

    def _check(self, before: Array, kind: str, where: Array, warp: Array, at: int, matters: Any | None = None) -> None:
        suspect = (before >> _CLOCK > self._floor[warp]) & (before & _WARP_MASK != self._own[warp])
        if not suspect.any():
            return
        index = np.flatnonzero(suspect)
        known = self._clock[warp[index], before[index] & _WARP_MASK]
        index = index[before[index] >> _CLOCK > known]
        if index.size and matters is not None:
            index = index[matters(index)]
        if index.size:
            self._report(kind, where[index], warp[index], before[index], at)

    def _check_rivals(self, where: Array, warp: Array, at: int, pieces: Array | None) -> None:
        """Warps that write the same granule in one and the same instruction: all but the last lane's write are lost."""
        last = self._write[where]
        lost = np.flatnonzero(last & _WARP_MASK != self._own[warp])
        if lost.size and pieces is not None:
            lost = overruled(where, lost, pieces)
        if lost.size:
            self._report("WAW", where[lost], warp[lost], last[lost], at)

    def _report(self, kind: str, where: Array, warp: Array, before: Array, at: int) -> None:
        instruction = before >> _AT & 0xFFFFFFFF
        self.log.add(self._batch, kind, where * self.granule, instruction, before & _WARP_MASK, self._own[warp], at)

    def _uninitialised(self, where: Array, before: Array, threads: Array, at: int) -> None:
        batch = self._batch
        bad = int(np.flatnonzero(before == 0)[0])
        thread = int(threads[bad // (where.size // threads.size)])
        address = int(where[bad]) * self.granule % batch.shared_stride
        raise Uninitialised(
            f"{batch.program.instructions[at]}\n  {batch.describe_thread(thread)}: "
            f"reads shared address {address:#x}, which nobody has written"
        )
