"""Compile ahead for a list of problems."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import Annotated, Any, cast

import typer

from ..spec.gpu import served_gpu
from ..spec.problem import Pass, Problem
from .app import app
from .console import print_lines, table
from .options import CausalOption, DeterministicOption, DimOption, DtypeOption, GpuOption, JsonOption, Passes
from .output import print_json


@app.command()
def warmup(
    problems: Annotated[
        list[str] | None,
        typer.Argument(help="dtype=bf16,d=128,causal=1,Nq=8192 ...; what is left out, the options say."),
    ] = None,
    gpu: GpuOption = "auto",
    dtype: DtypeOption = "bf16",
    d: DimOption = 128,
    causal: CausalOption = False,
    which: Annotated[Passes, typer.Option("--pass", help="What to compile.")] = Passes.both,
    deterministic: DeterministicOption = False,
    check: Annotated[bool, typer.Option("--check", help="Run each on small shapes, on the emulator.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compile the kernels of a list of problems into the cache, so that no first call waits for it."""
    from ..warmup import parse_problem, warm_up

    default = Problem(dtype=cast(Any, dtype), d=d, causal=causal)
    asked = [parse_problem(text, default) for text in problems or ()] or [default]
    passes: tuple[Pass, ...] = ("forward", "backward") if which is Passes.both else (which.value,)

    def say(warmed: Any) -> None:
        state = warmed.failure or ("on disk already" if warmed.cached else f"compiled in {warmed.seconds:.1f} s")
        print(f"{warmed.key}: {state}", file=sys.stderr)

    done = warm_up(
        asked, passes, served_gpu(gpu),
        deterministic=deterministic, check=check, workers=os.cpu_count() or 1, progress=say,
    )  # fmt: skip
    if as_json:
        print_json([asdict(warmed) for warmed in done])
    else:
        lines = table("kernel", "served by", "s", "", right=("s",))
        for warmed in done:
            state = warmed.failure or ("on disk already" if warmed.cached else "compiled")
            lines.add_row(warmed.key, warmed.rung, f"{warmed.seconds:.1f}", state)
        print_lines(lines)
    if any(warmed.failure for warmed in done):
        raise typer.Exit(1)
