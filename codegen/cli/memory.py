"""Print the memory ledger: standard attention beside ours, computed and counted."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated, Any, cast

import typer

from ..spec.gpu import GPUS, find_gpu
from ..spec.problem import Problem
from . import show_memory
from .app import app
from .options import BatchOption, CausalOption, DimOption, DtypeOption, JsonOption, KvHeadsOption
from .output import print_json


@app.command()
def memory(
    n: Annotated[int, typer.Option("--n", help="Nq = Nk: query rows and keys of a head.")] = 32768,
    heads: Annotated[int, typer.Option("--heads", help="Query heads.")] = 32,
    kv_heads: KvHeadsOption = None,
    batch: BatchOption = 1,
    d: DimOption = 128,
    dtype: DtypeOption = "fp16",
    causal: CausalOption = False,
    gpu: Annotated[str | None, typer.Option("--gpu", help="What fits this GPU. Default: every one known.")] = None,
    count: Annotated[bool, typer.Option(help="Run a short forward on the emulator and count its stores.")] = True,
    measure: Annotated[bool, typer.Option("--measure", help="Run both on the GPU that is here.")] = False,
    as_json: JsonOption = False,
) -> None:
    """What attention keeps for its backward: N x N weights, or O and two numbers a row; and what fits a GPU."""
    from ..ledger import table

    problem = Problem(dtype=cast(Any, dtype), d=d, causal=causal, B=batch, Hq=heads, Hk=kv_heads, Nq=n, Nk=n)
    gpus = (find_gpu(gpu),) if gpu else tuple(GPUS.values())
    figures: dict[str, Any] = {**table(problem, {g.key: g for g in gpus}), "counted": [], "measured": []}
    if count:
        from ..footprint import count_forward

        few = replace(problem, B=1, Hq=1, Hk=1)  # one head writes what each does
        shown = find_gpu(gpu or "a100")
        counted = count_forward(few, shown if shown.served else GPUS["a100"])
        figures["counted"] = [{**asdict(c), "agrees": c.agrees} for c in counted]
    if measure:
        from ..footprint import measure_forward

        figures["measured"] = [asdict(m) for m in measure_forward(problem)]
    if as_json:
        print_json(figures)
    else:
        show_memory.ledger(figures)
    if not all(c["agrees"] for c in figures["counted"]):
        raise typer.Exit(1)
