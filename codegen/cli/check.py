"""Check a pass against float64."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, cast

import typer

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
from .request import binaries_of, engine_of, parts_of


@app.command()
def check(
    which: Which,
    gpu: GpuOption = "auto",
    dtype: DtypeOption = "bf16",
    d: DimOption = 128,
    causal: CausalOption = False,
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
    from ..check import make_inputs

    problem = Problem(dtype=cast(Any, dtype), d=d, causal=causal, B=batch, Hq=heads, Hk=kv_heads, Nq=nq, Nk=nk)
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
