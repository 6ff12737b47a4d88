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
FIRST_OFFSET = 3000.0  # cycles that stand for an iteration as long as none has been simulated
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

    def iterations(self, flops: float) -> float:
        """Trips of the main loop: from the FLOPs of the block, never from the code (issue_model.md section 9)."""
        return max(0.0, (flops - self.outside_flops) / self.loop_flops)

    def cycles(self, flops: float, among: int) -> float:
        """Of a block with so many FLOPs, `among` blocks on its multiprocessor."""
        iteration = self.cycles_per_iteration if among == self.resident else self.cycles_among(among)
        return self.iterations(flops) * iteration + self.overhead_cycles


def flops_of(instructions: Sequence[Instruction]) -> int:
    """Tensor FLOPs of one warp."""
    return sum(tensor_flops(i.opcode) for i in instructions)


def simulated_block(trace: Trace, board: Board, warps: int, resident: int) -> BlockTime:
    """The block of a kernel whose warps issue their own tensor instructions (mma.sync)."""
    if not trace.loop:  # then the whole kernel is the body: a slot runs block after block of it
        trace = Trace((), trace.prologue, ())
    body = trace.loop
    steps = plan_steps(body, board)
    busy = sum_load(steps, board).on_sm(warps * resident)
    iteration, spread = _steady(steps, board, warps, resident, busy["tensor"])
    # In a few iterations the L2 port may run up a backlog that no steady state could: no pipe is busy above 100%.
    iteration = max(iteration, *busy.values())

    @lru_cache
    def among(blocks: int) -> float:
        return mean_iteration(simulate(steps, TAIL_TRIPS, warps, blocks, board))

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
    steps: Sequence[Step], board: Board, warps: int, resident: int, tensor_cycles: float
) -> tuple[float, float]:
    """(mean cycles of an iteration over the start phases, their relative spread).

    Two co-resident blocks lock into one of several relative phases, up to 22% apart; a lone block has but one.
    """
    times: list[float] = []
    for phase in PHASES if resident > 1 else PHASES[:1]:
        offset = phase * (times[0] if times else FIRST_OFFSET)
        times.append(mean_iteration(simulate(steps, TRIPS, warps, resident, board, offset)))
        if tensor_cycles > SATURATED * times[0]:
            break
    mean = sum(times) / len(times)
    return mean, (max(times) - min(times)) / mean


def _overhead(trace: Trace, board: Board, warps: int, resident: int, iteration: float) -> float:
    """Cycles that prologue and epilogue add to a block.

    A slot that runs short blocks one after the other shows what they cost while other blocks cover them: 10-40% less
    than from a cold start.
    """
    if not trace.prologue and not trace.epilogue:
        return 0.0
    steps = plan_steps([*trace.prologue, *(trace.loop * EDGE_ITERATIONS), *trace.epilogue], board)
    offset = PHASES[1] * FIRST_OFFSET if resident > 1 else 0.0
    period = mean_iteration(simulate(steps, EDGE_TRIPS, warps, resident, board, offset))
    return max(0.0, period - EDGE_ITERATIONS * iteration)
