"""Count arrivals and bytes at mbarriers, and let threads sleep until the phase that they wait for is complete.

An mbarrier has a count, pending arrivals, pending bytes (tx) and a phase. When neither arrivals nor bytes are pending
the phase flips and `count` arrivals are pending again. A wait with parity p succeeds when the current phase is not p.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .access import Access
from .cluster_addresses import check_alive
from .errors import Deadlock, EmulatorError

if TYPE_CHECKING:
    from .batch import Batch

Array: TypeAlias = "NDArray[Any]"

LIMIT = (1 << 20) - 1
"""Most arrivals that a barrier counts, and most bytes that may be pending."""

_AWAKE = -1
_FUTILE = 8  # rounds of waits that gave up with nothing done in between: then nothing will ever happen


class Mbarriers:
    """The barriers of a batch, numbered by their place in its shared memory in units of 8 bytes."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        words = batch.shared.size // 8 if batch.program.uses_async_proxy else 0
        self._count = np.zeros(words, "i4")  # 0: no barrier here
        self._pending = np.zeros(words, "i4")
        self._bytes = np.zeros(words, "i4")
        self.phase = np.zeros(words, "i1")
        self._sleeps_at = np.full(batch.threads, _AWAKE, "i8")
        self._sleepers = 0
        self._holds_company = True
        self._given_up_at, self._futile = -1, 0

    def start(self) -> None:
        """Begin with new blocks: no barriers, nobody sleeps."""
        self._count.fill(0)
        self._sleeps_at.fill(_AWAKE)
        self._sleepers = 0
        self._holds_company = True

    # ---- barriers

    def init(self, at: int, count: int) -> None:
        """mbarrier.init."""
        self._count[at] = self._pending[at] = count
        self._bytes[at] = self.phase[at] = 0

    def invalidate(self, at: int) -> None:
        """mbarrier.inval."""
        self._count[at] = 0

    def exists(self, at: Array) -> Array:
        """Which of these places hold a barrier."""
        found: Array = self._count[at] > 0
        return found

    def expect(self, at: int, size: int) -> str | None:
        """Bytes will come (negative: have come); says what is wrong, if anything."""
        self._bytes[at] += size
        if abs(int(self._bytes[at])) > LIMIT:
            return f"{int(self._bytes[at])} bytes pending; an mbarrier counts up to {LIMIT}"
        self._complete(at)
        return None

    def arrive(self, at: int, count: int, size: int) -> str | None:
        """Arrive and expect bytes, as one; says what is wrong, if anything."""
        self._pending[at] -= count
        if self._pending[at] < 0:
            return f"more arrivals than the count of {int(self._count[at])}"
        return self.expect(at, size)

    def _complete(self, at: int) -> None:
        self._batch.writes += 1
        if self._pending[at] or self._bytes[at]:
            return
        self.phase[at] ^= 1
        self._pending[at] = self._count[at]
        if self._batch.order is not None:
            self._batch.order.clocks.completed(at)
        if self._sleepers:
            woken = self._sleeps_at == at
            self._sleeps_at[woken] = _AWAKE
            self._sleepers -= int(woken.sum())
            self._holds_company = True

    # ---- sleepers

    def sleep(self, threads: Array, at: Array) -> None:
        """These threads wait for the current phase of these barriers to complete."""
        self._sleeps_at[threads] = at
        self._sleepers += threads.size

    @property
    def held(self) -> Array | None:
        """Threads that must not run now, None if there are none: those asleep, and the others of their warpgroups.

        The others must not run ahead to what the warp or the warpgroup does together. Only when nobody else can run do
        they go on.
        """
        if not self._sleepers:
            return None
        asleep = self._sleeps_at != _AWAKE
        if self._holds_company:
            company = self._batch.company
            return np.repeat(asleep.reshape(-1, company).any(1), company)
        return asleep

    def wake_somebody(self) -> bool:
        """Nobody can run: let the rest of the sleepers' warpgroups go on, then let the sleepers' waits give up."""
        if not self._sleepers:
            return False
        if self._holds_company:
            self._holds_company = False
            return True
        batch = self._batch
        self._futile = self._futile + 1 if batch.writes == self._given_up_at else 0
        self._given_up_at = batch.writes
        asleep = self._sleeps_at != _AWAKE
        if self._futile > _FUTILE:
            self._report_deadlock(asleep)
        batch.pc[asleep] += 1  # the wait that ends a basic block has already said that it failed
        self._sleeps_at.fill(_AWAKE)
        self._sleepers = 0
        self._holds_company = True
        return True

    def _report_deadlock(self, asleep: Array) -> NoReturn:
        batch = self._batch
        lines = []
        for block in np.unique(batch.pc[asleep]):
            threads = np.flatnonzero(asleep & (batch.pc == block))
            at = int(self._sleeps_at[threads[0]])
            instruction = batch.program.blocks[block].end
            lines.append(
                f"  {batch.describe_thread(int(threads[0]))} and {threads.size - 1} more wait at shared address "
                f"{8 * at % batch.shared_stride:#x} ({int(self._pending[at])} of {int(self._count[at])} arrivals and "
                f"{int(self._bytes[at])} bytes pending in phase {int(self.phase[at])}); {instruction}"
            )
        raise Deadlock("threads wait at mbarriers whose phase nobody completes\n" + "\n".join(lines[:8]))


