"""Say why a kernel serves a problem, and what stood beside it."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UsageError
from ..spec.gpu import served_gpu
from ..spec.kernel import SIGNATURES, TENSOR_MAP, KernelName
from ..spec.problem import Problem
from . import show_explain
from .app import app
from .console import print_lines
from .features import NO_FEATURES, FeatureOptions, takes_features
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
from .plot import check_plot
from .plot_search import draw_search
from .request import problem_of

if TYPE_CHECKING:
    from ..explain import Explanation

RowStrideOption = Annotated[
    int | None, typer.Option("--row-stride", help="Elements from row to row of the inputs. Default: d, without a gap.")
]


@app.command()
@takes_features
def explain(
    kernel: Kernel,
    gpu: GpuOption = "auto",
    dtype: DtypeOption = "bf16",
    d: DimOption = 128,
    causal: CausalOption = False,
    features: FeatureOptions = NO_FEATURES,
    nq: NqOption = 8192,
    nk: NkOption = None,
    heads: HeadsOption = 16,
    kv_heads: KvHeadsOption = None,
    batch: BatchOption = 2,
    row_stride: RowStrideOption = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the search: a .png or .svg file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Why this tile: the files looked into, its record, the runner-up and the default beside it, the search."""
    from ..explain import explain as explained

    problem = problem_of(dtype, d, causal, features, batch=batch, heads=heads, kv_heads=kv_heads, nq=nq, nk=nk)
    target = served_gpu(gpu)
    inputs = _how_read(problem, kernel.value, row_stride)
    if plot is not None:
        check_plot(plot)
    found = explained(problem, kernel.value, target)
    if plot is not None:
        _draw(found, plot)
    if as_json:
        print_json({**_facts(found), "inputs": inputs})
    else:
        show_explain.explanation(found)
        print_lines(inputs)


def _draw(found: Explanation, plot: Path) -> None:
    if found.record is None or found.search is None:
        served = found.loaded.found
        raise UsageError(f"--plot {plot}: no search of {found.kernel} is kept ({served}); flashsmith tune makes one.")
    draw_search(found.record, found.search, plot)


def _facts(found: Explanation) -> dict[str, Any]:
    loaded, record = found.loaded, found.record
    return {
        "kernel": found.kernel,
        "looked": [
            {"rung": s.rung, "path": str(s.path), "found": s.why, "serves": s.record is not None} for s in found.looked
        ],
        "served": {"rung": loaded.rung, "found": loaded.found, "tile": asdict(loaded.tile)},
        "record": asdict(record) if record else None,
        "form": asdict(found.form),
        "contenders": [
            {
                "roles": c.roles, "tile": asdict(c.tile), "recorded_ms": c.recorded_ms,
                "recorded_kind": record.evidence.kind if record and c.recorded_ms else None,
                "predicted": asdict(c.prediction) if c.prediction else None, "failure": c.failure,
            }
            for c in found.contenders
        ],
        "predicted_against_served": found.against_served(),
    }  # fmt: skip


def _how_read(problem: Problem, kernel: KernelName, row_stride: int | None) -> str:
    """Whether inputs with such rows are read where they lie, or copied first; q stands for all of them."""
    from ..engines.engine import Tensor
    from ..spec.dtype import stored_as

    row = problem.d if row_stride is None else row_stride
    if row < problem.d:
        raise UsageError(f"--row-stride {row}: a row has d={problem.d} elements, so its stride is at least that.")
    shape = (problem.B, problem.Hq, problem.Nq, problem.d)
    q = Tensor(0, shape, (problem.Hq * problem.Nq * row, problem.Nq * row, row, 1), stored_as(problem.dtype))
    row_bytes = q.dtype.itemsize * row
    if q.aligned:
        read = f"inputs with rows of {row_bytes} B are read where they lie, if they start on 16 B"
        by_tma = any(arg.type == TENSOR_MAP for arg in SIGNATURES[kernel])
        return f"{read} and no stride is 0: TMA copies their tiles" if by_tma else read
    copied = q.dtype.itemsize * math.prod(shape)
    copies = f"each is copied first, q with {copied / 1e6:.1f} MB"
    return f"inputs with rows of {row_bytes} B do not all start on 16 B: {copies}"
