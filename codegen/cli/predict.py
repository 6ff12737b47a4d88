"""Predict the time of a pass, or of one launch of any cubin."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from ..errors import CannotPredict, UsageError
from ..spec.gpu import served_gpu
from ..spec.problem import Problem
from . import show_predict
from .app import app
from .features import NO_FEATURES, FeatureOptions, takes_features
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
from .predict_cubin import (
    BlockOption,
    CubinOption,
    FlopsOption,
    FunctionOption,
    GridOption,
    HbmOption,
    RareOption,
    SmemOption,
    predict_file,
)
from .request import binaries_of, parts_of, problem_of

OF_BOTH = frozenset({"gpu", "as_json"})
OF_A_CUBIN = frozenset({"cubin", "function", "grid", "block", "smem", "flops", "hbm_bytes", "rare"})


@app.command()
@takes_features
def predict(
    context: typer.Context,
    which: Annotated[Which | None, typer.Argument(help="A pass of ours; leave it out with --cubin.")] = None,
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
    deterministic: DeterministicOption = False,
    tile: TileOption = "",
    kernel: KernelOption = None,
    source: SourceOption = None,
    cubin: CubinOption = None,
    function: FunctionOption = None,
    grid: GridOption = None,
    block: BlockOption = None,
    smem: SmemOption = 0,
    flops: FlopsOption = 0.0,
    hbm_bytes: HbmOption = None,
    rare: RareOption = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Predict the time of a pass of ours (forward or backward), or of one launch of any --cubin, from machine code.

    Says how busy each pipe is and what bounds the kernel. Needs no GPU.
    """
    _refuse_what_is_not_of(OF_A_CUBIN if cubin else frozenset(context.params) - OF_A_CUBIN, context)
    if cubin is not None and which is None:
        predict_file(cubin, function, gpu, grid, block, smem, flops, hbm_bytes, rare, as_json)
    elif cubin is None and which is not None:
        problem = problem_of(dtype, d, causal, features, batch=batch, heads=heads, kv_heads=kv_heads, nq=nq, nk=nk)
        _predict_pass(which, problem, gpu, deterministic, kernel, tile, source, as_json)
    else:
        raise UsageError("predict what? Either forward or backward, or one launch of --cubin FILE.")


def _predict_pass(
    which: Which, problem: Problem, gpu: str, deterministic: bool, kernel: KernelOption, tile: str,
    source: SourceOption, as_json: bool,
) -> None:  # fmt: skip
    from ..predict import error_of, pass_tflops, predict_pass
    from ..sass import SassError

    target = served_gpu(gpu)
    binaries = binaries_of(which.value, problem, target, deterministic, kernel, tile, source)
    parts = parts_of(binaries, problem, target)
    try:
        predictions = predict_pass(binaries, problem, target, parts=parts)
    except SassError as error:
        raise CannotPredict(str(error)) from error
    tflops = pass_tflops(predictions, which.value, problem)
    if as_json:
        kernels = [{**asdict(p), "pipes": dict(p.pipes)} for p in predictions]
        known = {"tflops": tflops, "mean_error": error_of(target, binaries), "parts": parts}
        print_json({"evidence": "predicted", **known, "kernels": kernels})
    else:
        show_predict.predictions(predictions, tflops, target, parts)


def _refuse_what_is_not_of(asked: frozenset[str], context: typer.Context) -> None:
    """A pass and a cubin are asked for in different words: those of the other would be ignored."""
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name not in asked | OF_BOTH | {"which"} and source is not None and source.name == "COMMANDLINE":
            why = "goes with --cubin FILE" if name in OF_A_CUBIN else "is for a pass of ours, and a --cubin has its own"
            raise UsageError(f"{parameter.opts[0]} {why}.")
