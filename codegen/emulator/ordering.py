"""Find unordered accesses to shared memory in kernels whose copies and products are asynchronous.

Clocks say what is certain, whatever the order in which things happen to run here. A wgmma or a bulk store reads from
its issue to the wait that covers it. What a thread has written reaches the asynchronous proxy only through a
fence.proxy.async; data of cp.async is taken to need none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .clocks import Clocks
from .errors import Uninitialised
from .race_log import Detector, overruled
from .shadow import FOREVER, Shadow

if TYPE_CHECKING:
    from .batch import Batch

Array: TypeAlias = "NDArray[Any]"


@dataclass(slots=True, eq=False)
class _Reading:
    """Granules that an unfinished operation reads for some warps; `owner` and `group` say which wait covers it."""

    owner: tuple[str, int]
    group: int
    warps: Array
    where: Array


class OrderDetector(Detector):
    """Happens-before between the warps of each cluster of a batch and what they have set going."""

    def start(self, batch: Batch) -> None:
        """Forget everything: a batch begins with new blocks."""
        self._batch = batch
        self._warps = batch.cluster_blocks * batch.warps_per_block
        self._own = batch.warp_in_cluster
        self.clocks = Clocks(batch, self.log)
        self._shadow = Shadow(batch.shared.size // self.granule, self._warps)
        self._reading: list[_Reading] = []

    # ---- barriers of threads

    def arrive(self, warps: Array) -> Array:
        """Warps of one block come to a barrier: what they know, to be handed to `release`."""
        return self.clocks.arrive(warps)

    def release(self, known: list[Array], waiting: Array) -> None:
        """Warps go on behind a barrier and know what all who arrived knew."""
        self.clocks.release(known, waiting)

    def barrier_all(self, low: int, high: int) -> None:
        """All warps low .. high, whole blocks, meet block by block."""
        self.clocks.barrier_all(low, high)

    # ---- accesses of threads

    def read(self, offset: Array, size: int, threads: Array, at: int) -> None:
        """Check and remember a read of `size` bytes by each thread."""
        where, warp = self._granules(offset, size, threads)
        self._check_read(where, warp, self.clocks.known[0], warp, at)
        self._shadow.note_read(where, self._own[warp], self.clocks.now(warp), at)

    def write(self, offset: Array, size: int, threads: Array, at: int, data: Array | None) -> None:
        """Check and remember a write before it is done; warps that write the same values do not race."""
        where, warp = self._granules(offset, size, threads)
        pieces = None if data is None else data.reshape(-1).view("u1").reshape(where.size, -1)
        self._check_write(where, warp, at, pieces)
        self._shadow.note_write(where, self._own[warp], self.clocks.now(warp), at)
        if pieces is not None:
            self._check_rivals(where, warp, at, pieces)

    def atomic(self, offset: Array, size: int, threads: Array, at: int) -> None:
        """Check and remember atomics, which do not race with each other."""
        where, warp = self._granules(offset, size, threads)
        others = np.flatnonzero(~self._shadow.atomic[where])
        self._check_writes_before(where[others], warp[others], at, None)
        self._check_reads_before(where, warp, at)
        self._shadow.note_write(where, self._own[warp], self.clocks.now(warp), at)
        self._shadow.atomic[where] = True

    def landed(self, offset: Array, size: int, threads: Array, at: int) -> None:
        """The data of cp.async is there: readers must be ordered after this wait."""
        where, warp = self._granules(offset, size, threads)
        self._shadow.note_write(where, self._own[warp], self.clocks.now(warp), at)
        self._shadow.copied[where] = True

    # ---- asynchronous operations

    def load(self, thread: int, offsets: Array, size: int, place: int, at: int) -> None:
        """A bulk load is issued: it may write from now on, until the phase of its mbarrier completes.

        The shared memory and the mbarrier may be those of another block of the cluster.
        """
        warp = thread >> 5
        traffic = self.clocks.traffic_of(place, warp, at)
        where = self._touched(offsets, size)
        self._check_write(where, np.full(where.size, warp), at, None)
        self._shadow.note_write(where, traffic.component, traffic.phases + 1, at)
        self.clocks.visit(thread, place, traffic.component, traffic.phases + 1, at)

    def store(self, thread: int, offsets: Array, size: int, group: int, at: int) -> None:
        """A bulk store is issued: it reads until its thread waits for its group."""
        warp = thread >> 5
        self._begin(("thread", thread), group, np.array([warp]), self._touched(offsets, size), at)

    def product(self, warpgroup: int, offsets: Array, group: int, at: int) -> None:
        """A wgmma is issued by the warps of a warpgroup: it reads until the wait for its group."""
        warps = 4 * warpgroup + np.arange(4)
        self._begin(("warpgroup", warpgroup), group, warps, self._touched(offsets, 16), at)

    def _begin(self, owner: tuple[str, int], group: int, warps: Array, where: Array, at: int) -> None:
        clocks, fenced = self.clocks.known[:, warps].min(1)
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
        over: list[_Reading] = []
        kept: list[_Reading] = []
        for reading in self._reading:
            (over if done(reading.owner, reading.group) else kept).append(reading)
        if not over:
            return
        for reading in over:
            for warp, time in zip(self._own[reading.warps].tolist(), self.clocks.now(reading.warps), strict=True):
                self._shadow.read[reading.where, warp] = time
        for reading in kept:  # others may still read the same granules
            self._shadow.read[reading.where[:, None], self._own[reading.warps]] = FOREVER
        self._reading = kept

    def exited(self) -> None:
        """All threads have exited: a block must have known of all that others do in its shared memory."""
        last = len(self._batch.program.instructions) - 1
        for (block, component), (time, place, at) in self.clocks.visits.items():
            if self.clocks.outlived(block)[component] < time:
                first = component if component < self._warps else -1
                of_block = block % self._batch.cluster_blocks * self._batch.warps_per_block
                where, before, who, exits = (np.array([value]) for value in (8 * place, at, first, of_block))
                self.log.add(self._batch, "EXIT", where, before, who, exits, last)

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
        self._check_writes_before(where, warp, at, pieces)
        self._check_reads_before(where, warp, at)

    def _check_writes_before(self, where: Array, warp: Array, at: int, pieces: Array | None) -> None:
        index = self._shadow.unordered_writes(where, self.clocks.known[0], warp)
        if index.size and pieces is not None:
            here = self._batch.shared.reshape(-1, self.granule)[:, : pieces.shape[1]]
            index = index[(here[where[index]] != pieces[index]).any(1)]
        self._report_writes("WAW", where[index], warp[index], at)

    def _check_reads_before(self, where: Array, warp: Array, at: int) -> None:
        index, reader = self._shadow.unordered_reads(where, self.clocks.known[0], warp)
        if index.size:
            self._report("WAR", where[index], self._shadow.read_at[where[index], reader], reader, warp[index], at)

    def _check_rivals(self, where: Array, warp: Array, at: int, pieces: Array) -> None:
        """Warps that write different values to the same granule in one and the same instruction."""
        lost = np.flatnonzero(self._shadow.writer[where] != self._own[warp])
        if not lost.size:
            return
        lost = overruled(where, lost, pieces)
        self._report_writes("WAW", where[lost], warp[lost], at)

    def _report_writes(self, kind: str, where: Array, warp: Array, at: int) -> None:
        if not where.size:
            return
        writer = self._shadow.writer[where]
        first = np.where(writer < self._warps, writer, -1)
        self._report(kind, where, self._shadow.written_at[where], first, warp, at)

    def _report(self, kind: str, where: Array, before: Array, first: Array, warp: Array, at: int) -> None:
        self.log.add(self._batch, kind, where * self.granule, before, first, self._own[warp], at)

    def _uninitialised(self, where: Array, warp: Array, at: int) -> None:
        batch = self._batch
        bad = int(np.flatnonzero(self._shadow.written[where] == 0)[0])
        address = int(where[bad]) * self.granule % batch.shared_stride
        raise Uninitialised(
            f"{batch.program.instructions[at]}\n  {batch.describe_thread(int(warp[bad]) << 5)} or another of its warp: "
            f"reads shared address {address:#x}, which nobody has written"
        )


def publish_mbarriers(access: Any, lanes: Array | None) -> None:
    """fence.mbarrier_init: for the detector."""
    if access.batch.order is not None:
        access.batch.order.clocks.publish(access.threads(lanes))


def fence_proxy(access: Any, lanes: Array | None) -> None:
    """fence.proxy.async: matters for the detector only."""
    if access.batch.order is not None:
        access.batch.order.clocks.fence(access.threads(lanes))
