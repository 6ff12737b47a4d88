"""Time the kernels of warpgroups by what only a GPU can judge, beside cuDNN in the same run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import product
from typing import Any

from ..spec.defaults import default_tile
from ..spec.gpu import Gpu, present_gpu
from ..spec.kernel import KernelName, KernelSpec
from ..spec.limits import why_illegal
from ..spec.problem import Pass, Problem
from ..spec.tile import Tile, WarpgroupKeyTile, WarpgroupTile
from .tiles import timed_lines

CUDNN = "torch cuDNN"
PROBLEMS = (
    Problem(dtype="bf16", d=128, B=2, Hq=16, Nq=8192),
    Problem(dtype="bf16", d=128, causal=True, B=2, Hq=16, Nq=8192),
    Problem(dtype="bf16", d=64, B=2, Hq=32, Nq=8192),
)
KERNELS: dict[KernelName, Pass] = {"forward90": "forward", "fused90": "backward"}
WIDTHS = (96, 112, 128, 144, 160, 176, 192, 224)  # Bc of forward90
ROWS = (64, 80, 96, 128)  # Br of fused90


def variants(kernel: KernelName, problem: Problem, gpu: Gpu) -> tuple[Tile, ...]:
    """The tiles to compare, of those that fit.

    Of forward90 widths x turns x the early wait for K; and, as a control, the default without overlap. Of fused90 rows
    x buffers of dS x how sums of dQ leave.
    """
    default = default_tile(kernel, problem, gpu)
    tiles: list[Tile] = []
    if isinstance(default, WarpgroupTile):
        for Bc, pingpong, early in product(WIDTHS, (False, True), (False, True)):
            tiles.append(replace(default, Bc=Bc, pingpong=pingpong, early_k_wait=early))
        tiles.append(replace(default, overlap=False))
    elif isinstance(default, WarpgroupKeyTile):
        for Br, dS_stages, bulk in product(ROWS, (1, 2), (False, True)):
            tiles.append(replace(default, Br=Br, dS_stages=dS_stages, bulk_sums=bulk))
    return tuple(t for t in tiles if why_illegal(KernelSpec.of(kernel, problem, t, gpu.sm), gpu) is None)


def timed_variants() -> Iterator[dict[str, Any]]:
    """A line each: cuDNN, the variants, cuDNN again, whose two times say how steady the clock was.

    A fused90 is timed without delta and convert90, which cuDNN's backward has in some form as well.
    """
    gpu = present_gpu()
    for problem, (kernel, which) in product(PROBLEMS, KERNELS.items()):
        yield _cudnn(problem, which, gpu)
        for line in timed_lines(kernel, problem, gpu, variants(kernel, problem, gpu)):
            line["which"] = which
            if "seconds" in line:
                line["tflops"] = problem.flops(which) / line["seconds"] / 1e12
            yield line
        yield _cudnn(problem, which, gpu)


def _cudnn(problem: Problem, which: Pass, gpu: Gpu) -> dict[str, Any]:
    from ..backends import backends
    from ..bench import bench_measured
    from ..engines.clock import CudaClock
    from ..engines.cuda import cuda_engine

    engine = cuda_engine()
    clock = CudaClock(engine, int(gpu.l2_mb * 2**20))
    theirs = {CUDNN: backends()[CUDNN]}
    (row,) = bench_measured([problem], [which], gpu, clock, theirs, str(engine.driver.memory))
    found = {"seconds": row.seconds, "tflops": row.tflops} if row.seconds else {"failure": row.note}
    return {"key": CUDNN, "problem": asdict(problem), "which": which, **found}
