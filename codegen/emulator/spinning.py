"""Recognise threads that spin: nothing was written, and their registers are what they were one turn before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import Deadlock

if TYPE_CHECKING:
    from .batch import Batch

Array: TypeAlias = "NDArray[Any]"

_PATIENCE = 500  # backward jumps without a write before the first look: comparing registers is not free
_LIMIT = 5_000_000  # backward jumps without a write after which even a loop that counts is given up


class SpinWatch:
    """Such threads wait for others: they are set aside until something is written.

    Loops that merely run long are never set aside: their lanes must catch up with those that wait for them, or what
    the warp does together behind the loop would find only a part of it.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._aside = np.zeros(batch.threads, bool)
        self._any_aside = False
        self._writes = batch.writes
        self._restart()

    def _restart(self) -> None:
        self._jumps, self._next_look = 0, _PATIENCE
        self._seen: tuple[int, bytes, list[Array]] | None = None

    def progress(self) -> None:
        """Something happened that a spinning thread may have waited for."""
        self._writes = self._batch.writes
        self._restart()
        if self._any_aside:
            self._aside.fill(False)
            self._any_aside = False

    @property
    def aside(self) -> Array | None:
        """Threads that spin and must not run now; None if there are none."""
        if self._any_aside and self._batch.writes != self._writes:
            self.progress()
        return self._aside if self._any_aside else None

    def spins(self, target: int, low: int, high: int, mask: Array | None) -> bool:
        """Called at every backward jump; True if the threads provably repeat themselves."""
        if self._batch.writes != self._writes:
            self._writes = self._batch.writes
            self._restart()
            return False
        self._jumps += 1
        if self._jumps > _LIMIT:
            instruction = self._batch.program.blocks[target].all_instructions[0]
            raise Deadlock(f"{_LIMIT} turns of loops and nothing was written; the loop begins at {instruction}")
        if self._seen is None and self._jumps < self._next_look:
            return False
        threads = self._threads(low, high, mask)
        who = threads.tobytes()
        if self._seen is None:
            # if this look finds nothing the next comes after ever longer times: a loop may settle late
            self._next_look = 2 * self._jumps
            self._seen = (target, who, self._batch.register_state(low, high))
        elif self._seen[:2] == (target, who):
            state, self._seen = self._seen[2], None
            if self._batch.same_registers(state, low, high):
                self._aside |= threads
                self._any_aside = True
                self._next_look = self._jumps + _PATIENCE
                return True
        return False

    def _threads(self, low: int, high: int, mask: Array | None) -> Array:
        threads = np.zeros(self._batch.threads, bool)
        threads[low:high] = True if mask is None else mask
        return threads

    def report_deadlock(self) -> NoReturn:
        """Only spinning threads are left."""
        batch = self._batch
        first = int(self._aside.argmax())
        blocks = [batch.program.blocks[block] for block in np.unique(batch.pc[self._aside])]
        loops = "; ".join(str(block.all_instructions[0]) for block in blocks if block.all_instructions)
        raise Deadlock(
            "every thread that could run spins in a loop, and what it waits for is never written\n"
            f"  {batch.describe_thread(first)} is one of {int(self._aside.sum())}; loops begin at {loops}"
        )
