"""Keep bulk copies in flight: loads until everybody waits, stores until the wait that covers them.

A batch is late or early. Early, everything asynchronous happens when it is issued. Late, at the last moment that the
waits of the kernel allow: a load arrives only when no thread can run without it, and a store reads shared memory only
when its thread waits for its group. Kernels whose waits are right give the same results both ways.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import EmulatorError

if TYPE_CHECKING:
    from .batch import Batch

Array: TypeAlias = "NDArray[Any]"


@dataclass(slots=True, eq=False)
class Transfer:
    """Pieces of `size` bytes between offsets into shared memory and into the global buffer, issued by one thread.

    `block` is the one whose shared memory it is, for a load perhaps another one of the thread's cluster.
    A load fills pieces that are not `inside` with zeros and then tells its mbarrier; a store leaves them out. With
    `adds` a store adds float32 numbers. `group` is the bulk group of a store.
    """

    thread: int
    at: int
    size: int
    shared: Array
    outside: Array
    inside: Array
    block: int
    mbarrier: int = -1
    adds: bool = False
    group: int = 0


class Transfers:
    """Bulk copies of a batch."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._loads: list[Transfer] = []
        self._stores: list[Transfer] = []
        self._group = np.zeros(batch.threads, "i4")

    def start(self) -> None:
        """Begin with new blocks."""
        self._loads.clear()
        self._stores.clear()
        self._group.fill(0)

    # ---- loads

    def load(self, transfer: Transfer) -> None:
        """Issue a load; until it arrives its target is poison."""
        if self._batch.order is not None:
            where = transfer.thread, transfer.shared, transfer.size, transfer.mbarrier
            self._batch.order.load(*where, transfer.at)
        if not self._batch.late:
            self._arrive(transfer)
            return
        octets = self._batch.shared.reshape(-1, transfer.size)
        octets[transfer.shared // transfer.size] = 0xFF
        self._loads.append(transfer)

    def deliver(self) -> bool:
        """Let the oldest load of each block arrive; False if there is none."""
        if not self._loads:
            return False
        served: set[int] = set()
        kept = []
        for transfer in self._loads:
            if transfer.block in served:
                kept.append(transfer)
                continue
            served.add(transfer.block)
            self._arrive(transfer)
        self._loads = kept
        return True

    def _arrive(self, transfer: Transfer) -> None:
        batch = self._batch
        size = transfer.size
        if transfer.block != batch.block_of[transfer.thread] and not batch.living_threads(transfer.block):
            rank = transfer.block % batch.cluster_blocks
            raise EmulatorError(
                f"{batch.program.instructions[transfer.at]}\n  {batch.describe_thread(transfer.thread)}: "
                f"block {rank} of the cluster has exited before the copy arrives"
            )
        items = batch.memory.views[size].take(np.where(transfer.inside, transfer.outside, 0) // size)
        items[~transfer.inside] = 0
        batch.shared_views[size][transfer.shared // size] = items
        wrong = batch.mbarriers.expect(transfer.mbarrier, -size * transfer.shared.size)
        if wrong:
            raise EmulatorError(f"{batch.program.instructions[transfer.at]}: {wrong}")

    # ---- stores

    def store(self, transfer: Transfer) -> None:
        """Issue a store or a reduction; it belongs to the group that its thread commits next."""
        transfer.group = int(self._group[transfer.thread])
        if self._batch.order is not None:
            where = transfer.thread, transfer.shared[transfer.inside], transfer.size, transfer.group
            self._batch.order.store(*where, transfer.at)
        if self._batch.late:
            self._stores.append(transfer)
        else:
            self._write(transfer)

    def commit(self, threads: Array) -> None:
        """Close the current group of these threads."""
        self._group[threads] += 1

    def wait(self, threads: Array, pending: int) -> None:
        """Do the stores of these threads but those of their last `pending` groups."""
        waiting = set(threads.tolist())
        if self._batch.order is not None:
            self._batch.order.finished(
                lambda owner, group: (
                    owner[0] == "thread" and owner[1] in waiting and group < self._group[owner[1]] - pending
                )
            )
        kept = []
        for transfer in self._stores:
            if transfer.thread in waiting and transfer.group < self._group[transfer.thread] - pending:
                self._write(transfer)
            else:
                kept.append(transfer)
        self._stores = kept

    def _write(self, transfer: Transfer) -> None:
        batch, size = self._batch, transfer.size
        shared, outside = transfer.shared[transfer.inside], transfer.outside[transfer.inside]
        batch.writes += 1
        if not transfer.adds:
            batch.memory.views[size][outside // size] = batch.shared_views[size][shared // size]
            return
        words = np.arange(size // 4)
        where, what = (offsets[:, None] // 4 + words for offsets in (outside, shared))
        np.add.at(batch.memory.views[4].view("f4"), where, batch.shared_views[4].view("f4")[what])

    def finish(self) -> None:
        """All threads have exited and all loads have arrived: the stores still in flight happen now."""
        for transfer in self._stores:
            self._write(transfer)
        self._stores.clear()
