"""Predict the kernels that published speeds are of: one row of a table for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from flash_attention_2_kernels import Case
from flash_attention_2_speeds import OwnSpeed
from flashsmith.compile import compile_source
from flashsmith.predict import NOISE, Prediction, board_of, pass_tflops, predict
from flashsmith.render import render
from flashsmith.sass import SassError, Work, disassemble, predict_time
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.gpu import Gpu, find_gpu
from flashsmith.spec.kernel import FORWARD, FUSED, KernelSpec
from flashsmith.spec.limits import why_illegal
from flashsmith.spec.problem import Pass, Problem
from flashsmith.spec.tile import ForwardTile, KeyBlockTile
from published import COMMENT_GPU, COMMENT_LENGTH, Comment, Speed, TritonSpeed
from published import problem as problem_of

RIGHT, WRONG = "sign right", "sign wrong"


class Refused(Exception):
    """A tile that our kernels do not have; the message says why."""


class Compared(NamedTuple):
    """One row: what it is, TFLOP/s predicted (rounded as printed; None if refused) and published."""

    gpu: str
    kind: str  # "forward", "forward causal", "backward", "backward causal"
    predicted: float | None
    published: float

    @property
    def difference(self) -> float | None:
        """Relative to what was published."""
        return None if self.predicted is None else self.predicted / self.published - 1


# ---- FlashAttention-2's own machine code -------------------------------------------------------------------------

OWN_HEAD = (
    "GPU", "pass", "d", "N", "tile", "sm", "registers", "blocks/SM", "spills", "predicted", "published", "difference",
    "source",
)  # fmt: skip


def compare_own_code(speed: Speed, kept: Mapping[Case, OwnSpeed]) -> tuple[Compared, tuple[str, ...]]:
    """A published speed beside what the model says of the machine code that reached it."""
    said = kept[Case(speed.gpu, speed.which, speed.problem)]
    row = Compared(speed.gpu, _kind(speed.which, speed.problem.causal), said.tflops, speed.tflops)
    resources = (str(said.sm), str(said.registers), str(said.blocks_per_sm), str(said.spills_in_loop))
    what = (row.gpu, row.kind, str(said.d), _length(speed.problem), tile_words(speed.tile))
    return row, (*what, *resources, *_numbers(row), speed.source)


# ---- FlashAttention-2's tiles in our kernels ---------------------------------------------------------------------


def predict_tile(
    which: Pass, problem: Problem, tile: ForwardTile | KeyBlockTile, gpu: Gpu, sm: int
) -> tuple[Prediction, ...]:
    """The kernels of a pass, the main one (and convert, which reads what it wrote) in `tile`. Raises Refused."""
    found = []
    for kernel in FORWARD if which == "forward" else FUSED:
        own = default_tile(kernel, problem, gpu) if kernel == "delta" else tile
        spec = KernelSpec.of(kernel, problem, own, sm)
        reason = why_illegal(spec, gpu)
        if reason:
            raise Refused(reason.removeprefix(f"{spec.key}: ").removeprefix(f"{spec.key} "))
        found.append(predict(compile_source(render(spec)), problem, gpu))
    return tuple(found)


def tile_words(tile: ForwardTile | KeyBlockTile) -> str:
    """
    >>> tile_words(ForwardTile(Br=128, Bc=64, warps=4))
    '128x64, 4 warps'
    """
    words = f"{tile.Br}x{tile.Bc}, {tile.warps} warps"
    if isinstance(tile, KeyBlockTile):
        words += f", row_split {tile.row_split}" + (", V in registers" if tile.v_regs else "")
    return words


SPEED_HEAD = (
    "GPU", "pass", "d", "N", "tile", "blocks/SM", "spills", "predicted", "published", "difference", "source", "",
)  # fmt: skip


def compare_speed(speed: Speed) -> tuple[Compared, tuple[str, ...]]:
    """A published speed of FlashAttention-2 beside our kernel's in the same tile, and the row of the table."""
    gpu, problem = find_gpu(speed.gpu), speed.problem
    predicted, blocks, spills, note = None, "", "", ""
    try:
        kernels = predict_tile(speed.which, problem, speed.tile, gpu, speed.sm)
        main = kernels[0 if speed.which == "forward" else 1]
        predicted = round(pass_tflops(kernels, speed.which, problem), 1)
        blocks, spills = str(main.blocks_per_sm), str(main.spills_in_loop)
    except Refused as reason:
        note = f"not ours: {reason}"
    row = Compared(gpu.key, _kind(speed.which, problem.causal), predicted, speed.tflops)
    what = (row.gpu, row.kind, str(problem.d), _length(problem), tile_words(speed.tile), blocks, spills)
    return row, (*what, *_numbers(row), speed.source, note)


