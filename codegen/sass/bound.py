"""Bound a time from below without simulating: the busiest pipe, no waiting (a few milliseconds)."""

from .block_time import flops_of
from .board import Board, Work
from .errors import MissingWork
from .kernel_time import memory_seconds, serial_seconds
from .listing import Function
from .load import sum_load
from .plan import plan_steps
from .rates import ASYNCHRONOUS_OPCODES
from .tensor import WARPGROUP_TENSOR


def static_bound(function: Function, board: Board, work: Work) -> float:
    """Seconds below which the launch cannot come, however well its warps overlap.

    Each pipe works off the iterations of all warps; with equal blocks the fullest multiprocessor counts. Prologue,
    epilogue and waiting are left out. For discarding a candidate before it is simulated.
    """
    memory, serial = memory_seconds(board, work), serial_seconds(board, work)
    trace = function.trace
    if not trace.uses_tensor_cores:
        return memory + serial
    if work.rare_share < 1:
        trace = function.short_trace
    body = trace.loop or trace.prologue
    per_warp = flops_of(body)
    if work.tensor_flops <= 0:
        raise MissingWork(f"{function.name} takes its trip count from Work.tensor_flops, which is {work.tensor_flops}")
    own = [i for i in body if i.base not in ASYNCHRONOUS_OPCODES]
    load = sum_load(plan_steps(own, board), board)
    # Warp-iterations on the fullest SM, counting those outside the loop as if they were of it.
    blocks = -(-work.blocks // board.sms) if work.unequal is None else work.blocks / board.sms
    passes = blocks * work.tensor_flops / work.blocks / per_warp
    busy = load.on_sm(passes)
    if any(i.base in WARPGROUP_TENSOR for i in body):
        busy["tensor"] = passes * per_warp / board.wgmma_flops_per_clock_sm
    return max(max(busy.values()) / board.clock_ghz / 1e9, memory) + serial
