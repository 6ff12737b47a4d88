"""Search the best tiles and record them."""

from __future__ import annotations

import sys
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import paths
from ..errors import NoTunedKernel, UsageError
from ..spec.defaults import default_tile
from ..spec.gpu import served_gpu
from ..spec.problem import Pass
from . import show
from .app import app
from .features import NO_FEATURES, FeatureOptions, takes_features
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
from .request import problem_of

if TYPE_CHECKING:
    from ..tune import Tuned


class Times(str, Enum):
    auto = "auto"
    measured = "measured"
    predicted = "predicted"


@app.command()
@takes_features
def tune(
    gpu: GpuOption = "auto",
    dtype: DtypeOption = "bf16",
    d: DimOption = 128,
    causal: CausalOption = False,
    features: FeatureOptions = NO_FEATURES,
    which: Annotated[Passes, typer.Option("--pass", help="What to tune.")] = Passes.both,
    trials: Annotated[int, typer.Option("--trials", help="Different legal tiles to try for each kernel.")] = 60,
    seed: Annotated[int, typer.Option("--seed", help="Of the search.")] = 0,
    times: Annotated[
        Times, typer.Option("--times", help="auto: measured if the GPU is here, else predicted.")
    ] = Times.auto,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the records. Default: the user's.")] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            "--storage",
            help="Where studies are kept: a file (a journal), postgresql://USER@HOST/DATABASE or redis://HOST:6379/0. "
            "Workers that name the same one share the work. Default: a journal for each GPU in the user's data folder.",
        ),
    ] = None,
    workers: Annotated[
        int,
        typer.Option("--workers", help="Processes that search together here. Where times are measured: one a GPU."),
    ] = 1,
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Show the storage's studies in a browser until Ctrl-C; search nothing.")
    ] = False,
    nq: NqOption = 8192,
    nk: NkOption = None,
    heads: HeadsOption = 16,
    kv_heads: KvHeadsOption = None,
    batch: BatchOption = 2,
    as_json: JsonOption = False,
) -> None:
    """Search the best tiles for a GPU and record them: by measured time if it is here, else by predicted time.

    A search that was stopped, by Ctrl-C or worse, goes on where it stood by the same command; with more --trials it
    goes further; one that is complete tries nothing again.
    """
    from ..study import default_storage, shown
    from ..tune import tune_kernel, tuned_kernels

    if dashboard:
        return _show_dashboard(storage or default_storage(served_gpu(gpu)))
    if trials < 1:
        raise UsageError(f"--trials {trials}: a search needs at least 1.")
    problem = problem_of(dtype, d, causal, features, batch=batch, heads=heads, kv_heads=kv_heads, nq=nq, nk=nk)
    target, folder = served_gpu(gpu), out or paths.user_tuned_dir()
    kept = storage or default_storage(target)
    passes: tuple[Pass, ...] = ("forward", "backward") if which is Passes.both else (which.value,)
    tuned = []
    for kernel in (kernel for each in passes for kernel in tuned_kernels(each, problem, target)):
        try:
            default_tile(kernel, problem, target)
        except NoTunedKernel as error:
            print(f"flashsmith: {error} It is not searched.", file=sys.stderr)
            continue
        title = f"{kernel} {problem.text} on {target.key}"
        progress = show.Progress(title, trials)
        try:
            with progress:
                found = tune_kernel(
                    kernel, problem, target, folder, trials=trials, seed=seed, by=times.value, storage=kept,
                    workers=workers, progress=progress.candidate,
                )  # fmt: skip
        except KeyboardInterrupt:
            stopped = f"flashsmith: stopped; {shown(kept)} keeps the {progress.count} trials of {title} so far."
            print(stopped, "The same command goes on from there.", file=sys.stderr)
            raise typer.Exit(130) from None
        tuned.append(found)
    if as_json:
        print_json([_document(each) for each in tuned])
    else:
        show.tuned(tuned, problem, target)


def _document(tuned: Tuned) -> dict[str, object]:
    winner = tuned.winner
    study = {"name": winner.study, "reused": winner.reused, "saved": winner.saved}
    return {"path": str(tuned.path), "unchanged": tuned.unchanged, "study": study, "record": asdict(tuned.record)}


def _show_dashboard(storage: str) -> None:
    from ..study.dashboard import serve

    try:
        serve(storage, lambda address: print(address, flush=True))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
