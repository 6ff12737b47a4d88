"""Predict FlashAttention-2's speeds from its own machine code, and keep them: cubins -> flash_attention_2.csv.

The cubins are those of compile_flash_attention_2.py. What is kept are figures of this model, this compiler and these
sources; whoever reads them with another model is told to write them anew.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from flash_attention_2_kernels import Case, Kernel
from flash_attention_2_versions import Versions
from flashsmith.predict import MODEL, board_of
from flashsmith.sass import Work, disassemble, predict_time
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.problem import Problem

FILE = Path(__file__).parent / "flash_attention_2.csv"

PRODUCTS = {"forward": 2, "backward": 5}  # matrix products of a tile
# Bytes per element of dO that its helper kernels move: dot_do_o reads dO and O (2 + 2) and clears dQ's accumulator (4),
# convert_dq reads that (4) and writes dQ (2).
HELPER_BYTES = 14.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSpeed:
    """What the model says of one pass of FlashAttention-2; a line of the file."""

    kernel: str  # the main one, as its cubin is named
    sm: int
    gpu: str
    which: str
    d: int
    causal: int  # 0 or 1
    batch: int
    heads: int
    Nq: int
    Nk: int
    warps: int
    registers: int  # of a thread
    smem_bytes: int  # of a block
    blocks_per_sm: int
    spills_in_loop: int  # instructions
    rare_in_loop: int  # instructions behind a branch, as predict_cubin.py counts them
    tflops: float  # predicted, by Problem.flops
    model: str
    flash_attn: str
    nvcc: str

    @property
    def case(self) -> Case:
        """What it is the speed of."""
        problem = Problem(
            dtype="bf16", d=self.d, causal=bool(self.causal), B=self.batch, Hq=self.heads, Nq=self.Nq, Nk=self.Nk
        )
        return Case(self.gpu, self.which, problem)  # type: ignore[arg-type]


def predict_case(case: Case, cubins: Path) -> OwnSpeed:
    """The speed of a pass: its main kernel issued by the model, its helper kernels by their bytes.

    Blocks that are rare in the loop count as executed in every tile, as they did when the model was fitted.
    Raises SystemExit if the cubin is not there.
    """
    gpu, kernel, problem = find_gpu(case.gpu), case.kernel, case.problem
    versions = Versions.of(cubins)
    try:
        cubin = (cubins / f"{kernel.name}.cubin").read_bytes()
    except OSError as error:
        raise SystemExit(f"{error}: make it by compile_flash_attention_2.py ... {kernel.name}") from error
    (function,) = disassemble(cubin).functions.values()
    time = predict_time(function, board_of(gpu), work_of(kernel, problem))
    return OwnSpeed(
        kernel=kernel.name, sm=kernel.sm, gpu=gpu.key, which=case.which, d=problem.d, causal=int(problem.causal),
        batch=problem.B, heads=problem.Hq, Nq=problem.Nq, Nk=problem.keys, warps=kernel.warps,
        registers=function.registers, smem_bytes=kernel.smem_bytes, blocks_per_sm=time.blocks_per_sm,
        spills_in_loop=time.spills_in_loop,
        rare_in_loop=len(function.trace.loop) - len(function.short_trace.loop),
        tflops=round(problem.flops(case.which) / time.seconds / 1e12, 1),
        model=MODEL, **versions._asdict(),
    )  # fmt: skip


def work_of(kernel: Kernel, problem: Problem) -> Work:
    """The launch of the main kernel: one head's blocks in the order of their tiles, then the next head's."""
    tiles = tiles_per_block(kernel, problem)
    heads = problem.B * problem.Hq
    helpers = HELPER_BYTES * heads * problem.Nq * problem.d if kernel.which == "backward" else 0.0
    return Work(
        blocks=len(tiles) * heads, warps=kernel.warps, dynamic_smem_bytes=kernel.smem_bytes,
        tensor_flops=PRODUCTS[kernel.which] * 2.0 * kernel.Br * kernel.Bc * kernel.d * sum(tiles) * heads,
        unequal=tiles if problem.causal else None, serial_hbm_bytes=helpers,
    )  # fmt: skip


def tiles_per_block(kernel: Kernel, problem: Problem) -> Sequence[int]:
    """Tiles that each block of a head walks over: of K and V forward, of Q backward.

    Lengths are multiples of the tile, and alike with a mask.
    """
    rows, columns = problem.Nq // kernel.Br, problem.keys // kernel.Bc
    if kernel.which == "forward":
        last = ((i + 1) * kernel.Br for i in range(rows))  # keys that a Q tile sees, with a mask
        return [-(-keys // kernel.Bc) if problem.causal else columns for keys in last]
    return [rows - (j * kernel.Bc // kernel.Br if problem.causal else 0) for j in range(columns)]


def write(speeds: Iterable[OwnSpeed], file: Path = FILE) -> None:
    """Keep them; the same bytes for the same figures."""
    with file.open("w", newline="") as text:
        lines = csv.DictWriter(text, [f.name for f in fields(OwnSpeed)], lineterminator="\n")
        lines.writeheader()
        lines.writerows(asdict(speed) for speed in speeds)


def read(file: Path = FILE) -> Mapping[Case, OwnSpeed]:
    """What was kept. Raises SystemExit if another model said it: two models' figures are not on one scale."""
    kinds = {f.name: {"int": int, "float": float, "str": str}[str(f.type)] for f in fields(OwnSpeed)}
    with file.open(newline="") as text:
        lines = [OwnSpeed(**{name: kinds[name](cell) for name, cell in row.items()}) for row in csv.DictReader(text)]
    others = {speed.model for speed in lines} - {MODEL}
    if others:
        raise SystemExit(
            f"{file.name} holds speeds by {', '.join(sorted(others))}, and the model here is {MODEL}: write it anew by "
            "beside_flash_attention.py --cubins FOLDER --keep"
        )
    return {speed.case: speed for speed in lines}
