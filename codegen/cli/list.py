"""List the tuned records."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, get_args

import typer

from .. import paths
from ..errors import BadProblem
from ..spec.gpu import GPUS, find_gpu
from ..spec.problem import Dtype, check_head_dim
from . import show_records
from .app import app
from .options import JsonOption, Kernel
from .output import print_json


@app.command("list")
def list_(
    gpu: Annotated[str | None, typer.Option("--gpu", help="Only this GPU.")] = None,
    kernel: Annotated[Kernel | None, typer.Option("--kernel", help="Only this kernel.")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Only bf16 or fp16.")] = None,
    d: Annotated[int | None, typer.Option("--d", help="Only this head dimension.")] = None,
    causal: Annotated[bool | None, typer.Option("--causal/--no-causal", help="Only this mask. Default: both.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder of the records. Default: the user's and the shipped.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """The tuned records: GPU, problem, tile, speed, how it is known, and whether a load takes it."""
    from ..catalog import catalog

    if dtype is not None and dtype not in get_args(Dtype):
        raise BadProblem(f"dtype {dtype!r} is not served; use one of {', '.join(get_args(Dtype))}.")
    if d is not None:
        check_head_dim(d)
    folders = (out,) if out else (paths.user_tuned_dir(), paths.shipped_tuned_dir())
    wanted = {"kernel": kernel and kernel.value, "dtype": dtype, "d": d, "causal": causal}
    asked = {name: value for name, value in wanted.items() if value is not None}
    entries = [
        entry
        for entry in catalog(folders, (find_gpu(gpu).key,) if gpu else tuple(GPUS))
        if all(getattr(entry.record, name) == value for name, value in asked.items())
    ]
    if as_json:
        rows = [{**asdict(e.record), "path": str(e.path), "state": e.state, "why": e.why} for e in entries]
        print_json(rows)
    else:
        show_records.records(entries, folders, filtered=bool(asked or gpu))
