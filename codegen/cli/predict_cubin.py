"""Predict a kernel that is not ours: `flashsmith predict --cubin FILE`, its options, errors and output."""

from __future__ import annotations

from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Annotated

import typer

from ..errors import UsageError
from ..spec.gpu import find_gpu
from . import show_predict
from .output import print_json

CubinOption = Annotated[Path | None, typer.Option("--cubin", help="Predict one launch of this cubin instead.")]
FunctionOption = Annotated[
    str | None, typer.Option("--function", help="With --cubin: its function. Default: the only one.")
]
GridOption = Annotated[str | None, typer.Option("--grid", help="With --cubin: blocks, as N or X,Y,Z.")]
BlockOption = Annotated[int | None, typer.Option("--block", help="With --cubin: threads of a block.")]
SmemOption = Annotated[int, typer.Option("--smem", help="With --cubin: bytes of dynamic shared memory of a block.")]
FlopsOption = Annotated[
    float, typer.Option("--flops", help="With --cubin: FLOPs that the tensor cores execute in the whole launch.")
]
HbmOption = Annotated[
    float | None, typer.Option("--hbm-bytes", help="With --cubin: bytes read and written by the whole launch.")
]
RareOption = Annotated[
    float,
    typer.Option("--rare", help="With --cubin: share of iterations that run what is behind a branch, such as a mask."),
]


def predict_file(
    cubin: Path, function: str | None, gpu: str, grid: str | None, block: int | None, smem: int, flops: float,
    hbm_bytes: float | None, rare: float, as_json: bool,
) -> None:  # fmt: skip
    """Print the predicted time of one launch of a cubin."""
    from ..predict_cubin import Launch, predict_cubin

    if grid is None or block is None:
        raise UsageError("--cubin needs --grid and --block: the blocks of the launch, and the threads of a block.")
    launch = Launch(
        blocks=_blocks(grid), threads=block, smem_bytes=smem, tensor_flops=flops, hbm_bytes=hbm_bytes, rare_share=rare,
    )  # fmt: skip
    prediction = predict_cubin(_read(cubin), launch, find_gpu(gpu), function)
    if as_json:
        facts = asdict(prediction)
        time = facts.pop("time")
        print_json({"evidence": "predicted", **facts, "tflops": prediction.time.tflops, **time})
    else:
        show_predict.cubin(prediction)


def _blocks(grid: str) -> int:
    """
    >>> _blocks("864"), _blocks("64,16,2")
    (864, 2048)
    """
    parts = grid.split(",")
    if len(parts) > 3 or not all(part.strip().isdecimal() for part in parts):
        raise UsageError(f"--grid {grid}: give the number of blocks, or X,Y,Z.")
    return prod(map(int, parts))


def _read(cubin: Path) -> bytes:
    try:
        return cubin.read_bytes()
    except OSError as error:
        raise UsageError(f"--cubin {cubin}: {error.strerror}") from error
