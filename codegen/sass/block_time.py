"""Time one block of a kernel among its neighbours: an iteration of the main loop, and what stands around it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from .board import Board
from .instruction import Instruction
from .issue import mean_iteration, simulate
from .load import sum_load
from .path import Trace
from .plan import Step, plan_steps
from .tensor import tensor_flops

TRIPS = 6  # iterations a simulation runs
TAIL_TRIPS = 4  # the same for the last, partly filled wave
EDGE_TRIPS = 3  # blocks that a slot runs one after the other to show the cost of prologue and epilogue
EDGE_ITERATIONS = 2  # of the main loop in such a block
PHASES = (0.0, 0.35, 0.7)  # by how much of an iteration co-resident blocks start apart
EDGE_OFFSET = 3000.0  # cycles over which the blocks of an edge simulation spread their starts
SATURATED = 0.97  # tensor cores this busy leave the other phases no room to differ


@dataclass(frozen=True, slots=True)
class BlockTime:
    """Cycles of a block when `resident` blocks share its multiprocessor."""

    resident: int
    loop_flops: float  # tensor FLOPs of the block in one iteration
    outside_flops: float  # and outside the loop: peeled or masked iterations on the way in and out
    cycles_per_iteration: float
    overhead_cycles: float  # of prologue and epilogue, as far as other blocks do not cover them
    pipes: dict[str, float]  # share of an iteration in which each pipe is busy
    spread: float  # (largest - smallest) / mean iteration over the start phases
    cycles_among: Callable[[int], float]  # of an iteration with so many blocks, for the last wave
    start_cycles: float = 0.0  # before the first tile of a block that works on one after another
    bound_by: str = ""  # what bounds an iteration, where it is none of the pipes

    def iterations(self, flops: float) -> float:
        """Trips of the main loop: from the FLOPs of the block, never from the code (docs/model.md)."""
        return max(0.0, (flops - self.outside_flops) / self.loop_flops)

    def cycles(self, flops: float, among: int) -> float:
        """Of a block with so many FLOPs, `among` blocks on its multiprocessor."""
        iteration = self.cycles_per_iteration if among == self.resident else self.cycles_among(among)
        return self.iterations(flops) * iteration + self.overhead_cycles


def flops_of(instructions: Sequence[Instruction]) -> int:
    """Tensor FLOPs of one warp."""
    return sum(tensor_flops(i.opcode) for i in instructions)


def simulated_block(
    trace: Trace, board: Board, warps: int, resident: int, phases: Sequence[float] = PHASES
) -> BlockTime:
    """The block of a kernel whose warps issue their own tensor instructions (mma.sync)."""
    if not trace.loop:  # then the whole kernel is the body: a slot runs block after block of it
        trace = Trace((), trace.prologue, ())
    body = trace.loop
    steps = plan_steps(body, board)
    busy = sum_load(steps, board).on_sm(warps * resident)
    iteration, spread = _steady(steps, board, warps, resident, phases, busy["tensor"])
    # In a few iterations the L2 port may run up a backlog that no steady state could: no pipe is busy above 100%.
    iteration = max(iteration, *busy.values())

    @lru_cache
    def among(blocks: int) -> float:
        alone = mean_iteration(simulate(steps, TAIL_TRIPS, warps, [0.0] * blocks, board))
        return max(alone, *(cycles * blocks / resident for cycles in busy.values()))

    return BlockTime(
        resident=resident,
        loop_flops=warps * flops_of(body),
        outside_flops=warps * (flops_of(trace.prologue) + flops_of(trace.epilogue)),
        cycles_per_iteration=iteration,
        overhead_cycles=_overhead(trace, board, warps, resident, iteration),
        pipes={name: cycles / iteration for name, cycles in busy.items()},
        spread=spread,
        cycles_among=among,
    )


def _steady(
    steps: Sequence[Step], board: Board, warps: int, resident: int, phases: Sequence[float], tensor_cycles: float
) -> tuple[float, float]:
    """(mean cycles of an iteration over the start phases, their relative spread).

    Two co-resident blocks lock into one of several relative phases, up to 22% apart; a lone block has but one.
    """
    times: list[float] = []
    for phase in phases if resident > 1 else phases[:1]:
        begins = staggered(phase, resident, times[0] if times else 0.0)
        times.append(mean_iteration(simulate(steps, TRIPS, warps, begins, board)))
        if tensor_cycles > SATURATED * times[0]:
            break
    mean = sum(times) / len(times)
    return mean, (max(times) - min(times)) / mean


def staggered(phase: float, blocks: int, period: float) -> list[float]:
    """Start cycles of co-resident blocks, each a `phase` of the period after the one before, within one period.

    >>> staggered(0.5, 3, 100.0)
    [0.0, 50.0, 0.0]
    """
    return [phase * block % 1.0 * period for block in range(blocks)]


def _overhead(trace: Trace, board: Board, warps: int, resident: int, iteration: float) -> float:
    """Cycles that prologue and epilogue add to a block.

    A slot that runs short blocks one after the other shows what they cost while other blocks cover them: 10-40% less
    than from a cold start.
    """
    if not trace.prologue and not trace.epilogue:
        return 0.0
    steps = plan_steps([*trace.prologue, *(trace.loop * EDGE_ITERATIONS), *trace.epilogue], board)
    begins = staggered(PHASES[1], resident, min(EDGE_OFFSET, EDGE_ITERATIONS * iteration))
    period = mean_iteration(simulate(steps, EDGE_TRIPS, warps, begins, board))
    return max(0.0, period - EDGE_ITERATIONS * iteration)


def blend(first: BlockTime, second: BlockTime, share: float) -> BlockTime:
    """A block that runs as `first` in a share of its iterations and as `second` in the others."""

    def mean(a: float, b: float) -> float:
        return share * a + (1 - share) * b

    return BlockTime(
        resident=first.resident,
        loop_flops=mean(first.loop_flops, second.loop_flops),
        outside_flops=mean(first.outside_flops, second.outside_flops),
        cycles_per_iteration=mean(first.cycles_per_iteration, second.cycles_per_iteration),
        overhead_cycles=mean(first.overhead_cycles, second.overhead_cycles),
        pipes={name: mean(first.pipes[name], second.pipes[name]) for name in first.pipes},
        spread=first.spread if share > 0.5 else second.spread,
        cycles_among=lambda blocks: mean(first.cycles_among(blocks), second.cycles_among(blocks)),
        start_cycles=mean(first.start_cycles, second.start_cycles),
        bound_by=first.bound_by if share > 0.5 else second.bound_by,
    )
