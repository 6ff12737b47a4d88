"""Predict the time of a pass."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, cast

from ..spec.gpu import served_gpu
from ..spec.problem import Problem
from . import show
from .app import app
from .options import (
    BatchOption,
    CausalOption,
    DeterministicOption,
    DimOption,
    DtypeOption,
    GpuOption,
    HeadsOption,
    JsonOption,
    KernelOption,
    KvHeadsOption,
    NkOption,
    NqOption,
    SourceOption,
    TileOption,
    Which,
)
from .output import print_json
from .request import binaries_of


@app.command()
def predict(
    which: Which,
    gpu: GpuOption = "auto",
    dtype: DtypeOption = "bf16",
    d: DimOption = 128,
    causal: CausalOption = False,
    nq: NqOption = 8192,
    nk: NkOption = None,
    heads: HeadsOption = 16,
    kv_heads: KvHeadsOption = None,
    batch: BatchOption = 2,
    deterministic: DeterministicOption = False,
    tile: TileOption = "",
    kernel: KernelOption = None,
    source: SourceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predict the time of a pass from its machine code, and say what bounds it."""
    from ..predict import ERROR, pass_tflops, predict_pass

    problem = Problem(dtype=cast(Any, dtype), d=d, causal=causal, B=batch, Hq=heads, Hk=kv_heads, Nq=nq, Nk=nk)
    target = served_gpu(gpu)
    predictions = predict_pass(
        binaries_of(which.value, problem, target, deterministic, kernel, tile, source), problem, target
    )
    tflops = pass_tflops(predictions, which.value, problem)
    if as_json:
        kernels = [{**asdict(p), "pipes": dict(p.pipes)} for p in predictions]
        print_json({"evidence": "predicted", "tflops": tflops, "mean_error": ERROR, "kernels": kernels})
    else:
        show.predictions(predictions, tflops, target, ERROR)
