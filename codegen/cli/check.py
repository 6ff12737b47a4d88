"""Check a pass against float64."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from ..spec.gpu import served_gpu
from . import show
from .app import app
from .features import NO_FEATURES, FeatureOptions, takes_features
from .options import (
    BatchOption,
    CausalOption,
    DeterministicOption,
    DimOption,
    DtypeOption,
    EngineName,
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
from .request import binaries_of, engine_of, parts_of, problem_of


@app.command()
@takes_features
def check(
    which: Which,
    gpu: GpuOption = "auto",
    dtype: DtypeOption = "bf16",
    d: DimOption = 128,
    causal: CausalOption = False,
    features: FeatureOptions = NO_FEATURES,
    nq: NqOption = 200,
    nk: NkOption = None,
    heads: HeadsOption = 4,
    kv_heads: KvHeadsOption = None,
    batch: BatchOption = 1,
    deterministic: DeterministicOption = False,
    tile: TileOption = "",
    kernel: KernelOption = None,
    source: SourceOption = None,
    engine: Annotated[EngineName, typer.Option("--engine", help="Where to run.")] = EngineName.emulator,
    seed: Annotated[int, typer.Option("--seed", help="Of the inputs.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Run a pass and compare each output with float64 and with plain attention in the same dtype."""
    from ..check import check as check_pass
    from ..inputs import make_inputs

    problem = problem_of(dtype, d, causal, features, batch=batch, heads=heads, kv_heads=kv_heads, nq=nq, nk=nk)
    target = served_gpu(gpu)
    binaries = binaries_of(which.value, problem, target, deterministic, kernel, tile, source)
    parts = parts_of(binaries, problem, target)
    verdict = check_pass(problem, which.value, binaries, engine_of(engine), make_inputs(problem, seed), parts=parts)
    if as_json:
        print_json({**asdict(verdict), "ok": verdict.ok, "lines": [{**asdict(x), "ok": x.ok} for x in verdict.lines]})
    else:
        show.verdict(verdict)
    if not verdict.ok:
        raise typer.Exit(1)
