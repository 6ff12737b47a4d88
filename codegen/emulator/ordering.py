"""Find unordered accesses to shared memory in kernels whose copies and products are asynchronous.

Whatever the order in which things happen to run here, a vector clock says what is certain. Its components are the warps
of a block, and for each mbarrier the loads that it counts. An arrival hands on what its warp knows to those who have
seen the phase complete; named barriers join those who meet. A bulk load is ordered after the warp that issues it, and
before the completion of its phase. A wgmma or a bulk store reads from its issue to the wait that covers it.

What a thread has written reaches the asynchronous proxy only through a fence.proxy.async: a second clock holds what
fences have covered. Data of cp.async is taken to need none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import EmulatorError, Uninitialised
from .report import Race
from .shadow import FOREVER, Shadow

if TYPE_CHECKING:
    from .batch import Batch

Array: TypeAlias = "NDArray[Any]"

_STORED = 48
_STORED_OF_A_PAIR = 4
_MBARRIERS = 128  # of a block whose traffic is told apart


@dataclass(slots=True, eq=False)
class _Traffic:
    """An mbarrier: its component, phases completed, what arrivals knew, and who made it when."""

    component: int
    knowledge: Array  # [2, components]: clock, and what of it is fenced
    completed: Array
    warp: int
    time: int
    at: int
    phases: int = 0


@dataclass(slots=True, eq=False)
class _Reading:
    """Granules that an unfinished operation reads for some warps; `owner` and `group` say which wait covers it."""

    owner: tuple[str, int]
    group: int
    warps: Array
    where: Array


class OrderDetector:
    """Happens-before between the warps of each block of a batch and what they have set going."""

    def __init__(self, granule: int) -> None:
        self.granule = granule
        self.races: list[Race] = []
        self.count = 0

    def start(self, batch: Batch) -> None:
        """Forget everything: a batch begins with new blocks."""
        self._batch = batch
        self._warps = batch.warps_per_block
        warps = batch.threads // 32
        self._own = batch.warp_in_block
        # [clock, what of it is fenced][warp of the batch, component]
        self._known = np.zeros((2, warps, self._warps + _MBARRIERS), "i4")
        self._known[0, np.arange(warps), self._own] = 1
        self._shadow = Shadow(batch.shared.size // self.granule, self._warps)
        self._traffic: dict[int, _Traffic] = {}
        self._mbarriers = np.zeros(batch.blocks, "i4")
        self._reading: list[_Reading] = []

    def _now(self, warps: Array) -> Array:
        time: Array = self._known[0, warps, self._own[warps]]
        return time

    def _tick(self, warps: Array | int) -> None:
        """What these warps do from here on is not covered by what they have just handed on."""
        self._known[0, warps, self._own[warps]] += 1

    # ---- accesses of threads

    def read(self, offset: Array, size: int, threads: Array, at: int) -> None:
        """Check and remember a read of `size` bytes by each thread."""
        where, warp = self._granules(offset, size, threads)
        self._check_read(where, warp, self._known[0], warp, at)
        self._shadow.note_read(where, self._own[warp], self._now(warp), at)

    def write(self, offset: Array, size: int, threads: Array, at: int, data: Array | None) -> None:
        """Check and remember a write before it is done; warps that write the same values do not race."""
        where, warp = self._granules(offset, size, threads)
        pieces = None if data is None else data.reshape(-1).view("u1").reshape(where.size, -1)
        self._check_write(where, warp, at, pieces)
        self._shadow.note_write(where, self._own[warp], self._now(warp), at)
        if pieces is not None:
            self._check_rivals(where, warp, at, pieces)

    def atomic(self, offset: Array, size: int, threads: Array, at: int) -> None:
        """Check and remember atomics, which do not race with each other."""
        where, warp = self._granules(offset, size, threads)
        others = np.flatnonzero(~self._shadow.atomic[where])
        self._check_write(where[others], warp[others], at, None)
        self._shadow.note_write(where, self._own[warp], self._now(warp), at)
        self._shadow.atomic[where] = True

    def landed(self, offset: Array, size: int, threads: Array, at: int) -> None:
        """The data of cp.async is there: readers must be ordered after this wait."""
        where, warp = self._granules(offset, size, threads)
        self._shadow.note_write(where, self._own[warp], self._now(warp), at)
        self._shadow.copied[where] = True

    # ---- barriers of threads

    def arrive(self, warps: Array) -> Array:
        """Warps of one block come to a barrier: what they know, to be handed to `release`."""
        known: Array = self._known[:, warps].max(1)
        self._tick(warps)
        return known

    def release(self, known: list[Array], waiting: Array) -> None:
        """Warps go on behind a barrier and know what all who arrived knew."""
        self._known[:, waiting] = np.maximum(self._known[:, waiting], np.max(known, axis=0)[:, None])

    def barrier_all(self, low: int, high: int) -> None:
        """All warps low .. high, whole blocks, meet block by block."""
        teams = self._batch.teams
        known = self._known[:, low:high].reshape(2, teams, -1, self._warps // teams, self._known.shape[2])
        known[:] = known.max((1, 3), keepdims=True)
        self._tick(np.arange(low, high))

    def fence(self, threads: Array) -> None:
        """fence.proxy.async."""
        warps = np.unique(threads >> 5)
        self._known[1, warps] = np.maximum(self._known[1, warps], self._known[0, warps])
        self._tick(warps)

    # ---- mbarriers

    def made(self, thread: int, place: int, at: int) -> None:
        """mbarrier.init."""
        warp, block = thread >> 5, int(self._batch.block_of[thread])
        before = self._traffic.get(place)
        if before is None and self._mbarriers[block] == _MBARRIERS:
            raise EmulatorError(f"more than {_MBARRIERS} mbarriers in a block: check_races does not tell them apart")
        component = self._warps + int(self._mbarriers[block]) if before is None else before.component
        self._mbarriers[block] += before is None
        nothing = np.zeros_like(self._known[:, 0])
        phases = 0 if before is None else before.phases
        time = int(self._known[0, warp, self._own[warp]])
        self._traffic[place] = _Traffic(component, nothing, nothing, warp, time, at, phases)
        self._tick(warp)

    def _traffic_of(self, place: int, warp: int, at: int) -> _Traffic:
        """The mbarrier, whose init the warp must know of."""
        traffic = self._traffic[place]
        if self._known[0, warp, self._own[traffic.warp]] < traffic.time:
            self._report("RAW", place * 8, traffic.at, int(self._own[traffic.warp]), warp, at)
        return traffic

    def arrived(self, thread: int, place: int, at: int) -> None:
        """A thread arrives at an mbarrier."""
        warp = thread >> 5
        traffic = self._traffic_of(place, warp, at)
        traffic.knowledge = np.maximum(traffic.knowledge, self._known[:, warp])
        self._tick(warp)

    def completed(self, place: int) -> None:
        """A phase is complete."""
        traffic = self._traffic[place]
        traffic.phases += 1
        traffic.knowledge[0, traffic.component] = traffic.phases
        traffic.completed = traffic.knowledge.copy()

    def waited(self, threads: Array, places: Array, at: int) -> None:
        """Threads have seen the phases of mbarriers complete."""
        for pair in np.unique((threads >> 5) << 32 | places).tolist():
            warp, place = pair >> 32, pair & 0xFFFFFFFF
            traffic = self._traffic_of(place, warp, at)
            self._known[:, warp] = np.maximum(self._known[:, warp], traffic.completed)

    # ---- asynchronous operations

    def load(self, thread: int, offsets: Array, size: int, place: int, at: int) -> None:
        """A bulk load is issued: it may write from now on, until the phase of its mbarrier completes."""
        warp = thread >> 5
        traffic = self._traffic_of(place, warp, at)
        where = self._touched(offsets, size)
        self._check_write(where, np.full(where.size, warp), at, None)
        self._shadow.note_write(where, traffic.component, traffic.phases + 1, at)

    def store(self, thread: int, offsets: Array, size: int, group: int, at: int) -> None:
        """A bulk store is issued: it reads until its thread waits for its group."""
        warp = thread >> 5
        self._begin(("thread", thread), group, np.array([warp]), self._touched(offsets, size), at)

    def product(self, warpgroup: int, offsets: Array, group: int, at: int) -> None:
        """A wgmma is issued by the warps of a warpgroup: it reads until the wait for its group."""
        warps = 4 * warpgroup + np.arange(4)
        self._begin(("warpgroup", warpgroup), group, warps, self._touched(offsets, 16), at)

    def _begin(self, owner: tuple[str, int], group: int, warps: Array, where: Array, at: int) -> None:
        clocks, fenced = self._known[:, warps].min(1)
        nobody = np.zeros(where.size, "i8")
        self._check_read(where, np.full(where.size, warps[0]), clocks[None], nobody, at)
        shadow = self._shadow
        generic = (shadow.writer[where] < self._warps) & ~shadow.copied[where]
        bare = np.flatnonzero(generic & (shadow.written[where] > fenced[shadow.writer[where]]))
        self._report_writes("PROXY", where[bare], np.full(bare.size, warps[0]), at)
        for warp in self._own[warps].tolist():
            shadow.read[where, warp] = FOREVER
            shadow.read_at[where, warp] = at
        self._reading.append(_Reading(owner, group, warps, where))

    def finished(self, done: Callable[[tuple[str, int], int], bool]) -> None:
        """Operations are over, those for whose owner and group `done` is true: their warps have read just now."""
        kept = [reading for reading in self._reading if not done(reading.owner, reading.group)]
        if len(kept) == len(self._reading):
            return
        for reading in self._reading:
            if done(reading.owner, reading.group):
                for warp, time in zip(self._own[reading.warps].tolist(), self._now(reading.warps), strict=True):
                    self._shadow.read[reading.where, warp] = time
        for reading in kept:  # others may still read the same granules
            self._shadow.read[reading.where[:, None], self._own[reading.warps]] = FOREVER
        self._reading = kept

    # ---- granules

    def _granules(self, offset: Array, size: int, threads: Array) -> tuple[Array, Array]:
        """Granules touched, and the warp (number in the batch) that touches each."""
        first, warp = offset // self.granule, threads >> 5
        parts = size // self.granule
        if parts <= 1:
            return first, warp
        return (first[:, None] + np.arange(parts)).reshape(-1), np.repeat(warp, parts)

    def _touched(self, offsets: Array, size: int) -> Array:
        parts = max(1, size // self.granule)
        return np.unique(offsets.reshape(-1)[:, None] // self.granule + np.arange(parts))

    # ---- reports

    def _check_read(self, where: Array, warp: Array, clocks: Array, row: Array, at: int) -> None:
        if not self._shadow.written[where].all():
            self._uninitialised(where, warp, at)
        index = self._shadow.unordered_writes(where, clocks, row)
        self._report_writes("RAW", where[index], warp[index], at)

    def _check_write(self, where: Array, warp: Array, at: int, pieces: Array | None) -> None:
        shadow, clocks = self._shadow, self._known[0]
        index = shadow.unordered_writes(where, clocks, warp)
        if index.size and pieces is not None:
            here = self._batch.shared.reshape(-1, self.granule)[:, : pieces.shape[1]]
            index = index[(here[where[index]] != pieces[index]).any(1)]
        self._report_writes("WAW", where[index], warp[index], at)
        index, reader = shadow.unordered_reads(where, clocks, warp)
        for place, first, now in zip(where[index].tolist(), reader.tolist(), warp[index].tolist(), strict=True):
            self._report("WAR", place * self.granule, int(shadow.read_at[place, first]), first, now, at)

    def _check_rivals(self, where: Array, warp: Array, at: int, pieces: Array) -> None:
        """Warps that write different values to the same granule in one and the same instruction."""
        lost = np.flatnonzero(self._shadow.writer[where] != self._own[warp])
        if not lost.size:
            return
        order = np.argsort(where, kind="stable")
        winner = order[np.searchsorted(where[order], where[lost], "right") - 1]
        lost = lost[(pieces[winner] != pieces[lost]).any(1)]
        self._report_writes("WAW", where[lost], warp[lost], at)

    def _report_writes(self, kind: str, where: Array, warp: Array, at: int) -> None:
        shadow = self._shadow
        for place, now in zip(where.tolist(), warp.tolist(), strict=True):
            writer = int(shadow.writer[place])
            first = writer if writer < self._warps else -1
            self._report(kind, place * self.granule, int(shadow.written_at[place]), first, now, at)

    def _report(self, kind: str, offset: int, before: int, first_warp: int, now: int, at: int) -> None:
        batch = self._batch
        self.count += 1
        first, second = (str(batch.program.instructions[index]) for index in (before, at))
        same = sum((race.kind, race.first, race.second) == (kind, first, second) for race in self.races)
        if len(self.races) >= _STORED or same >= _STORED_OF_A_PAIR:
            return
        block, address = divmod(offset, batch.shared_stride)
        x, y, z = (int(v) for v in batch.block_ids[block])
        self.races.append(Race(kind, address, (x, y, z), first, second, (first_warp, int(self._own[now]))))

    def _uninitialised(self, where: Array, warp: Array, at: int) -> None:
        batch = self._batch
        bad = int(np.flatnonzero(self._shadow.written[where] == 0)[0])
        address = int(where[bad]) * self.granule % batch.shared_stride
        raise Uninitialised(
            f"{batch.program.instructions[at]}\n  {batch.describe_thread(int(warp[bad]) << 5)} or another of its warp: "
            f"reads shared address {address:#x}, which nobody has written"
        )


def fence_proxy(access: Any, lanes: Array | None) -> None:
    """fence.proxy.async: matters for the detector only."""
    if access.batch.order is not None:
        access.batch.order.fence(access.threads(lanes))
