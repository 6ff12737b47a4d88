"""Hold back asynchronous copies until the wait that covers them, so that a missing wait reads poison."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .batch import Batch

Array = NDArray[Any]


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
        return _Copies(
            self.threads[keep], self.target[keep], self.source[keep], self.size, amount, self.group[keep]
        )


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

    def add(self, threads: Array, target: Array, source: Array, size: int, amount: Array | None, at: int) -> None:
        """Queue copies; they belong to the group that their thread commits next."""
        self._pending.append(_Copies(threads, target, source, size, amount, self._group[threads]))

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
            if mask is not None:
                inside = (copies.threads >= low) & (copies.threads < high)
                ready &= inside & mask[np.clip(copies.threads - low, 0, high - low - 1)]
            elif copies.threads[0] < low or copies.threads[-1] >= high:
                ready &= (copies.threads >= low) & (copies.threads < high)
            if ready.all():
                self._apply(copies, at)
            elif ready.any():
                self._apply(copies.part(ready), at)
                kept.append(copies.part(~ready))
            else:
                kept.append(copies)
        self._pending = kept

    def _apply(self, copies: _Copies, at: int) -> None:
        shift = copies.size.bit_length() - 1
        items = self._batch.memory.views[copies.size].take(copies.source >> shift)
        if copies.amount is not None:
            octets = items.view("u1").reshape(-1, copies.size)
            octets[np.arange(copies.size) >= copies.amount[:, None]] = 0
        self._batch.shared_views[copies.size][copies.target >> shift] = items
        if self._batch.detector is not None:
            self._batch.detector.landed(copies.target, copies.size, copies.threads, at)
