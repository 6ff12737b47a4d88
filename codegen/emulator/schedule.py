"""Run a batch: always the threads with the smallest program counter, in lock-step while they stay together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .barriers import Barriers
from .batch import END, Batch
from .cluster_barriers import ClusterBarriers
from .errors import Deadlock
from .spinning import SpinWatch

Array: TypeAlias = "NDArray[Any]"

_PIECES = 4  # up to so many separate ranges of whole warps are run one by one, without masks


@dataclass(frozen=True, slots=True)
class _Group:
    """Threads that run next: a range, a mask if not all of the range are active, and where the next others stand.

    `behind`: some stand before them and are held back, so that the group must look again when it jumps backwards.
    """

    block: int
    low: int
    high: int
    mask: Array | None
    next: int
    behind: bool = False


class Scheduler:
    """Program counters are numbers of basic blocks, so choosing costs once per block, not per instruction.

    The smallest counter first lets threads that fell behind catch up, which brings diverged threads together again
    where their paths join. Threads that provably spin (see spinning.py) let those behind them go first. So do those
    that come to a wgmma without the rest of their warpgroup, which may stand behind them in a loop.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._barriers = Barriers(batch)
        self._clusters = ClusterBarriers(batch)
        self._watch = SpinWatch(batch)
        self._together = [any(i.base == "wgmma" for i in block.instructions) for block in batch.program.blocks]

    def run(self) -> None:
        """Until every thread has exited."""
        while (group := self._choose()) is not None:
            self._advance(group)
        self._batch.transfers.finish()
        self._batch.products.finish()
        if self._batch.order is not None:
            self._batch.order.exited()
        self._batch.counters.unfinished_barriers += self._barriers.unfinished

    def _choose(self) -> _Group | None:
        runnable = self._batch.pc
        waiting, spinning, asleep = self._barriers.waiting, self._watch.aside, self._batch.mbarriers.held
        in_cluster = self._clusters.waiting
        for held in (waiting, in_cluster, spinning, asleep):
            if held is not None:
                runnable = np.where(held, END, runnable)
        block = int(runnable.min())
        if block >= END:
            if self._batch.transfers.deliver() or self._batch.mbarriers.wake_somebody():
                return self._choose()
            if spinning is not None:
                self._watch.report_deadlock()
            if waiting is not None:
                self._barriers.report_deadlock()
            if in_cluster is not None:
                self._clusters.report_deadlock()
            return None
        active, ready = runnable == block, runnable
        while self._together[block] and (part := self._without_company(active)) is not None:
            ready = np.where(part, END, ready)
            if int(ready.min()) >= END:
                break  # nobody else can run: the wgmma will say what is wrong
            block = int(ready.min())
            active = ready == block
        others = runnable[runnable > block]
        following = int(others.min()) if others.size else END
        if active.all():
            return _Group(block, 0, active.size, None, following)
        return self._grouped(block, active, following, behind=ready is not runnable)

    def _without_company(self, active: Array) -> Array | None:
        """Those of the active threads whose warpgroups are not all there; None if there are none."""
        company = self._batch.company
        rest = (self._batch.living & ~active).reshape(-1, company).any(1)
        part: Array = active & np.repeat(rest, company)
        return part if part.any() else None

    def _grouped(self, block: int, active: Array, following: int, behind: bool = False) -> _Group:
        warps = active.reshape(-1, 32)
        some = warps.any(1)
        edges = np.flatnonzero(np.diff(some.astype("i1"), prepend=0, append=0))
        low, high = 32 * int(edges[0]), 32 * int(edges[-1])
        if bool((warps.all(1) == some).all()) and edges.size <= 2 * _PIECES:
            # the other pieces stand at the same block: they run next, and all meet again where the first one stops
            return _Group(block, low, 32 * int(edges[1]), None, block if edges.size > 2 else following, behind)
        return _Group(block, low, high, active[low:high], following, behind)

    def _advance(self, group: _Group) -> None:
        """Run blocks while the group stays together and does not reach others."""
        batch, watch = self._batch, self._watch
        blocks, block_warps = batch.program.blocks, batch.counters.block_warps
        low, high, mask = group.low, group.high, group.mask
        warps = (high - low) // 32 if mask is None else int(mask.reshape(-1, 32).any(1).sum())
        block = group.block
        while True:
            function = batch.function(block, mask is not None, low, high)
            condition = function() if mask is None else function(mask)
            block_warps[block] += warps
            here = blocks[block]
            if here.kind == "fall":
                target = block + 1
            elif here.kind == "branch" and condition is None:
                target = here.targets[0]
            else:
                target = self._turn(group, block, condition)
                if target < 0:
                    return
            back = target <= block and (group.behind or watch.spins(target, low, high, mask))
            if back or target >= group.next or (self._together[target] and not self._whole(group)):
                self._set(group, target)
                return
            block = target

    def _whole(self, group: _Group) -> bool:
        """Whether the group consists of whole warpgroups, as far as these live."""
        if group.mask is None and (group.low | group.high) % self._batch.company == 0:
            return True
        active = np.zeros(self._batch.threads, bool)
        active[group.low : group.high] = True if group.mask is None else group.mask
        return self._without_company(active) is None

    def _set(self, group: _Group, target: int | Array) -> None:
        pc = self._batch.pc[group.low : group.high]
        if group.mask is None:
            pc[:] = target
        else:
            pc[group.mask] = target

    def _turn(self, group: _Group, block: int, condition: Array | None) -> int:
        """Where the whole group goes, or -1 after setting the counters of a group that splits, waits or exits."""
        here = self._batch.program.blocks[block]
        if here.kind == "wait" and condition is not None:
            return self._wait(group, block, condition)
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
        if here.kind == "cluster":
            return self._meet_in_cluster(group, block, taken)
        target = END if here.kind == "exit" else here.targets[0]
        if whole and target < END:
            return target
        self._set(group, target if taken is None else np.where(taken, target, block + 1))
        if target >= END:
            self._watch.progress()
            self._barriers.recheck()
            self._clusters.recheck()
        return -1

    def _jump_table(self, group: _Group, block: int, taken: Array | None) -> int:
        index, _ = self._batch.barrier[0]
        chosen = np.broadcast_to(index, group.high - group.low)
        if group.mask is not None:
            chosen = chosen[group.mask]
        table = self._batch.program.blocks[block].targets
        if chosen.max() >= len(table) and (taken is None or (chosen[taken] >= len(table)).any()):
            raise Deadlock(f"{self._batch.program.blocks[block].end}: index beyond its {len(table)} targets")
        targets = np.array(table)[np.minimum(chosen, len(table) - 1)]
        self._set(group, targets if taken is None else np.where(taken, targets, block + 1))
        return -1

    def _wait(self, group: _Group, block: int, passed: Array) -> int:
        """Threads whose phase is not complete stay where they are and sleep."""
        if passed.all():
            return block + 1
        self._set(group, np.where(passed, block + 1, block) if group.mask is None else block + 1)
        failed = np.flatnonzero(~passed)  # active ones only: the others count as passed
        threads = failed + group.low
        self._batch.pc[threads] = block
        self._batch.mbarriers.sleep(threads, self._batch.barrier[0][0][failed])
        return -1

    def _meet(self, group: _Group, block: int, taken: Array | None) -> int:
        batch = self._batch
        self._watch.progress()
        number, count = batch.barrier[0]
        whole = batch.whole_blocks(group.low, group.high)
        if group.mask is None and taken is None and count is None and whole and not number.ndim:
            self._barriers.pass_together(group.low, group.high)
            return block + 1
        threads = np.arange(group.low, group.high)
        number = np.broadcast_to(number, threads.size)
        count = None if count is None else np.broadcast_to(count, threads.size)
        for chosen in (group.mask, taken):
            if chosen is not None:
                threads, number = threads[chosen], number[chosen]
                count = None if count is None else count[chosen]
            if chosen is group.mask:
                batch.pc[threads] = block + 1
        self._barriers.arrive(threads, number.astype("i8"), count, block)
        return -1

    def _meet_in_cluster(self, group: _Group, block: int, taken: Array | None) -> int:
        """Threads arrive at the barrier of their clusters, or wait there."""
        self._watch.progress()
        threads = np.arange(group.low, group.high)
        if group.mask is not None:
            threads = threads[group.mask]
        self._batch.pc[threads] = block + 1
        if taken is not None:
            threads = threads[taken]
        instruction = self._batch.program.blocks[block].all_instructions[-1]
        if "arrive" in instruction.modifiers:
            self._clusters.arrive(threads, instruction)
        else:
            self._clusters.wait(threads, instruction)
        return -1
