"""Predict the time of a kernel from its machine code: Binary + Gpu -> Prediction. No GPU is touched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from .compile import Binary
from .run import Sizes, grid
from .sass import (
    COMPARED,
    WARPS_OF_A_GROUP,
    Board,
    Work,
    as_measured,
    constants_version,
    disassemble,
    memory_path,
    predict_time,
)
from .spec.gpu import REGISTERS_PER_SM, Gpu
from .spec.kernel import HOPPER, PERSISTENT, KernelName, KernelSpec
from .spec.limits import smem_bytes
from .spec.problem import Pass, Problem
from .spec.tile import ForwardTile, WarpgroupTile
from .work import (
    PRODUCTS,
    cleared_bytes,
    first_bytes,
    loaded_bytes,
    masked_share,
    moved_bytes,
    multicast_bytes,
    reduced_bytes,
    skipped_tiles,
    tile_flops,
    tiles_per_block,
)

# Raise it when a constant or a rule changes: records carry it. Constants that were measured name their GPU and date.
MODEL = "issue-model 2" + constants_version()
ERROR = 0.06  # mean error on GPUs whose kernels no constant was fitted to; the worst was 0.16. Ask error_of
WARPGROUP_MODEL = "warpgroup-model 2" + constants_version()  # the same, of kernels of warpgroups
WARPGROUP_ERROR = 0.05  # mean error on the figures of FlashAttention-3 that its two fitted constants were fitted to
NOISE = 0.05  # relative: predicted times that are closer are equal (docs/model.md)

NEGLIGIBLE = 0.02  # share of masked tiles below which their extra code is not timed


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The predicted time of one launch."""

    kind: ClassVar[Literal["predicted"]] = "predicted"
    kernel: KernelName
    gpu: str
    seconds: float
    tflops: float  # FLOPs of the kernel's own matrix products over time; 0 if it has none
    spread: float  # relative, over the start phases of the blocks that share an SM
    blocks_per_sm: int
    pipes: Mapping[str, float]  # share of the loop's cycles that each pipe is busy
    bound_by: str
    spills_in_loop: int  # instructions, of the loop with most of them
    spill_bytes: int = 0  # a thread, anywhere
    tiles: int = 0  # of a head
    tiles_skipped: int = 0  # of them, because no query of theirs sees a key of theirs
    by: str = MODEL


def predict(
    binary: Binary, problem: Problem, gpu: Gpu, *, parts: int = 1, rare_always: bool = False
) -> Prediction:  # fmt: skip
    """The time of one launch of `binary` for `problem` on `gpu`; of a forward by parts, in `parts` of them.

    `rare_always` counts what stands behind a branch in the loop (masks, rescaling) as executed in every tile: an upper
    limit of the time, and how kernels of others are counted, whose rare tiles nobody can tell from their code.
    Raises SassError for machine code that the model does not know.
    """
    spec, sizes = binary.spec, sizes_of(problem, parts)
    function = disassemble(binary.cubin).functions[spec.kernel]
    work = work_of(spec, sizes)
    if rare_always:
        work = replace(work, rare_share=1.0, twin_share=1.0)
    time = predict_time(function, board_of(gpu), work)
    tflops = credited_flops(spec, problem) / time.seconds / 1e12
    skipped, tiles = skipped_tiles(spec, sizes)
    return Prediction(
        kernel=spec.kernel, gpu=gpu.key, seconds=time.seconds, tflops=tflops, spread=time.spread,
        blocks_per_sm=time.blocks_per_sm, pipes=time.pipes, bound_by=time.bound_by,
        spills_in_loop=max((loop.spill_instructions for loop in function.loops if loop.tensor_instructions), default=0),
        spill_bytes=binary.spill_bytes, tiles=tiles, tiles_skipped=skipped,
        by=model_of(spec.kernel),
    )  # fmt: skip


def model_of(kernel: KernelName) -> str:
    """The model that times a kernel, as its predictions name it."""
    return WARPGROUP_MODEL if kernel in HOPPER and kernel in PRODUCTS else MODEL


def predict_pass(
    binaries: Mapping[KernelName, Binary], problem: Problem, gpu: Gpu, *, parts: int = 1
) -> tuple[Prediction, ...]:
    """The kernels of a pass, one after the other."""
    return tuple(predict(binary, problem, gpu, parts=parts) for binary in binaries.values())


