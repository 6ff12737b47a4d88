"""Predict the time of a kernel from its machine code: Binary + Gpu -> Prediction. No GPU is touched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .compile import Binary
from .run import Sizes, dq_accumulator_floats, grid
from .sass import Board, Work, disassemble, predict_time
from .spec.gpu import REGISTERS_PER_SM, Gpu
from .spec.kernel import STATS, KernelName, KernelSpec
from .spec.limits import smem_bytes
from .spec.problem import Pass, Problem
from .spec.tile import ForwardTile, KeyBlockTile, QueryBlockTile, RowTile

MODEL = "issue-model 1"  # raise it when a constant or a rule changes: records carry it
ERROR = 0.06  # mean error on GPUs whose kernels no constant was fitted to; the worst was 0.16

# Shares of a pass's credited FLOPs that a kernel executes usefully: forward 2 products, backward 5.
_PRODUCTS: dict[KernelName, int] = {"forward": 2, "fused": 5, "dkdv": 4, "dq": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The predicted time of one launch."""

    kernel: KernelName
    gpu: str
    seconds: float
    tflops: float  # FLOPs of the kernel's own matrix products over time; 0 if it has none
    spread: float  # relative, over the start phases of the blocks that share an SM
    blocks_per_sm: int
    pipes: Mapping[str, float]  # share of the loop's cycles that each pipe is busy
    bound_by: str
    spills_in_loop: int
    by: str = MODEL


def predict(binary: Binary, problem: Problem, gpu: Gpu) -> Prediction:
    """The time of one launch of `binary` for `problem` on `gpu`.

    Raises SassError for machine code that the model does not know.
    """
    spec, sizes = binary.spec, sizes_of(problem)
    function = disassemble(binary.cubin).functions[spec.kernel]
    work = work_of(spec, sizes)
    time = predict_time(function, board_of(gpu), work)
    tflops = credited_flops(spec, problem) / time.seconds / 1e12
    return Prediction(
        kernel=spec.kernel, gpu=gpu.key, seconds=time.seconds, tflops=tflops, spread=time.spread, blocks_per_sm=time.blocks_per_sm, pipes=time.pipes,
        bound_by=time.bound_by, spills_in_loop=time.spills_in_loop,
    )  # fmt: skip


def predict_pass(binaries: Mapping[KernelName, Binary], problem: Problem, gpu: Gpu) -> tuple[Prediction, ...]:
    """The kernels of a pass, one after the other."""
    return tuple(predict(binary, problem, gpu) for binary in binaries.values())


def pass_tflops(predictions: tuple[Prediction, ...], which: Pass, problem: Problem) -> float:
    """Credited FLOPs of the pass over the time of all its kernels."""
    return problem.flops(which) / sum(p.seconds for p in predictions) / 1e12


def credited_flops(spec: KernelSpec, problem: Problem) -> float:
    """FLOPs of a kernel's own matrix products, half of them when causal."""
    return problem.flops("forward") / 2 * _PRODUCTS.get(spec.kernel, 0)


def sizes_of(problem: Problem) -> Sizes:
    """The launch sizes of a problem."""
    return Sizes(B=problem.B, Hq=problem.Hq, Hk=problem.kv_heads, Nq=problem.Nq, Nk=problem.keys)


def board_of(gpu: Gpu) -> Board:
    """A GPU as the issue model sees it."""
    return Board(
        name=gpu.key, sm=gpu.sm, sms=gpu.sms, clock_ghz=gpu.clock_ghz, tensor_flops_per_clock_sm=gpu.tensor_flops_clk,
        smem_per_sm_bytes=gpu.smem_sm_bytes, max_threads_per_sm=gpu.threads_sm, registers_per_sm=REGISTERS_PER_SM,
        l2_bytes_per_clock_sm=gpu.l2_bytes_clk, l2_latency=gpu.l2_latency, hbm_gb_per_s=gpu.hbm_gbs,
    )  # fmt: skip


def work_of(spec: KernelSpec, sizes: Sizes) -> Work:
    """What one launch has to do: blocks, tensor FLOPs, bytes."""
    tile, blocks, flops, unequal = spec.tile, grid(spec, sizes), 0.0, None
    if spec.kernel in _PRODUCTS and not isinstance(tile, RowTile):
        tiles = tiles_per_block(spec, sizes)
        a_tile = _PRODUCTS[spec.kernel] * 2.0 * tile.Br * tile.Bc * _multiplied_columns(spec)
        flops = a_tile * sum(tiles) * (blocks // len(tiles))
        unequal = tiles if len(set(tiles)) > 1 else None
    return Work(
        blocks=blocks, warps=tile.warps, dynamic_smem_bytes=smem_bytes(spec), tensor_flops=flops, unequal=unequal,
        hbm_bytes=hbm_bytes(spec, sizes) or None,
    )  # fmt: skip


def tiles_per_block(spec: KernelSpec, sizes: Sizes) -> tuple[int, ...]:
    """Tiles that each block of one head walks over, in launch order."""
    tile, offset = spec.tile, sizes.Nk - sizes.Nq
    if isinstance(tile, KeyBlockTile):
        rows = _ceil(sizes.Nq, tile.Br)
        first = [max(0, j * tile.Bc - offset) // tile.Br if spec.causal else 0 for j in range(_ceil(sizes.Nk, tile.Bc))]
        return tuple(max(0, rows - i) * (sizes.Hq // sizes.Hk) for i in first)
    if isinstance(tile, ForwardTile | QueryBlockTile):
        last_keys = [
            max(0, min(sizes.Nk, (i + 1) * tile.Br + offset)) if spec.causal else sizes.Nk
            for i in range(_ceil(sizes.Nq, tile.Br))
        ]
        in_order = [_ceil(keys, tile.Bc) for keys in last_keys]
        return tuple(reversed(in_order) if spec.causal else in_order)  # longest first
    return (1,)


def hbm_bytes(spec: KernelSpec, sizes: Sizes) -> float:
    """Bytes that a kernel without matrix products moves: it is as fast as memory."""
    rows = sizes.B * sizes.Hq * sizes.Nq
    if spec.kernel == "delta":
        return rows * (2 * 2 * spec.d + 8) + sizes.stats_rows * STATS * 4
    if spec.kernel == "convert":
        return dq_accumulator_floats(spec, sizes) * 4 + rows * spec.d * 2
    if spec.kernel == "fused":  # its accumulator is cleared before
        return dq_accumulator_floats(spec, sizes) * 4
    return 0.0


def _multiplied_columns(spec: KernelSpec) -> int:
    """Columns that the products run over: forward ends an odd d / 8 with a half step, the others pad to 16."""
    return spec.d if spec.kernel == "forward" else _ceil(spec.d, 16) * 16


def _ceil(n: int, step: int) -> int:
    return -(-n // step)
