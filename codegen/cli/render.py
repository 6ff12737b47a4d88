"""Print a kernel as CUDA, PTX, SASS or a cubin."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UsageError
from ..spec.gpu import served_gpu
from ..spec.tile import parse_tile
from . import show
from .app import app
from .features import NO_FEATURES, FeatureOptions, takes_features
from .options import (
    CausalOption,
    DimOption,
    DtypeOption,
    Emit,
    GpuOption,
    HeadsOption,
    JsonOption,
    Kernel,
    KvHeadsOption,
    NkOption,
    NqOption,
    TileOption,
)
from .output import print_json, write_bytes, write_text
from .request import compiled, facts_of, legal, problem_of, spec_of

if TYPE_CHECKING:
    from ..render import Source


@app.command()
@takes_features
def render(
    kernel: Kernel,
    gpu: GpuOption = "auto",
    dtype: DtypeOption = "bf16",
    d: DimOption = 128,
    causal: CausalOption = False,
    features: FeatureOptions = NO_FEATURES,
    nq: NqOption = 8192,
    nk: NkOption = None,
    heads: HeadsOption = 16,
    kv_heads: KvHeadsOption = None,
    tile: TileOption = "",
    emit: Annotated[Emit, typer.Option("--emit", help="What to print.")] = Emit.cuda,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="A file instead of stdout.")] = None,
    diff: Annotated[str | None, typer.Option("--diff", help="Another tile: show what it changes.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Print a kernel: CUDA, PTX, SASS with its source lines, or the cubin."""
    from ..render import render as render_source

    target = served_gpu(gpu)
    problem = problem_of(dtype, d, causal, features, heads=heads, kv_heads=kv_heads, nq=nq, nk=nk)
    source = render_source(spec_of(kernel, problem, target, tile))
    if diff is not None:
        other = render_source(legal(replace(source.spec, tile=parse_tile(diff, source.spec.tile)), target))
        return write_text(
            show.difference(text_of(source, emit), text_of(other, emit), source.spec.key, other.spec.key),
            "diff",
            output,
        )
    if emit is Emit.cubin:
        return write_bytes(compiled(source).cubin, output)
    text = text_of(source, emit)
    if as_json:
        return print_json({"key": source.spec.key, "emit": emit.value, "text": text, **facts_of(source.spec)})
    write_text(text, {Emit.cuda: "cuda", Emit.ptx: "asm", Emit.sass: "asm"}[emit], output)


def text_of(source: Source, emit: Emit) -> str:
    if emit is Emit.cuda:
        return source.text
    binary = compiled(source)
    if emit is Emit.ptx:
        return binary.ptx
    if emit is Emit.cubin:
        raise UsageError("--diff compares text: use --emit cuda, ptx or sass.")
    from ..sass import annotate

    return annotate(binary.cubin, source.text)