def pass_tflops(predictions: tuple[Prediction, ...], which: Pass, problem: Problem) -> float:
    """Credited FLOPs of the pass over the time of all its kernels."""
    return problem.flops(which) / sum(p.seconds for p in predictions) / 1e12


def credited_flops(spec: KernelSpec, problem: Problem) -> float:
    """FLOPs of a kernel's own matrix products, half of them when causal."""
    of_d, of_dv = PRODUCTS.get(spec.kernel, (0, 0))
    columns = problem.d + problem.value_dim
    return problem.flops("forward") / columns * (of_d * problem.d + of_dv * problem.value_dim)


def sizes_of(problem: Problem, parts: int = 1) -> Sizes:
    """The launch sizes of a problem; all sequences as long as the longest."""
    left, right = problem.bounds
    return Sizes(
        B=problem.B, Hq=problem.Hq, Hk=problem.kv_heads, Nq=problem.Nq, Nk=problem.keys, parts=parts,
        left=left or 0, right=right or 0, all_q=problem.B * problem.Nq if problem.lengths == "packed" else None,
    )  # fmt: skip


def error_of(gpu: Gpu, kernels: Iterable[KernelName] = ()) -> float | None:
    """The mean relative error of predictions for `gpu`; None where none was ever held against a measurement.

    Of `kernels`, the larger one if some are of warpgroups.

    >>> from .spec.gpu import find_gpu
    >>> error_of(find_gpu("a100")), error_of(find_gpu("t4"))
    (0.06, None)
    """
    if gpu.sm not in COMPARED:
        return None
    return max(ERROR, WARPGROUP_ERROR) if HOPPER.intersection(kernels) else ERROR


def board_of(gpu: Gpu) -> Board:
    """A GPU as the issue model sees it, with the constants that were measured in the place of the table's."""
    board = Board(
        name=gpu.key, sm=gpu.sm, sms=gpu.sms, clock_ghz=gpu.clock_ghz, tensor_flops_per_clock_sm=gpu.tensor_flops_clk,
        smem_per_sm_bytes=gpu.smem_sm_bytes, max_threads_per_sm=gpu.threads_sm, registers_per_sm=REGISTERS_PER_SM,
        l2_bytes_per_clock_sm=gpu.l2_bytes_clk, l2_latency=gpu.l2_latency, hbm_gb_per_s=gpu.hbm_gbs,
        path=memory_path(gpu.sm), wgmma_flops_per_clock_sm=gpu.wgmma_flops_clk or 4096.0,
    )  # fmt: skip
    return as_measured(board)


def work_of(spec: KernelSpec, sizes: Sizes) -> Work:
    """What one launch has to do, as the issue model takes it."""
    tile, blocks = spec.tile, grid(spec, sizes)
    flops, unequal, rare, walked = 0.0, None, 0.0, 0
    if spec.kernel in PRODUCTS:
        tiles = tiles_per_block(spec, sizes)
        walked = sum(tiles) * (blocks // len(tiles))
        flops = tile_flops(spec) * walked
        unequal = tiles if len(set(tiles)) > 1 else None
        rare = masked_share(spec, sizes)
    rare = rare if rare > NEGLIGIBLE else 0.0
    of_warpgroups = spec.kernel in HOPPER and bool(flops)  # masks are loops of their own there
    streams = not flops or isinstance(tile, ForwardTile | WarpgroupTile)  # few queries wait for K and V
    streamed, serial = moved_bytes(spec, sizes) if streams else None, cleared_bytes(spec, sizes)
    return Work(
        blocks=blocks, warps=tile.warps, dynamic_smem_bytes=smem_bytes(spec), tensor_flops=flops, unequal=unequal,
        hbm_bytes=streamed, serial_hbm_bytes=serial, rare_share=0.0 if of_warpgroups else rare,
        twin_share=rare if of_warpgroups else 0.0, producer_warps=WARPS_OF_A_GROUP if of_warpgroups else None,
        first_bytes=first_bytes(spec), loaded_bytes=loaded_bytes(spec, walked),
        multicast_bytes=multicast_bytes(spec, walked), reduced_bytes=reduced_bytes(spec, walked),
        persistent=spec.kernel in PERSISTENT,
    )  # fmt: skip