# ---- what generated code calls


def init_mbarrier(access: Access, address: Array, count: Array, lanes: Array | None, at: int) -> None:
    """mbarrier.init."""
    if lanes is not None and not lanes.size:
        return
    where = access.in_shared_uncounted(address, 8, lanes, at, 8) >> 3
    counts = np.broadcast_to(count, access.n)[access.active(lanes)]
    threads = access.threads(lanes)
    for k, (place, number) in enumerate(zip(where.tolist(), counts.tolist(), strict=True)):
        if not 1 <= number <= LIMIT:
            access.fail(EmulatorError, at, lanes, k, f"the count {number} of an mbarrier must be 1 to {LIMIT}")
        access.batch.mbarriers.init(place, number)
        if access.batch.order is not None:
            access.batch.order.clocks.made(int(threads[k]), place, at)
    access.batch.writes += 1


def invalidate_mbarrier(access: Access, address: Array, lanes: Array | None, at: int) -> None:
    """mbarrier.inval."""
    for place in mbarrier_places(access, address, lanes, at).tolist():
        access.batch.mbarriers.invalidate(place)


def mbarrier_places(
    access: Access, address: Array, lanes: Array | None, at: int, in_cluster: bool = False
) -> Array:  # fmt: skip
    """The places of the barriers at these addresses, of any block of the cluster; an error where there is none."""
    if lanes is not None and not lanes.size:
        return np.zeros(0, "i8")
    find = access.in_cluster if in_cluster else access.in_shared_uncounted
    where: Array = find(address, 8, lanes, at, 8) >> 3
    if in_cluster and access.batch.cluster_blocks > 1:
        check_alive(access, 8 * where // access.batch.shared_stride, lanes, at)
    exists = access.batch.mbarriers.exists(where)
    if not exists.all():
        bad = int((~exists).argmax())
        place = 8 * int(where[bad]) % access.batch.shared_stride
        access.fail(EmulatorError, at, lanes, bad, f"no mbarrier was initialised at shared address {place:#x}")
    return where


def arrive_at_mbarrier(
    access: Access, address: Array, count: Array, size: Array, in_cluster: bool, lanes: Array | None, at: int
) -> Array:
    """mbarrier.arrive and .arrive.expect_tx: the phase of each active thread's barrier before it."""
    where = mbarrier_places(access, address, lanes, at, in_cluster)
    active, barriers = access.active(lanes), access.batch.mbarriers
    counts = np.broadcast_to(count, access.n)[active].tolist()
    sizes = np.broadcast_to(size, access.n)[active].tolist()
    before = np.zeros(where.size, "u8")
    for k, place in enumerate(where.tolist()):
        before[k] = barriers.phase[place]
        if access.batch.order is not None:
            access.batch.order.clocks.arrived(int(active[k]) + access.low, place, at)
        wrong = barriers.arrive(place, counts[k], sizes[k])
        if wrong:
            access.fail(EmulatorError, at, lanes, k, wrong)
    return before


def expect_bytes(access: Access, address: Array, size: Array, sign: int, lanes: Array | None, at: int) -> None:
    """mbarrier.expect_tx (sign 1) and .complete_tx (sign -1)."""
    where = mbarrier_places(access, address, lanes, at)
    sizes = np.broadcast_to(size, access.n)[access.active(lanes)]
    for k, (place, amount) in enumerate(zip(where.tolist(), sizes.tolist(), strict=True)):
        wrong = access.batch.mbarriers.expect(place, sign * amount)
        if wrong:
            access.fail(EmulatorError, at, lanes, k, wrong)


def test_mbarrier(access: Access, address: Array, parity: Array, lanes: Array | None, at: int) -> tuple[Array, Array]:
    """try_wait and test_wait: places [n], and whether the phase of that parity is complete [n], true if inactive."""
    places, passed = np.zeros(access.n, "i8"), np.ones(access.n, bool)
    active = access.active(lanes)
    places[active] = where = mbarrier_places(access, address, lanes, at)
    passed[active] = access.batch.mbarriers.phase[where] != (np.broadcast_to(parity, access.n)[active] & 1)
    if access.batch.order is not None:
        through = active[passed[active]]
        access.batch.order.clocks.waited(through + access.low, places[through], at)
    return places, passed
