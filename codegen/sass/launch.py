"""Fill the multiprocessors with the blocks of a launch: full waves and a tail, or list scheduling of unequal blocks."""

import heapq
from collections.abc import Callable, Iterable

from .board import Work
from .errors import MissingWork


def waves_cycles(blocks: int, sms: int, resident: int, block_cycles: Callable[[int], float]) -> float:
    """Cycles of a launch of equal blocks: waves of `resident` blocks an SM, then what is left, spread over the SMs.

    `block_cycles(n)` is the time of a block among n on its SM.

    >>> waves_cycles(blocks=5, sms=2, resident=2, block_cycles=lambda n: 10.0 * n)
    30.0
    """
    full, rest = divmod(blocks, sms * resident)
    cycles = full * block_cycles(resident) if full else 0.0
    return cycles + (block_cycles(-(-rest // sms)) if rest else 0.0)


def list_schedule(durations: Iterable[float], slots: int) -> float:
    """When the last block ends if blocks start in order, each in the slot that is free first.

    >>> list_schedule([3.0, 2.0, 2.0], slots=2)
    4.0
    """
    free = [0.0] * slots
    for duration in durations:
        heapq.heapreplace(free, free[0] + duration)
    return max(free)


def shared_out(durations: Iterable[float], blocks: int) -> float:
    """When the last block ends if each works on one tile after another, the longest first, dealt to and fro.

    >>> shared_out([1.0, 4.0, 3.0, 2.0], blocks=2)
    5.0
    """
    ends = [0.0] * blocks
    for k, duration in enumerate(sorted(durations, reverse=True)):
        turn, place = divmod(k, blocks)
        ends[place if turn % 2 == 0 else blocks - 1 - place] += duration
    return max(ends)


def relative_work(work: Work) -> tuple[list[float], int]:
    """The pattern of `work.unequal`, scaled to a mean of 1, and how often the launch repeats it."""
    pattern = [float(share) for share in work.unequal or (1.0,)]
    repeats, rest = divmod(work.blocks, len(pattern))
    if rest or not sum(pattern) > 0:
        raise MissingWork(
            f"unequal has {len(pattern)} entries with sum {sum(pattern)}, the launch {work.blocks} blocks; give one "
            "positive number a block, or a pattern whose length divides the number of blocks"
        )
    mean = sum(pattern) / len(pattern)
    return [share / mean for share in pattern], repeats
