"""Write a pass as CUDA with a launcher in C, or as machine code with a description of its launches."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ..spec.gpu import served_gpu
from .app import app
from .features import NO_FEATURES, FeatureOptions, takes_features
from .options import (
    CausalOption,
    DeterministicOption,
    DimOption,
    DtypeOption,
    GpuOption,
    HeadsOption,
    JsonOption,
    KernelOption,
    KvHeadsOption,
    NkOption,
    NqOption,
    TileOption,
    Which,
)
from .output import print_json
from .request import compiled, parts_of, problem_of, sources_of


class Exported(str, Enum):
    cuda = "cuda"
    cubin = "cubin"


@app.command()
@takes_features
def export(
    which: Which,
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder to write to.")],
    gpu: GpuOption = "auto",
    dtype: DtypeOption = "bf16",
    d: DimOption = 128,
    causal: CausalOption = False,
    features: FeatureOptions = NO_FEATURES,
    nq: NqOption = 8192,
    nk: NkOption = None,
    heads: HeadsOption = 16,
    kv_heads: KvHeadsOption = None,
    deterministic: DeterministicOption = False,
    tile: TileOption = "",
    kernel: KernelOption = None,
    emit: Annotated[
        Exported, typer.Option("--emit", help="A .cu with its launcher and a header, or cubins and launch.json.")
    ] = Exported.cuda,
    name: Annotated[str | None, typer.Option("--name", help="What all names in C begin with.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that holds other files.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a whole pass for a C or C++ program: its kernels, launcher and header, or its machine code.

    It serves any lengths and heads; those given here decide which tile is written, as elsewhere.
    """
    from ..export import cubin_files, cuda_files, plan_of, write_files

    problem = problem_of(dtype, d, causal, features, heads=heads, kv_heads=kv_heads, nq=nq, nk=nk)
    target = served_gpu(gpu)
    sources = sources_of(which.value, problem, target, deterministic, kernel, tile, None, maps=False)
    plan = plan_of(problem, which.value, sources, parts=parts_of(sources, problem, target), name=name)
    if emit is Exported.cubin:
        files = cubin_files(plan, compiled)
    else:
        files = {file: text.encode() for file, text in cuda_files(plan).items()}
    written = write_files(output, files, force=force)
    if as_json:
        keys = [launch.source.spec.key for launch in plan.launches]
        print_json({"name": plan.name, "pass": plan.which, "kernels": keys, "files": [str(path) for path in written]})
    else:
        print(*written, sep="\n")
