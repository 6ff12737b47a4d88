"""Time a block of a Hopper kernel by what its warpgroups do: products, ordinary work, and how little of it overlaps.

One step of the main loop, of all warpgroups of a block, takes

    products + ordinary + waits - CONCURRENCY * beside,    at least what the busiest pipe takes

products: the tensor cores' time, or the shared memory's if its traffic takes longer; ordinary: what the warps issue
themselves, stretch by stretch with all warpgroups in step; beside: the ordinary work that the code allows to run under
products, its own warpgroup's or, where they take turns, another's. docs/model.md says how near that comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .block_time import BlockTime, blend, flops_of
from .board import HBM_SHARE, Board, Work
from .instruction import Instruction
from .listing import Function
from .path import Trace
from .tensor import WARPS_OF_A_GROUP
from .warpgroup import Course, read_course

SHARED_BYTES_PER_CLOCK = 128.0  # of an SM [D]
CONCURRENCY = 0.38  # fitted: share of what could run beside products that does
L2_SHARE = 0.7  # fitted: of the table's rate of L2, what TMA of all SMs at once reaches
L2_PORT = 64.0  # bytes a clock that one SM takes from L2 where few SMs ask [D]
PRODUCT_LATENCY = 24.0  # cycles from the end of a product to what waits for it, as HMMA in a chain [P]
LOADS = 2.0  # latencies of L2 before a block's first product: a tensor map, then a tile [?]


class Copied(NamedTuple):
    """Bytes of a block and step that move without its warps."""

    loaded: float = 0.0  # from L2 to shared memory, by TMA
    reduced: float = 0.0  # from shared memory to L2, added up there
    multicast: float = 0.0  # to shared memory, of what another block has loaded


NOTHING = Copied()


@dataclass(frozen=True, slots=True)
class StepTime:
    """Cycles of an SM whose warpgroups go through a course together."""

    cycles: float
    products: float
    ordinary: float
    beside: float
    busy: dict[str, float]  # of each pipe; names in load.PIPE_NAMES


def step_time(
    course: Course, warpgroups: int, board: Board, copied: Copied = NOTHING, *, turns: bool, asking: float = 1.0
) -> StepTime:
    """The time of so many warpgroups; `turns`: the products of one may run beside the ordinary work of another.

    `asking` is the share of the SMs that have work, and share the rate of L2.
    """
    warps = WARPS_OF_A_GROUP * warpgroups
    busy = course.load.on_sm(warps)
    busy["tensor"] = warps * course.tensor_flops / board.wgmma_flops_per_clock_sm
    busy["shared"] += (warpgroups * course.operand_bytes + sum(copied)) / SHARED_BYTES_PER_CLOCK
    busy["l2"] += copied.loaded / min(L2_PORT, L2_SHARE * board.l2_bytes_per_clock_sm / asking)
    busy["l2"] += copied.reduced / board.path.reduction_bytes_per_clock
    products = max(busy["tensor"], busy["shared"])
    ordinary = own = 0.0
    for stretch in course.stretches:
        together = max(stretch.alone, *(v for name, v in stretch.load.on_sm(warps).items() if name != "l2"))
        ordinary += together
        own += min(together, warps * stretch.beside / board.wgmma_flops_per_clock_sm)
    others = min(ordinary, products * (1 - 1 / warpgroups)) if turns else 0.0
    beside = min(own + others, products + ordinary)
    waits = PRODUCT_LATENCY * sum(stretch.waits for stretch in course.stretches)
    cycles = max(products + ordinary + waits - CONCURRENCY * beside, *busy.values())
    return StepTime(cycles, products, ordinary, beside, busy)


def warpgroup_block(function: Function, board: Board, work: Work, resident: int) -> BlockTime:
    """The block of a kernel whose tensor instructions are those of warpgroups."""
    trace = function.trace if work.rare_share >= 1 else function.short_trace
    main = _block(function, trace.loop, trace, board, work, resident)
    twin = function.twin
    if not twin or work.twin_share <= 0:
        return main
    return blend(_block(function, twin, trace, board, work, resident), main, work.twin_share)


def _block(
    function: Function, loop: tuple[Instruction, ...], trace: Trace, board: Board, work: Work, resident: int
) -> BlockTime:
    """A block that stays in one loop."""
    computing = work.warps - _producer_warps(function, work)
    warpgroups = computing // WARPS_OF_A_GROUP * resident
    course = read_course(loop, board)
    loop_flops = computing * course.tensor_flops
    share = loop_flops * resident / work.tensor_flops  # of the launch
    copied = Copied(*(share * each for each in (work.loaded_bytes, work.reduced_bytes, work.multicast_bytes)))
    asking = min(1.0, work.blocks / board.sms)
    step = step_time(course, warpgroups, board, copied, turns=course.turns or resident > 1, asking=asking)
    before, after = (
        step_time(read_course(way, board), warpgroups, board, turns=False).cycles
        for way in (trace.prologue, trace.epilogue)
    )
    loads = LOADS * board.l2_latency + work.first_bytes / min(L2_PORT, hbm_bytes_per_clock_sm(board) / asking)
    exposed = max(0.0, loads - after) if work.persistent else loads  # those of the next tile run under the end of one
    return BlockTime(
        resident=resident,
        loop_flops=loop_flops,
        outside_flops=float(computing * (flops_of(trace.prologue) + flops_of(trace.epilogue))),
        cycles_per_iteration=step.cycles,
        overhead_cycles=before + after + exposed,
        pipes={name: cycles / step.cycles for name, cycles in step.busy.items()},
        spread=0.0,
        cycles_among=lambda blocks: step.cycles * blocks / resident,
        start_cycles=loads - exposed,
        bound_by=_sentence(step),
    )


def hbm_bytes_per_clock_sm(board: Board) -> float:
    """An SM's share of the memory's rate."""
    return HBM_SHARE * board.hbm_gb_per_s / board.clock_ghz / board.sms


def _producer_warps(function: Function, work: Work) -> int:
    """Warps of a block that only copy: those that gave registers away, if nobody says."""
    if work.producer_warps is not None:
        return work.producer_warps
    gives_away = any(i.base == "USETMAXREG" for i in function.instructions)
    return WARPS_OF_A_GROUP if gives_away and work.warps > WARPS_OF_A_GROUP else 0


def _sentence(step: StepTime) -> str:
    waiting = step.cycles - step.products
    return (
        f"the order of the warpgroups' work: products take {step.products:.0f} of a step's {step.cycles:.0f} cycles, "
        f"and of {step.ordinary:.0f} cycles of other work {waiting:.0f} are not hidden"
    )
