"""Hold back asynchronous copies until the wait that covers them, so that a missing wait reads poison.

A batch that is not late copies at once; its waits then matter for the race detector only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .access import Access
from .errors import EmulatorError

if TYPE_CHECKING:
    from .batch import Batch

Array: TypeAlias = "NDArray[Any]"


class _Copies(NamedTuple):
    """Copies issued by one instruction: threads, targets, sources, bytes, bytes read if fewer, group of each thread."""

    threads: Array
    target: Array
    source: Array
    size: int
    amount: Array | None
    group: Array

    def part(self, keep: Array) -> _Copies:
        """Some of them."""
        amount = None if self.amount is None else self.amount[keep]
        return _Copies(self.threads[keep], self.target[keep], self.source[keep], self.size, amount, self.group[keep])


class CopyQueue:
    """cp.async of a batch: each thread numbers its groups by its own commits."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._group = np.zeros(batch.threads, "i4")
        self._pending: list[_Copies] = []

    def clear(self) -> None:
        """Forget what is pending."""
        self._group.fill(0)
        self._pending.clear()

    def add(self, threads: Array, target: Array, source: Array, size: int, amount: Array | None) -> None:
        """Queue copies; they belong to the group that their thread commits next."""
        copies = _Copies(threads, target, source, size, amount, self._group[threads])
        if not self._batch.late:
            self._move(copies)
        self._pending.append(copies)

    def commit(self, low: int, high: int, mask: Array | None) -> None:
        """Close the current group of the active threads."""
        if mask is None:
            self._group[low:high] += 1
        else:
            self._group[low:high] += mask

    def wait(self, low: int, high: int, pending: int, mask: Array | None, at: int) -> None:
        """Do all copies of the active threads but those of their last `pending` groups."""
        kept: list[_Copies] = []
        for copies in self._pending:
            ready = copies.group < self._group[copies.threads] - pending
            if mask is not None or copies.threads[0] < low or copies.threads[-1] >= high:
                inside = (copies.threads >= low) & (copies.threads < high)
                if mask is not None:
                    inside &= mask[np.clip(copies.threads - low, 0, high - low - 1)]
                ready &= inside
            if ready.all():
                self._apply(copies, at)
            elif ready.any():
                self._apply(copies.part(ready), at)
                kept.append(copies.part(~ready))
            else:
                kept.append(copies)
        self._pending = kept

    def _apply(self, copies: _Copies, at: int) -> None:
        if self._batch.late:
            self._move(copies)
        if self._batch.detector is not None:
            self._batch.detector.landed(copies.target, copies.size, copies.threads, at)

    def _move(self, copies: _Copies) -> None:
        shift = copies.size.bit_length() - 1
        items = self._batch.memory.views[copies.size].take(copies.source >> shift)
        if copies.amount is not None:
            octets = items.view("u1").reshape(-1, copies.size)
            octets[np.arange(copies.size) >= copies.amount[:, None]] = 0
        self._batch.shared_views[copies.size][copies.target >> shift] = items


def copy_async(
    access: Access, target: Array, source: Array, size: int, amount: Array | None, lanes: Array | None, at: int
) -> None:
    """cp.async: checked and counted now, done at the wait that covers it. `amount` bytes are read, the rest is zero."""
    if lanes is not None and not lanes.size:
        return
    active = access.active(lanes)
    to = access.in_shared(target, size, lanes, at, size)
    if access.batch.detector is not None:
        access.batch.detector.write(to, size, access.threads(lanes), at, None)
    access.batch.writes += 1
    if amount is not None:
        amount = np.broadcast_to(amount, access.n)[active]
        if (amount > size).any():
            bad = int((amount > size).argmax())
            access.fail(EmulatorError, at, lanes, bad, f"src-size {int(amount[bad])} exceeds the copy's {size} bytes")
        if (amount == size).all():
            amount = None
    if amount is None:
        offset, _ = access.in_global(source, size, lanes, at, size)
    else:
        offset = np.zeros(active.size, "i8")
        for count in np.unique(amount):
            part = np.flatnonzero(amount == count)
            if count:  # what is not read is not checked
                offset[part], _ = access.in_global(source, int(count), active[part], at, size)
    access.counters.async_copied_bytes += size * active.size
    access.counters.global_read_bytes += size * active.size if amount is None else int(amount.sum())
    access.batch.copies.add(active + access.low, to, offset, size, amount)


def commit_copies(access: Access, mask: Array | None) -> None:
    """cp.async.commit_group."""
    access.batch.copies.commit(access.low, access.high, mask)


def wait_for_copies(access: Access, pending: int, mask: Array | None, at: int) -> None:
    """cp.async.wait_group."""
    access.batch.copies.wait(access.low, access.high, pending, mask, at)
