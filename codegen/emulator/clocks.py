"""Keep vector clocks: what each warp of a cluster knows of the others, and of the loads that mbarriers count.

Most blocks are a cluster by themselves.

An arrival at an mbarrier hands on what its warp knows to those who have seen the phase complete; named barriers and
those of clusters join those who meet. A bulk load is ordered after the warp that issues it, and before the completion
of its phase. A second clock holds what of the first a fence.proxy.async has covered.

Scopes are not looked at: an arrival that is a release for its own block hands on what its warp knows to the other
blocks of the cluster as well. Of a thread's own accesses these need to be ordered after its reads alone, for no store
of a thread to another block's shared memory is implemented.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import EmulatorError
from .race_log import RaceLog

if TYPE_CHECKING:
    from .batch import Batch

Array: TypeAlias = "NDArray[Any]"

_MBARRIERS = 128  # of a block whose traffic is told apart


@dataclass(slots=True, eq=False)
class Traffic:
    """An mbarrier: its component, phases completed, what arrivals knew, and who made it when."""

    component: int
    knowledge: Array  # [2, components]: clock, and what of it is fenced
    completed: Array
    warp: int
    time: int
    at: int
    phases: int = 0


class Clocks:
    """Of all warps of a batch. Components are the warps of a cluster, then its mbarriers."""

    def __init__(self, batch: Batch, log: RaceLog) -> None:
        self._batch, self._log = batch, log
        self._warps = batch.cluster_blocks * batch.warps_per_block
        warps = batch.threads // 32
        self._own = batch.warp_in_cluster
        # [clock, what of it is fenced][warp of the batch, component]
        self.known = np.zeros((2, warps, self._warps + batch.cluster_blocks * _MBARRIERS), "i4")
        self.known[0, np.arange(warps), self._own] = 1
        self._traffic: dict[int, Traffic] = {}
        self._mbarriers = np.zeros(batch.blocks, "i4")
        self._published: dict[int, Array] = {}  # by warp: what it knew at its last fence.mbarrier_init
        # The last access to a block by each component of another block: its time, its place and the instruction.
        self.visits: dict[tuple[int, int], tuple[int, int, int]] = {}

    def now(self, warps: Array) -> Array:
        time: Array = self.known[0, warps, self._own[warps]]
        return time

    def _tick(self, warps: Array | int) -> None:
        """What these warps do from here on is not covered by what they have just handed on."""
        self.known[0, warps, self._own[warps]] += 1

    # ---- barriers of threads

    def arrive(self, warps: Array, relaxed: bool = False) -> Array:
        """Warps of one cluster come to a barrier: what they know, to be handed to `release`.

        A relaxed arrival hands on no more than what a fence.mbarrier_init has published.
        """
        if relaxed:
            nothing = np.zeros_like(self.known[:, 0])
            return np.max([self._published.get(warp, nothing) for warp in warps.tolist()], axis=0)
        known: Array = self.known[:, warps].max(1)
        self._tick(warps)
        return known

    def release(self, known: list[Array], waiting: Array) -> None:
        """Warps go on behind a barrier and know what all who arrived knew."""
        self.known[:, waiting] = np.maximum(self.known[:, waiting], np.max(known, axis=0)[:, None])

    def barrier_all(self, low: int, high: int) -> None:
        """All warps low .. high, whole blocks, meet block by block."""
        teams = self._batch.teams
        of_team = self._batch.warps_per_block // teams
        known = self.known[:, low:high].reshape(2, teams, -1, of_team, self.known.shape[2])
        known[:] = known.max((1, 3), keepdims=True)
        self._tick(np.arange(low, high))

    def fence(self, threads: Array) -> None:
        """fence.proxy.async."""
        warps = np.unique(threads >> 5)
        self.known[1, warps] = np.maximum(self.known[1, warps], self.known[0, warps])
        self._tick(warps)

    def publish(self, threads: Array) -> None:
        """fence.mbarrier_init."""
        warps = np.unique(threads >> 5)
        self._published.update((warp, self.known[:, warp].copy()) for warp in warps.tolist())
        self._tick(warps)

    # ---- mbarriers

    def made(self, thread: int, place: int, at: int) -> None:
        """mbarrier.init."""
        warp, block = thread >> 5, int(self._batch.block_of[thread])
        before = self._traffic.get(place)
        if before is None and self._mbarriers[block] == _MBARRIERS:
            raise EmulatorError(f"more than {_MBARRIERS} mbarriers in a block: check_races does not tell them apart")
        first = self._warps + block % self._batch.cluster_blocks * _MBARRIERS
        component = first + int(self._mbarriers[block]) if before is None else before.component
        self._mbarriers[block] += before is None
        nothing = np.zeros_like(self.known[:, 0])
        phases = 0 if before is None else before.phases
        time = int(self.known[0, warp, self._own[warp]])
        self._traffic[place] = Traffic(component, nothing, nothing, warp, time, at, phases)
        self._tick(warp)

    def traffic_of(self, place: int, warp: int, at: int) -> Traffic:
        """The mbarrier, whose init the warp must know of."""
        traffic = self._traffic[place]
        if self.known[0, warp, self._own[traffic.warp]] < traffic.time:
            where, before, maker = (np.array([value]) for value in (8 * place, traffic.at, self._own[traffic.warp]))
            self._log.add(self._batch, "RAW", where, before, maker, self._own[[warp]], at)
        return traffic

    def arrived(self, thread: int, place: int, at: int) -> None:
        """A thread arrives at an mbarrier."""
        warp = thread >> 5
        traffic = self.traffic_of(place, warp, at)
        traffic.knowledge = np.maximum(traffic.knowledge, self.known[:, warp])
        self.visit(thread, place, int(self._own[warp]), int(self.known[0, warp, self._own[warp]]), at)
        self._tick(warp)

    def visit(self, thread: int, place: int, component: int, time: int, at: int) -> None:
        """A thread has accessed an mbarrier, or bytes that it counts: another block must live on for them."""
        block = 8 * place // self._batch.shared_stride
        if block != self._batch.block_of[thread]:
            self.visits[block, component] = (time, place, at)

    def outlived(self, block: int) -> Array:
        """All threads of a block have exited: what its warps knew at last."""
        warps = self._batch.of_block(np.arange(len(self._own)), block).reshape(-1)
        known: Array = self.known[0, warps].max(0)
        return known

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
            traffic = self.traffic_of(place, warp, at)
            self.known[:, warp] = np.maximum(self.known[:, warp], traffic.completed)
