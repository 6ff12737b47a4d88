"""Estimate a block of a Hopper kernel whose warpgroups feed the tensor cores asynchronously (wgmma).

Stall counts say nothing of how long an HGMMA runs, and producer and consumer warps run different code, so nothing is
simulated. An iteration takes the tensor cores' time plus most of the exponentials' time: in FlashAttention-3's
published forward figures (H100, d = 64, 128, 256: 497, 648, 756 TFLOP/s) tensor + 0.9 * special is within 4% of all
three. A forward whose warpgroups wait for their own products (Triton's; docs/model.md) comes out much too fast, and so
does a backward, which waits for shared memory too.
"""

from .block_time import BlockTime, flops_of
from .board import Board
from .instruction import Instruction
from .load import Load, sum_load
from .path import Trace
from .plan import plan_steps
from .rates import ASYNCHRONOUS_OPCODES
from .tensor import WARPS_OF_A_GROUP, shared_operand_bytes

SHARED_BYTES_PER_CLOCK = 128  # of an SM
SPECIAL_EXPOSED = 0.9  # fitted: share of the exponentials that nothing covers


def warpgroup_block(trace: Trace, board: Board, warps: int, resident: int, specialised: bool) -> BlockTime:
    """The block of a wgmma kernel; `specialised`: one of its warpgroups only loads (it gave registers away)."""
    consumers = warps - WARPS_OF_A_GROUP if specialised and warps > WARPS_OF_A_GROUP else warps
    loop_flops = consumers * flops_of(trace.loop)
    load = _synchronous_load(trace.loop, board).on_sm(consumers * resident)
    operands = sum(shared_operand_bytes(i.opcode, i.text) for i in trace.loop) * consumers // WARPS_OF_A_GROUP
    load["shared"] += operands * resident / SHARED_BYTES_PER_CLOCK
    load["tensor"] = loop_flops * resident / board.wgmma_flops_per_clock_sm
    iteration = max(load["tensor"] + SPECIAL_EXPOSED * load["special"], *load.values())
    # Nothing overlaps a block's start and end: its stall counts, and the first load's and last store's way to L2 [?].
    edges = sum(max(1, i.control.stall) for i in (*trace.prologue, *trace.epilogue)) + 2 * board.l2_latency
    return BlockTime(
        resident=resident,
        loop_flops=loop_flops,
        outside_flops=consumers * (flops_of(trace.prologue) + flops_of(trace.epilogue)),
        cycles_per_iteration=iteration,
        overhead_cycles=float(edges),
        pipes={name: cycles / iteration for name, cycles in load.items()},
        spread=0.0,
        cycles_among=lambda blocks: iteration * blocks / resident,
    )


def _synchronous_load(instructions: tuple[Instruction, ...], board: Board) -> Load:
    """What the warps issue themselves; an asynchronous instruction takes an issue slot."""
    own = [i for i in instructions if i.base not in ASYNCHRONOUS_OPCODES]
    load = sum_load(plan_steps(own, board), board)
    return load._replace(issue=float(len(instructions)))
