"""Let threads wait at numbered barriers and release them when enough have arrived."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import Deadlock, DivergentBarrier, EmulatorError

if TYPE_CHECKING:
    from .batch import Batch
    from .instructions import Instruction

Array: TypeAlias = "NDArray[Any]"

BARRIERS = 16
_RUNNING = -1


class Barriers:
    """State of the barriers of all blocks of a batch; a block has 16 of them."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._waiting_at = np.full(batch.threads, _RUNNING, "i1")
        self._waiting = 0
        self._arrived = np.zeros((batch.blocks, BARRIERS), "i4")
        self._expected = np.zeros((batch.blocks, BARRIERS), "i4")  # 0: all threads of the block that have not exited
        self._known: dict[tuple[int, int], list[Array]] = {}  # what those who arrived know, for the race detector

    @property
    def waiting(self) -> Array | None:
        """Which threads wait; None if nobody does."""
        return self._waiting_at != _RUNNING if self._waiting else None

    @property
    def unfinished(self) -> int:
        """Barriers at which threads have arrived (`bar.arrive`) that nobody waits for: legal when the kernel ends."""
        return int((self._arrived > 0).sum())

    def pass_together(self, low: int, high: int) -> None:
        """Whole blocks, every thread of them, meet at a barrier of all threads: nobody has to wait."""
        batch = self._batch
        batch.counters.barriers += (high - low) // batch.threads_per_block
        if batch.detector is not None:
            batch.detector.barrier_all(low // 32, high // 32)

    def arrive(self, threads: Array, number: Array, count: Array | None, ended: int) -> None:
        """Threads come to the barrier that ends a basic block; those of `bar.arrive` do not wait."""
        batch = self._batch
        instruction = batch.program.blocks[ended].all_instructions[-1]
        waits = "arrive" not in instruction.modifiers
        if instruction.base == "bar" or "aligned" in instruction.modifiers:
            self._check_whole_warps(threads, instruction)
        if number.max() >= BARRIERS or (count is not None and ((count % 32).any() or not count.all())):
            raise EmulatorError(f"{instruction}: barriers are 0 to 15, their thread counts positive multiples of 32")
        block = batch.block_of[threads]
        expected = np.zeros(threads.size, "i4") if count is None else count.astype("i4")
        open_ = self._arrived[block, number] > 0
        conflict = open_ & (self._expected[block, number] != expected)
        if conflict.any():
            bad = int(conflict.argmax())
            have = int(self._expected[block[bad], number[bad]]) or "all"
            want = int(expected[bad]) or "all"
            where = batch.describe_thread(int(threads[bad]))
            raise EmulatorError(
                f"{instruction}\n  {where}: barrier {number[bad]} is open for {have} threads, not {want}"
            )
        self._expected[block, number] = expected
        np.add.at(self._arrived, (block, number), 1)
        if waits:
            self._waiting_at[threads] = number
            self._waiting += threads.size
        for one, slot in {(int(a), int(b)) for a, b in zip(block, number, strict=True)}:
            mine = threads[(block == one) & (number == slot)]
            if batch.detector is not None:
                self._known.setdefault((one, slot), []).append(batch.detector.arrive(np.unique(mine >> 5)))
            self._release(one, slot, instruction)

    def _check_whole_warps(self, threads: Array, instruction: Instruction) -> None:
        batch = self._batch
        arrived = np.bincount(threads >> 5, minlength=batch.threads // 32)
        living = batch.living_lanes()
        bad = np.flatnonzero((arrived > 0) & (arrived != living))
        if bad.size:
            warp = int(bad[0])
            lanes = (threads[threads >> 5 == warp] & 31).tolist()
            where = batch.describe_thread(int(threads[threads >> 5 == warp][0]))
            raise DivergentBarrier(
                f"{instruction}\n  {where}: only lanes {lanes} of {int(living[warp])} living ones of the warp arrive"
            )

    def _release(self, block: int, number: int, instruction: Instruction | None = None) -> None:
        batch = self._batch
        arrived = int(self._arrived[block, number])
        needed = int(self._expected[block, number]) or batch.living_threads(block)
        if arrived > needed:
            raise EmulatorError(f"{instruction}: {arrived} threads arrived at barrier {number} for {needed}")
        if arrived < needed or not arrived:
            return
        mine = batch.of_block(self._waiting_at, block)
        released = mine == number
        mine[released] = _RUNNING
        self._waiting -= int(released.sum())
        self._arrived[block, number] = 0
        batch.counters.barriers += 1
        known = self._known.pop((block, number), [])
        if batch.detector is not None and known:
            threads = batch.of_block(np.arange(batch.threads), block)[released]
            batch.detector.release(known, np.unique(threads >> 5))

    def recheck(self) -> None:
        """Threads have exited: barriers of all living threads may now be complete."""
        if self._waiting:
            for block, number in zip(*np.nonzero((self._arrived > 0) & (self._expected == 0)), strict=True):
                self._release(int(block), int(number))

    def report_deadlock(self) -> None:
        """Nobody can run: say who waits for what."""
        batch = self._batch
        lines = []
        for block, number in zip(*np.nonzero(self._arrived), strict=True):
            needed = int(self._expected[block, number]) or batch.living_threads(int(block))
            threads = np.flatnonzero((self._waiting_at == number) & (batch.block_of == block))
            if not threads.size:
                continue
            ending = batch.program.blocks[int(batch.pc[threads[0]]) - 1].end
            lines.append(
                f"  {batch.describe_thread(int(threads[0]))} and {threads.size - 1} more wait at barrier {number}, "
                f"{int(self._arrived[block, number])} of {needed} arrived; {ending}"
            )
        raise Deadlock("all threads wait at barriers that nobody can complete\n" + "\n".join(lines[:8]))
