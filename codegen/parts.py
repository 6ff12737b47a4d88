"""Choose into how many parts a forward cuts its keys: Problem + Gpu -> Choice, by arithmetic.

A block owns query rows, so few rows make few blocks, and a GPU reads K and V at its full rate only with all of its
multiprocessors. `partial` gives each part of the keys blocks of its own, and `combine` adds the parts up.
"""

from __future__ import annotations

from .forms import Choice
from .predict import sizes_of
from .run import grid
from .sass.board import HBM_SHARE
from .sass.launch import waves_cycles
from .spec.forward_shape import forward_registers
from .spec.gpu import Gpu
from .spec.kernel import KernelSpec
from .spec.limits import MAX_REGISTERS, blocks_per_sm
from .spec.problem import ELEMENT_BYTES, Problem
from .spec.tile import ForwardTile
from .work import moved_bytes, tile_flops, tiles_per_block

CLOSE = 0.03  # relative: of numbers of parts whose times are as close to the best, the fewest serves
ROUNDS = 2  # parts are tried up to as many as make this many rounds of blocks

# Clocks, rounded from predictions for blocks of one warp and of four on three GPUs, and on the side of more parts: the
# model knows the latency of the L2 cache, and the keys of a decoder lie in memory [?].
WAIT_CLOCKS = 1000  # of a lone block for the K and V of a tile, beyond what copying and multiplying take
EDGE_CLOCKS = 3000  # of a lone block before its first tile and after its last; half of it again for each beside it
TENSOR_SHARE = 0.75  # of the time that tensor cores are busy in a loop that they bound
COMBINE_S = 3e-6  # a launch behind another, and three round trips to memory in it [?]


def choose_parts(spec: KernelSpec, problem: Problem, gpu: Gpu) -> Choice:
    """The fewest parts whose time is CLOSE to the best; one part is `forward`, whole.

    `spec` is that of `partial`. A launch that fills every place that blocks can have on the GPU stays whole.
    """
    rows = grid(spec, sizes_of(problem))  # blocks of one part
    places = gpu.sms * _resident(spec, gpu)
    if problem.keys == 0 or not 0 < rows < places:
        return Choice(form="whole", reason=f"whole: {rows} blocks, and the {gpu.sms} SMs hold {places} at once")
    tiles = max(tiles_per_block(spec, sizes_of(problem)))
    most = max(1, min(tiles, ROUNDS * places // rows))
    seconds = {parts: _seconds(spec, problem, gpu, tiles, parts) for parts in range(1, most + 1)}
    best = min(seconds.values())
    parts = next(parts for parts, time in seconds.items() if time <= (1 + CLOSE) * best)
    if parts == 1:
        return Choice(form="whole", reason=f"whole: {rows} blocks on {gpu.sms} SMs, and parts would gain too little")
    share = -(-tiles // parts)
    return Choice(
        form="parts", parts=parts,
        reason=f"parts: {parts} of up to {share} K/V tiles, {rows * parts} blocks on {gpu.sms} SMs instead of {rows}",
    )  # fmt: skip


def _resident(spec: KernelSpec, gpu: Gpu) -> int:
    """Blocks that an SM holds at once, by what registers a thread needs roughly."""
    registers = forward_registers(spec, _tile(spec))
    return max(1, blocks_per_sm(spec, gpu, min(MAX_REGISTERS, registers)))


def _seconds(spec: KernelSpec, problem: Problem, gpu: Gpu, tiles: int, parts: int) -> float:
    """What the launches of so many parts take, if every block sees `tiles` K/V tiles of the head."""
    tile, sizes = _tile(spec), sizes_of(problem, parts)
    copying = 2 * tile.Bc * ELEMENT_BYTES[spec.dtype] * spec.d / gpu.l2_bytes_clk  # clocks a tile, K and V
    multiplying = tile_flops(spec) / gpu.tensor_flops_clk * (2 if spec.fp32 else 1)  # TF32 at half the rate of 16 bits
    alone = max(copying, multiplying * max(1.0, 4 / tile.warps)) + WAIT_CLOCKS  # an SM has four tensor cores
    shared = max(copying, multiplying / TENSOR_SHARE)

    def block(among: int) -> float:
        edge = EDGE_CLOCKS * (1 + among) / 2
        return -(-tiles // parts) * max(alone, among * shared) + edge

    clocks = waves_cycles(grid(spec, sizes), gpu.sms, _resident(spec, gpu), block)
    memory = HBM_SHARE * gpu.hbm_gbs * 1e9
    seconds = max(clocks / gpu.clock_ghz / 1e9, moved_bytes(spec, sizes) / memory)
    read_again = 4.0 * spec.d * sizes.B * sizes.Hq * sizes.Nq * parts
    return seconds if parts == 1 else seconds + COMBINE_S + read_again / memory


def _tile(spec: KernelSpec) -> ForwardTile:
    assert isinstance(spec.tile, ForwardTile)  # KernelSpec has seen to it
    return spec.tile
