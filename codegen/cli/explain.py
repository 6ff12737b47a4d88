"""Say why a kernel serves a problem, and what the default would cost."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Annotated, Any, cast

import numpy as np
import typer

from ..errors import UsageError
from ..spec.gpu import Gpu, served_gpu
from ..spec.kernel import KernelName, KernelSpec
from ..spec.problem import Problem
from ..spec.tile import tile_text
from .app import app
from .console import print_lines, table
from .options import (
    BatchOption,
    CausalOption,
    DimOption,
    DtypeOption,
    GpuOption,
    HeadsOption,
    JsonOption,
    Kernel,
    KvHeadsOption,
    NkOption,
    NqOption,
)
from .output import print_json

RowStrideOption = Annotated[
    int | None, typer.Option("--row-stride", help="Elements from row to row of the inputs. Default: d, without a gap.")
]


@app.command()
def explain(
    kernel: Kernel,
    gpu: GpuOption = "auto",
    dtype: DtypeOption = "bf16",
    d: DimOption = 128,
    causal: CausalOption = False,
    nq: NqOption = 8192,
    nk: NkOption = None,
    heads: HeadsOption = 16,
    kv_heads: KvHeadsOption = None,
    batch: BatchOption = 2,
    row_stride: RowStrideOption = None,
    as_json: JsonOption = False,
) -> None:
    """Which files were looked into, what each held, what serves, and the predicted time of it and of the default."""
    from ..load import UNTUNED, ladder, load_best

    problem = Problem(dtype=cast(Any, dtype), d=d, causal=causal, B=batch, Hq=heads, Hk=kv_heads, Nq=nq, Nk=nk)
    target = served_gpu(gpu)
    name: KernelName = kernel.value
    steps = [] if name in UNTUNED else list(ladder(problem, name, target))
    loaded = load_best(problem, name, target)
    runners = _predicted(loaded.spec, problem, target)
    if as_json:
        looked = [{"rung": s.rung, "path": str(s.path), "found": s.why, "serves": s.record is not None} for s in steps]
        evidence = asdict(loaded.evidence) if loaded.evidence else None
        served = {"rung": loaded.rung, "found": loaded.found, "tile": asdict(loaded.tile), "evidence": evidence}
        facts = {"kernel": name, "looked": looked, "served": served, "predicted_ms": runners}
        return print_json({**facts, "inputs": _how_read(problem, row_stride)})
    looked_into = table("rung", "file", "found")
    for step in steps:
        looked_into.add_row(step.rung, str(step.path), step.why)
    known = loaded.evidence
    how = (
        f"{known.kind} by {known.by}: {known.time_ms:.3f} ms, {known.tflops:.1f} TFLOP/s" if known else "nothing timed"
    )
    print_lines(looked_into, f"served by {loaded.rung}: {tile_text(loaded.tile)}", f"evidence of the record: {how}")
    print_lines(_how_read(problem, row_stride))
    print_lines(*(f"predicted for these lengths, {tile}: {ms:.3f} ms" for tile, ms in runners.items()))


def _how_read(problem: Problem, row_stride: int | None) -> str:
    """Whether inputs with such rows are read where they lie, or copied first; q stands for all of them."""
    from ..engines.engine import Tensor

    row = problem.d if row_stride is None else row_stride
    if row < problem.d:
        raise UsageError(f"--row-stride {row}: a row has d={problem.d} elements, so its stride is at least that.")
    shape = (problem.B, problem.Hq, problem.Nq, problem.d)
    q = Tensor(0, shape, (problem.Hq * problem.Nq * row, problem.Nq * row, row, 1), np.dtype(np.uint16))
    if q.aligned:
        return f"inputs with rows of {2 * row} B are read where they lie, if they start on 16 B"
    copied = 2 * math.prod(shape)
    return (
        f"inputs with rows of {2 * row} B do not all start on 16 B: each is copied first, q with {copied / 1e6:.1f} MB"
    )


def _predicted(spec: KernelSpec, problem: Problem, gpu: Gpu) -> dict[str, float]:
    """Milliseconds, predicted now for these lengths, of the kernel that serves and of the default tile."""
    from ..compile import compile_source
    from ..predict import predict
    from ..render import render
    from ..spec.defaults import default_tile

    default = KernelSpec.of(spec.kernel, problem, default_tile(spec.kernel, problem, gpu), gpu.sm)
    names = {"served": spec} if default == spec else {"served": spec, "default": default}
    return {
        f"{name} {tile_text(each.tile)}": 1e3 * predict(compile_source(render(each)), problem, gpu).seconds
        for name, each in names.items()
    }
