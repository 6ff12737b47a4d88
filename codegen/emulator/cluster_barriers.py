"""Let the threads of a cluster's blocks arrive at its barrier, and wait until all that have not exited have arrived."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import Deadlock, DivergentBarrier, EmulatorError, UnknownInstruction

if TYPE_CHECKING:
    from .batch import Batch
    from .instructions import Instruction

Array: TypeAlias = "NDArray[Any]"

# What a thread has to do with the barrier of its cluster.
_AWAY, _ARRIVED, _WAITING, _FREE = range(4)  # _FREE: it has arrived, and so have all the others


class ClusterBarriers:
    """The barriers of all clusters of a batch; each cluster has one."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._state = np.zeros(batch.threads, "i1")
        self._cluster = batch.block_of // batch.cluster_blocks
        self._waiting = 0
        self._known: dict[int, list[Array]] = {}  # what those who arrived know, for the race detector
        self._passed: dict[int, list[Array]] = {}  # the same of the last time that all had arrived

    @property
    def waiting(self) -> Array | None:
        """Which threads wait; None if nobody does."""
        return self._state == _WAITING if self._waiting else None

    def arrive(self, threads: Array, instruction: Instruction) -> None:
        """barrier.cluster.arrive."""
        self._check(threads, instruction, (_AWAY,), "has arrived before, and has not waited since")
        self._state[threads] = _ARRIVED
        order = self._batch.order
        for cluster in np.unique(self._cluster[threads]).tolist():
            if order is not None:
                warps = np.unique(threads[self._cluster[threads] == cluster] >> 5)
                relaxed = "relaxed" in instruction.modifiers
                self._known.setdefault(cluster, []).append(order.clocks.arrive(warps, relaxed))
            self._complete(cluster)

    def wait(self, threads: Array, instruction: Instruction) -> None:
        """barrier.cluster.wait."""
        self._check(threads, instruction, (_ARRIVED, _FREE), "waits for a barrier at which it has not arrived")
        free: Array = self._state[threads] == _FREE
        self._state[threads] = np.where(free, _AWAY, _WAITING)
        self._waiting += int((~free).sum())
        for cluster in np.unique(self._cluster[threads[free]]).tolist():
            self._learn(threads[free & (self._cluster[threads] == cluster)], cluster)

    def recheck(self) -> None:
        """Threads have exited: those that are left may all have arrived."""
        for cluster in np.unique(self._cluster[(self._state == _ARRIVED) | (self._state == _WAITING)]).tolist():
            self._complete(cluster)

    def _complete(self, cluster: int) -> None:
        batch = self._batch
        mine = self._cluster == cluster
        arrived = mine & ((self._state == _ARRIVED) | (self._state == _WAITING))
        if not arrived.any() or (mine & batch.living & ~arrived).any():
            return
        batch.counters.barriers += batch.cluster_blocks
        self._passed[cluster] = self._known.pop(cluster, [])
        waiting = mine & (self._state == _WAITING)
        self._waiting -= int(waiting.sum())
        self._state[arrived] = _FREE
        self._state[waiting] = _AWAY
        if waiting.any():
            self._learn(np.flatnonzero(waiting), cluster)

    def _learn(self, threads: Array, cluster: int) -> None:
        if self._batch.order is not None:
            self._batch.order.release(self._passed[cluster], np.unique(threads >> 5))

    def _check(self, threads: Array, instruction: Instruction, allowed: tuple[int, ...], text: str) -> None:
        batch = self._batch
        wrong = np.flatnonzero(~np.isin(self._state[threads], allowed))
        if wrong.size:
            thread = int(threads[wrong[0]])
            raise EmulatorError(f"{instruction}\n  {batch.describe_thread(thread)}: the thread {text}")
        if "aligned" in instruction.modifiers:
            here = np.bincount(threads >> 5, minlength=batch.threads // 32)
            bad = np.flatnonzero((here > 0) & (here != batch.living_lanes()))
            if bad.size:
                thread = int(threads[threads >> 5 == bad[0]][0])
                raise DivergentBarrier(f"{instruction}\n  {batch.describe_thread(thread)}: not its whole warp is here")

    def report_deadlock(self) -> NoReturn:
        """Nobody can run: say who waits for whom."""
        batch = self._batch
        thread = int((self._state == _WAITING).argmax())
        mine = self._cluster == self._cluster[thread]
        missing = np.flatnonzero(mine & batch.living & (self._state == _AWAY))
        text = f"  {batch.describe_thread(thread)} waits at the barrier of its cluster"
        if missing.size:
            text += f", where {missing.size} threads have not arrived; {batch.describe_thread(int(missing[0]))} is one"
        raise Deadlock(f"threads wait at barriers of clusters that nobody can complete\n{text}")


def check_cluster_barrier(instruction: Instruction) -> None:
    """Refuse forms that are not implemented."""
    kind, rest = "".join(instruction.modifiers[1:2]), instruction.modifiers[2:]
    orders = {"arrive": ("release", "relaxed"), "wait": ("acquire",)}.get(kind)
    if orders is None or instruction.operands or any(flag not in (*orders, "aligned") for flag in rest):
        raise UnknownInstruction(f"{instruction}: {instruction.opcode.text} is not implemented")
