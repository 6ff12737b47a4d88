"""Run a batch: always the threads with the smallest program counter, in lock-step while they stay together."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .barriers import Barriers
from .batch import END, Batch
from .errors import Deadlock

Array = NDArray[Any]

_PIECES = 4  # up to so many separate ranges of whole warps are run one by one, without masks


class _Group:
    """Threads that run next: a range, a mask if not all of the range are active, and where the others stand."""

    __slots__ = ("block", "high", "low", "mask", "next")

    def __init__(self, block: int, low: int, high: int, mask: Array | None, next_block: int) -> None:
        self.block, self.low, self.high, self.mask, self.next = block, low, high, mask, next_block


class Scheduler:
    """Program counters are numbers of basic blocks, so choosing costs once per block, not per instruction.

    The smallest counter first lets threads that fell behind catch up, which brings diverged threads together again
    where their paths join.
    """

    def __init__(self, batch: Batch, step_limit: int) -> None:
        self._batch = batch
        self._barriers = Barriers(batch)
        self._steps_left = step_limit

    def run(self) -> None:
        """Until every thread has exited."""
        while (group := self._choose()) is not None:
            self._advance(group)

    def _choose(self) -> _Group | None:
        pc = self._batch.pc
        waiting = self._barriers.waiting
        runnable = pc if waiting is None else np.where(waiting, END, pc)
        block = int(runnable.min())
        if block >= END:
            if waiting is not None:
                self._barriers.report_deadlock()
            return None
        active = runnable == block
        others = runnable[~active]
        following = int(others.min()) if others.size else END
        if not others.size:
            return _Group(block, 0, active.size, None, following)
        return self._grouped(block, active, following)

    def _grouped(self, block: int, active: Array, following: int) -> _Group:
        warps = active.reshape(-1, 32)
        some = warps.any(1)
        edges = np.flatnonzero(np.diff(some.astype("i1"), prepend=0, append=0))
        low, high = 32 * int(edges[0]), 32 * int(edges[-1])
        whole = bool((warps.all(1) == some).all())
        if whole and edges.size <= 2 * _PIECES:
            high = 32 * int(edges[1])
            # the other pieces stand at the same block: they run next, and all meet again where the first one stops
            return _Group(block, low, high, None, block if edges.size > 2 else following)
        return _Group(block, low, high, active[low:high], following)

    def _advance(self, group: _Group) -> None:
        """Run blocks while the group stays together and nobody is behind it."""
        batch = self._batch
        blocks, block_warps = batch.program.blocks, batch.counters.block_warps
        low, high, mask = group.low, group.high, group.mask
        warps = (high - low) // 32 if mask is None else int(mask.reshape(-1, 32).any(1).sum())
        block = group.block
        while True:
            function = batch.function(block, mask is not None, low, high)
            condition = function() if mask is None else function(mask)
            block_warps[block] += warps
            self._steps_left -= 1
            if self._steps_left < 0:
                raise Deadlock(f"the launch exceeded its step limit in block {blocks[block].all_instructions[:1]}")
            here = blocks[block]
            if here.kind == "fall":
                target = block + 1
            elif here.kind == "branch" and condition is None:
                target = here.targets[0]
            else:
                target = self._turn(group, block, condition)
                if target < 0:
                    return
            if target >= group.next:
                self._set(group, target)
                return
            block = target

    def _set(self, group: _Group, target: int | Array) -> None:
        pc = self._batch.pc[group.low : group.high]
        if group.mask is None:
            pc[:] = target
        else:
            pc[group.mask] = target

    def _turn(self, group: _Group, block: int, condition: Array | None) -> int:
        """Where the whole group goes, or -1 after setting the counters of a group that splits, waits or exits."""
        here = self._batch.program.blocks[block]
        taken = condition
        if taken is not None and group.mask is not None:
            taken = taken[group.mask]
        if taken is not None and not taken.any():
            return block + 1
        whole = taken is None or bool(taken.all())
        if here.kind == "table":
            return self._jump_table(group, block, taken)
        if here.kind == "barrier":
            return self._meet(group, block, None if whole else taken)
        target = END if here.kind == "exit" else here.targets[0]
        if whole and target < END:
            return target
        self._set(group, target if taken is None else np.where(taken, target, block + 1))
        if target >= END:
            self._barriers.recheck()
        return -1

    def _jump_table(self, group: _Group, block: int, taken: Array | None) -> int:
        index, _ = self._batch.window(group.low, group.high).barrier[0]
        chosen = np.broadcast_to(index, group.high - group.low)
        if group.mask is not None:
            chosen = chosen[group.mask]
        targets = np.array(self._batch.program.blocks[block].targets)[chosen]
        self._set(group, targets if taken is None else np.where(taken, targets, block + 1))
        return -1

    def _meet(self, group: _Group, block: int, taken: Array | None) -> int:
        batch = self._batch
        instruction = batch.program.blocks[block].end
        assert instruction is not None
        number, count = batch.window(group.low, group.high).barrier[0]
        per_block = batch.threads_per_block
        blocks_only = group.low % per_block == 0 and group.high % per_block == 0
        if group.mask is None and taken is None and count is None and blocks_only and not number.ndim:
            self._barriers.pass_together(group.low, group.high)
            return block + 1
        threads = np.arange(group.low, group.high)
        number = np.broadcast_to(number, threads.size)
        count = None if count is None else np.broadcast_to(count, threads.size)
        if group.mask is not None:
            threads, number = threads[group.mask], number[group.mask]
            count = None if count is None else count[group.mask]
        batch.pc[threads] = block + 1
        if taken is not None:
            threads, number = threads[taken], number[taken]
            count = None if count is None else count[taken]
        self._barriers.arrive(threads, number.astype("i8"), count, instruction)
        return -1