# ---- Triton ------------------------------------------------------------------------------------------------------

TRITON_HEAD = ("GPU", "d", "mask", "N", "tile", "predicted", "published", "difference", "how", "source")


def compare_triton(speed: TritonSpeed) -> tuple[Compared, tuple[str, ...]]:
    """A published speed of Triton's beside the prediction for our own forward in Triton."""
    from triton_forward import compile_forward

    gpu = find_gpu(speed.gpu)
    compiled = compile_forward(
        gpu.sm, speed.d, speed.causal, Br=speed.Br, Bc=speed.Bc, warps=speed.warps, stages=speed.stages
    )
    tiles = [
        (i + 1) * speed.Br // speed.Bc if speed.causal else speed.N // speed.Bc for i in range(speed.N // speed.Br)
    ]
    heads = speed.batch * speed.heads
    work = Work(
        blocks=len(tiles) * heads, warps=compiled.warps, dynamic_smem_bytes=compiled.smem_bytes,
        tensor_flops=4.0 * speed.Br * speed.Bc * speed.d * sum(tiles) * heads, unequal=tiles if speed.causal else None,
    )  # fmt: skip
    function = disassemble(compiled.cubin).functions[compiled.name]
    problem = Problem(dtype="fp16", d=speed.d, causal=speed.causal, B=speed.batch, Hq=speed.heads, Nq=speed.N)
    try:
        seconds = predict_time(function, board_of(gpu), work).seconds
        predicted, how = round(problem.flops("forward") / seconds / 1e12, 1), "simulated"
        if function.trace.uses_warpgroups:
            how = "wgmma: by products and other work"
    except SassError as error:
        predicted, how = None, f"refused: {error}"
    row = Compared(gpu.key, _kind("forward", speed.causal), predicted, speed.tflops)
    tile = f"{speed.Br}x{speed.Bc}, {speed.warps} warps, {speed.stages} stages"
    mask = "causal" if speed.causal else ""
    return row, (gpu.key, str(speed.d), mask, str(speed.N), tile, *_numbers(row), how, speed.source)


# ---- one tile beside another -------------------------------------------------------------------------------------

COMMENT_HEAD = ("pass", "d", "taken", "other", "FlashAttention-2 says", "predicted", "")


def compare_tiles(comment: Comment) -> tuple[str, ...]:
    """Predicted time of a tile that FlashAttention-2 left, over that of the tile it took; always said to be slower."""
    gpu, problem = find_gpu(COMMENT_GPU), problem_of(comment.d, False, COMMENT_LENGTH)
    head = (comment.which, str(comment.d), tile_words(comment.taken), tile_words(comment.other), comment.says)
    try:
        taken, other = (
            sum(p.seconds for p in predict_tile(comment.which, problem, tile, gpu, gpu.sm))
            for tile in (comment.taken, comment.other)
        )
    except Refused as reason:
        return (*head, "", f"not ours: {reason}")
    ratio = other / taken
    verdict = "too close to say" if abs(ratio - 1) < NOISE else RIGHT if ratio > 1 else WRONG
    return (*head, f"{ratio - 1:+.0%}", verdict)


def _length(problem: Problem) -> str:
    return f"{problem.Nq}" if problem.Nq == problem.keys else f"{problem.Nq} x {problem.keys}"


def _kind(which: Pass, causal: bool) -> str:
    return f"{which} causal" if causal else which


def _numbers(row: Compared) -> tuple[str, str, str]:
    if row.predicted is None or row.difference is None:
        return "", f"{row.published:g}", ""
    return f"{row.predicted:.1f}", f"{row.published:g}", f"{row.difference:+.0%}"
