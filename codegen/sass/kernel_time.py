"""Predict the time of a whole launch: blocks, waves, a tail, the memory's limit; and say what bounds it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .block_time import PHASES, BlockTime, blend, simulated_block
from .board import HBM_SHARE, Board, Work
from .errors import MissingWork
from .launch import list_schedule, relative_work, shared_out, waves_cycles
from .listing import Function
from .load import PIPE_NAMES
from .occupancy import blocks_per_sm
from .path import Trace
from .warpgroup_time import warpgroup_block

LIMIT_SHARE = 0.9  # a pipe less busy than this does not bound a loop by itself
FULL_SHARE = 0.995  # nor one less busy than this a step of warpgroups, whose time says what else bounds it
FEW = 0.1  # a share of iterations too small for the start phases to matter
WASTED_SHARE = 0.15  # of the slots empty on average: worth a word in `bound_by`


@dataclass(frozen=True, slots=True)
class KernelTime:
    """A predicted time. Differences below 5% are noise, below 10% doubtful (docs/model.md)."""

    seconds: float
    cycles: float  # of the launch, at the board's clock
    tensor_flops: float
    blocks_per_sm: int  # resident at once: what fits, or fewer in a small launch
    waves: float  # blocks of the launch / blocks that run at once
    iterations: float  # of the main loop, of an average block
    cycles_per_iteration: float
    overhead_cycles: float  # of prologue and epilogue of a block, as far as other blocks do not cover them
    pipes: dict[str, float] = field(hash=False)  # share of the loop in which a pipe is busy; names in load.PIPE_NAMES
    spread: float  # (largest - smallest) / mean iteration over the start phases: the model's own uncertainty
    bound_by: str  # one sentence
    spills_in_loop: int  # instructions of an iteration that move registers to and from local memory

    @property
    def tflops(self) -> float:
        """10^12 FLOPs a second, of those that `Work.tensor_flops` counted."""
        return self.tensor_flops / self.seconds / 1e12


def predict_time(function: Function, board: Board, work: Work) -> KernelTime:
    """The time of one launch of `function` on `board`."""
    fitting = blocks_per_sm(function.registers, function.static_smem_bytes, work, board)
    resident = max(1, min(fitting, -(-work.blocks // board.sms)))
    trace = function.trace
    if not trace.uses_tensor_cores:
        return _memory_time(function, board, work, resident)
    if work.tensor_flops <= 0:
        raise MissingWork(f"{function.name} takes its trip count from Work.tensor_flops, which is {work.tensor_flops}")
    block = _block(function, board, work, resident)
    cycles = _launch_cycles(block, board, work)
    computing, memory = cycles / board.clock_ghz / 1e9, memory_seconds(board, work)
    seconds = max(computing, memory) + serial_seconds(board, work)
    sentence = _loop_sentence(block, board, work, cycles) if computing > memory else _memory_sentence(board, work)
    flops = work.tensor_flops / work.blocks
    return KernelTime(
        seconds=seconds,
        cycles=seconds * board.clock_ghz * 1e9,
        tensor_flops=work.tensor_flops,
        blocks_per_sm=resident,
        waves=work.blocks / (board.sms * resident),
        iterations=block.iterations(flops),
        cycles_per_iteration=block.cycles_per_iteration,
        overhead_cycles=block.overhead_cycles,
        pipes=block.pipes,
        spread=block.spread,
        bound_by=sentence,
        spills_in_loop=sum(i.spills for i in (trace if work.rare_share > 0.5 else function.short_trace).loop),
    )


def _block(function: Function, board: Board, work: Work, resident: int) -> BlockTime:
    """A block of the launch; with rare blocks in some iterations only, between the two extremes."""
    share = work.rare_share

    if function.trace.uses_warpgroups:
        return warpgroup_block(function, board, work, resident)

    def timed(trace: Trace, phases: Sequence[float] = PHASES) -> BlockTime:
        return simulated_block(trace, board, work.warps, resident, phases)

    if share >= 1 or function.short_trace == function.trace:
        return timed(function.trace)
    if share <= 0:
        return timed(function.short_trace)
    # One phase will do for the extreme that few iterations follow.
    with_rare = timed(function.trace, PHASES[:1] if share < FEW else PHASES)
    without = timed(function.short_trace, PHASES[:1] if share > 1 - FEW else PHASES)
    return blend(with_rare, without, share)


def memory_seconds(board: Board, work: Work) -> float:
    """What HBM and L2 need for the bytes of the launch; 0 if none are given."""
    hbm = (work.hbm_bytes or 0.0) / (HBM_SHARE * board.hbm_gb_per_s * 1e9)
    l2_rate = board.l2_bytes_per_clock_sm * board.sms * board.clock_ghz * 1e9
    return max(hbm, (work.l2_bytes or 0.0) / l2_rate)


def serial_seconds(board: Board, work: Work) -> float:
    """What a memset before the kernel, or a copy after it, takes by itself."""
    return work.serial_hbm_bytes / (HBM_SHARE * board.hbm_gb_per_s * 1e9)


def _memory_time(function: Function, board: Board, work: Work, resident: int) -> KernelTime:
    """A kernel without tensor instructions streams: its bytes decide."""
    seconds = memory_seconds(board, work) + serial_seconds(board, work)
    if seconds <= 0:
        raise MissingWork(
            f"{function.name} has no tensor instructions; give Work.hbm_bytes, from which its time follows"
        )
    return KernelTime(
        seconds=seconds,
        cycles=seconds * board.clock_ghz * 1e9,
        tensor_flops=work.tensor_flops,
        blocks_per_sm=resident,
        waves=work.blocks / (board.sms * resident),
        iterations=0.0,
        cycles_per_iteration=0.0,
        overhead_cycles=0.0,
        pipes={},
        spread=0.0,
        bound_by=_memory_sentence(board, work),
        spills_in_loop=0,
    )


def _launch_cycles(block: BlockTime, board: Board, work: Work) -> float:
    flops = work.tensor_flops / work.blocks
    if work.persistent:
        pattern, repeats = relative_work(work)
        durations = [block.cycles(flops * share, block.resident) for share in pattern]
        return block.start_cycles + shared_out(durations * repeats, board.sms)
    if work.unequal is None:
        return waves_cycles(work.blocks, board.sms, block.resident, lambda among: block.cycles(flops, among))
    pattern, repeats = relative_work(work)
    durations = [block.cycles(flops * share, block.resident) for share in pattern]
    return list_schedule(durations * repeats, board.sms * block.resident)


def _memory_sentence(board: Board, work: Work) -> str:
    if memory_seconds(board, Work(work.blocks, work.warps, hbm_bytes=work.hbm_bytes)) < memory_seconds(board, work):
        return f"L2 bandwidth: {(work.l2_bytes or 0) / 1e6:.1f} MB"
    return f"memory bandwidth: {(work.hbm_bytes or 0) / 1e6:.1f} MB at {HBM_SHARE:.0%} of {board.hbm_gb_per_s:.0f} GB/s"


def _loop_sentence(block: BlockTime, board: Board, work: Work, cycles: float) -> str:
    """What limits the loop, and the launch if it leaves slots empty."""
    busiest = sorted(block.pipes, key=lambda name: -block.pipes[name])
    first, second = (f"{PIPE_NAMES[name]} {block.pipes[name]:.0%} busy" for name in busiest[:2])
    if block.pipes[busiest[0]] >= (FULL_SHARE if block.bound_by else LIMIT_SHARE):
        sentence = f"{first} in the loop"
    elif block.bound_by:
        sentence = f"{block.bound_by}; {first} in the loop"
    else:
        sentence = f"{first}, {second} in the loop; the rest waits for results and barriers"
    flops = work.tensor_flops / work.blocks
    used = work.blocks * block.cycles(flops, block.resident) / (cycles * board.sms * block.resident)
    if used < 1 - WASTED_SHARE:
        slots = board.sms * block.resident
        sentence += f"; {1 - used:.0%} of the slots stand empty ({work.blocks} blocks, {slots} slots)"
    return sentence
