"""List the tuned records."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .. import paths
from ..spec.gpu import GPUS, find_gpu
from ..spec.record import read_records, record_path
from . import show
from .app import app
from .options import JsonOption
from .output import print_json


@app.command("list")
def list_(
    gpu: Annotated[str | None, typer.Option("--gpu", help="Only this GPU.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder of the records. Default: the user's and the shipped.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """The tuned records: GPU, problem, tile, speed and how it is known."""
    folders = (out,) if out else (paths.user_tuned_dir(), paths.shipped_tuned_dir())
    names = (find_gpu(gpu).key,) if gpu else tuple(GPUS)
    records = [r for folder in folders for name in names for r in read_records(record_path(folder, name))]
    if as_json:
        print_json([asdict(record) for record in records])
    else:
        show.records(records, folders)
