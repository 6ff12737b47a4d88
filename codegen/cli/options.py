"""Name the choices and options that commands share."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class Kernel(str, Enum):
    forward = "forward"
    partial = "partial"
    combine = "combine"
    delta = "delta"
    fused = "fused"
    convert = "convert"
    dkdv = "dkdv"
    dq = "dq"
    forward90 = "forward90"
    fused90 = "fused90"
    convert90 = "convert90"
    dkdv90 = "dkdv90"
    dkdv90_wide = "dkdv90_wide"
    dq90 = "dq90"


class Which(str, Enum):
    forward = "forward"
    backward = "backward"


class Passes(str, Enum):
    forward = "forward"
    backward = "backward"
    both = "both"


class Emit(str, Enum):
    cuda = "cuda"
    ptx = "ptx"
    sass = "sass"
    cubin = "cubin"


class EngineName(str, Enum):
    emulator = "emulator"
    cuda = "cuda"


GpuOption = Annotated[str, typer.Option("--gpu", help="A name that `flashsmith gpus` lists, or auto.")]
DtypeOption = Annotated[str, typer.Option("--dtype", help="bf16, fp16 or fp32.")]
DimOption = Annotated[int, typer.Option("--d", help="Head dimension, a multiple of 8 up to 256.")]
CausalOption = Annotated[bool, typer.Option("--causal", help="Key j is seen by query i iff j <= i + Nk - Nq.")]
TileOption = Annotated[
    str, typer.Option("--tile", help="Fields to set: Br=128,Bc=64,warps=4. Default: what load serves.")
]
SourceOption = Annotated[Path | None, typer.Option("--source", help="A .cu that you edited, in place of ours.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
NqOption = Annotated[int, typer.Option("--nq", help="Query rows.")]
NkOption = Annotated[int | None, typer.Option("--nk", help="Keys. Default: as many as query rows.")]
HeadsOption = Annotated[int, typer.Option("--heads", help="Query heads.")]
KvHeadsOption = Annotated[
    int | None, typer.Option("--kv-heads", help="Key/value heads. Default: as many as query heads.")
]
BatchOption = Annotated[int, typer.Option("--batch", help="Sequences.")]
DeterministicOption = Annotated[
    bool, typer.Option("--deterministic", help="The split backward: no atomics, bit-identical from run to run.")
]
KernelOption = Annotated[Kernel | None, typer.Option("--kernel", help="The kernel that --tile or --source is for.")]
