"""Search the best tiles and record them."""

from __future__ import annotations

from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from .. import paths
from ..errors import UsageError
from ..spec.gpu import served_gpu
from ..spec.problem import Pass, Problem
from . import show
from .app import app
from .options import (
    BatchOption,
    CausalOption,
    DimOption,
    DtypeOption,
    GpuOption,
    HeadsOption,
    JsonOption,
    KvHeadsOption,
    NkOption,
    NqOption,
    Passes,
)
from .output import print_json


class Times(str, Enum):
    auto = "auto"
    measured = "measured"
    predicted = "predicted"


@app.command()
def tune(
    gpu: GpuOption = "auto",
    dtype: DtypeOption = "bf16",
    d: DimOption = 128,
    causal: CausalOption = False,
    which: Annotated[Passes, typer.Option("--pass", help="What to tune.")] = Passes.both,
    trials: Annotated[int, typer.Option("--trials", help="Different legal tiles to try for each kernel.")] = 60,
    seed: Annotated[int, typer.Option("--seed", help="Of the search.")] = 0,
    times: Annotated[
        Times, typer.Option("--times", help="auto: measured if the GPU is here, else predicted.")
    ] = Times.auto,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the records. Default: the user's.")] = None,
    nq: NqOption = 8192,
    nk: NkOption = None,
    heads: HeadsOption = 16,
    kv_heads: KvHeadsOption = None,
    batch: BatchOption = 2,
    as_json: JsonOption = False,
) -> None:
    """Search the best tiles for a GPU and record them: by measured time if it is here, else by predicted time."""
    from ..tune import TUNED, tune_kernel

    if trials < 1:
        raise UsageError(f"--trials {trials}: a search needs at least 1.")
    problem = Problem(dtype=cast(Any, dtype), d=d, causal=causal, B=batch, Hq=heads, Hk=kv_heads, Nq=nq, Nk=nk)
    target, folder = served_gpu(gpu), out or paths.user_tuned_dir()
    passes: tuple[Pass, ...] = ("forward", "backward") if which is Passes.both else (which.value,)
    tuned = []
    for kernel in (kernel for each in passes for kernel in TUNED[each]):
        with show.Progress(f"{kernel} {problem.text} on {target.key}", trials) as progress:
            tuned.append(
                tune_kernel(
                    kernel, problem, target, folder,
                    trials=trials, seed=seed, by=times.value, progress=progress.candidate,
                )
            )  # fmt: skip
    if as_json:
        print_json([{"path": str(t.path), "record": asdict(t.record)} for t in tuned])
    else:
        show.tuned(tuned, problem, target)
