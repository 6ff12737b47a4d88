"""Speak for flashsmith on the command line: results on stdout, progress on stderr, exit 0 / 1 wrong / 2 usage."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import click
import typer

from . import show
from .errors import FlashsmithError, UsageError
from .spec.gpu import GPUS, Gpu, present_gpu, served_gpu
from .spec.kernel import KernelName, KernelSpec, kernels_of
from .spec.limits import blocks_per_sm, why_illegal
from .spec.problem import Pass, Problem
from .spec.tile import Tile, parse_tile

if TYPE_CHECKING:
    from .compile import Binary
    from .render import Source

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Generate, read, check, time and tune exact attention kernels; no GPU needed.",
)


class Kernel(str, Enum):
    forward = "forward"
    delta = "delta"
    fused = "fused"
    convert = "convert"
    dkdv = "dkdv"
    dq = "dq"


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
DtypeOption = Annotated[str, typer.Option("--dtype", help="bf16 or fp16.")]
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


def main(arguments: list[str] | None = None) -> int:
    """Run one command; errors become one line on stderr and an exit status."""
    try:
        status = app(arguments, standalone_mode=False)
    except click.ClickException as error:  # bad options
        error.show()
        return 2
    except UsageError as error:
        print(f"flashsmith: {error}", file=sys.stderr)
        return 2
    except FlashsmithError as error:
        print(f"flashsmith: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, click.Abort):
        print("flashsmith: stopped", file=sys.stderr)
        return 130
    return status if isinstance(status, int) else 0


@app.command()
def gpus(as_json: JsonOption = False) -> None:
    """Known GPUs, their limits and rates, and which is present."""
    present = _present()
    if as_json:
        _print_json([{**asdict(gpu), "served": gpu.served, "present": gpu is present} for gpu in GPUS.values()])
    else:
        show.gpus(GPUS.values(), present)


@app.command()
def render(
    kernel: Kernel,
    gpu: GpuOption = "auto",
    dtype: DtypeOption = "bf16",
    d: DimOption = 128,
    causal: CausalOption = False,
    tile: TileOption = "",
    emit: Annotated[Emit, typer.Option("--emit", help="What to print.")] = Emit.cuda,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="A file instead of stdout.")] = None,
    diff: Annotated[str | None, typer.Option("--diff", help="Another tile: show what it changes.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Print a kernel: CUDA, PTX, SASS with its source lines, or the cubin."""
    from .render import render as render_source

    target, problem = served_gpu(gpu), Problem(dtype=cast(Any, dtype), d=d, causal=causal)
    source = render_source(_spec(kernel, problem, target, tile))
    if diff is not None:
        other = render_source(_legal(replace(source.spec, tile=parse_tile(diff, source.spec.tile)), target))
        return _emit(
            show.difference(_text(source, emit), _text(other, emit), source.spec.key, other.spec.key), "diff", output
        )
    if emit is Emit.cubin:
        return _emit_bytes(_compile(source).cubin, output)
    text = _text(source, emit)
    if as_json:
        return _print_json({"key": source.spec.key, "emit": emit.value, "text": text, **_facts(source.spec)})
    _emit(text, {Emit.cuda: "cuda", Emit.ptx: "asm", Emit.sass: "asm"}[emit], output)


@app.command("compile")
def compile_(
    kernel: Kernel,
    gpu: GpuOption = "auto",
    dtype: DtypeOption = "bf16",
    d: DimOption = 128,
    causal: CausalOption = False,
    tile: TileOption = "",
    source: SourceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compile a kernel: registers, spills, shared memory, blocks per SM, seconds."""
    target, problem = served_gpu(gpu), Problem(dtype=cast(Any, dtype), d=d, causal=causal)
    binary = _compile(_source(_spec(kernel, problem, target, tile), source))
    facts = {
        **_facts(binary.spec),
        "registers": binary.registers,
        "spill_bytes": binary.spill_bytes,
        "blocks_per_sm": blocks_per_sm(binary.spec, target, binary.registers),
        "seconds": binary.seconds,
        "cached": binary.cached,
    }
    if as_json:
        _print_json(facts)
    else:
        show.facts(facts)


@app.command()
def check(
    which: Which,
    gpu: GpuOption = "auto",
    dtype: DtypeOption = "bf16",
    d: DimOption = 128,
    causal: CausalOption = False,
    nq: NqOption = 200,
    nk: NkOption = None,
    heads: HeadsOption = 4,
    kv_heads: KvHeadsOption = None,
    batch: BatchOption = 1,
    deterministic: DeterministicOption = False,
    tile: TileOption = "",
    kernel: Annotated[
        Kernel | None, typer.Option("--kernel", help="The kernel that --tile or --source is for.")
    ] = None,
    source: SourceOption = None,
    engine: Annotated[EngineName, typer.Option("--engine", help="Where to run.")] = EngineName.emulator,
    seed: Annotated[int, typer.Option("--seed", help="Of the inputs.")] = 0,
    as_json: JsonOption = False,
) -> int:
    """Run a pass and compare each output with float64 and with plain attention in the same dtype."""
    from .check import check as check_pass
    from .check import make_inputs

    problem = Problem(dtype=cast(Any, dtype), d=d, causal=causal, B=batch, Hq=heads, Hk=kv_heads, Nq=nq, Nk=nk)
    target = served_gpu(gpu)
    binaries = _binaries(which.value, problem, target, deterministic, kernel, tile, source)
    verdict = check_pass(problem, which.value, binaries, _engine(engine), make_inputs(problem, seed))
    if as_json:
        _print_json({**asdict(verdict), "ok": verdict.ok, "lines": [{**asdict(x), "ok": x.ok} for x in verdict.lines]})
    else:
        show.verdict(verdict)
    return 0 if verdict.ok else 1


@app.command()
def predict(
    which: Which,
    gpu: GpuOption = "auto",
    dtype: DtypeOption = "bf16",
    d: DimOption = 128,
    causal: CausalOption = False,
    nq: NqOption = 8192,
    nk: NkOption = None,
    heads: HeadsOption = 16,
    kv_heads: KvHeadsOption = None,
    batch: BatchOption = 2,
    deterministic: DeterministicOption = False,
    tile: TileOption = "",
    kernel: Annotated[
        Kernel | None, typer.Option("--kernel", help="The kernel that --tile or --source is for.")
    ] = None,
    source: SourceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predict the time of a pass from its machine code, and say what bounds it."""
    from .predict import ERROR, pass_tflops, predict_pass

    problem = Problem(dtype=cast(Any, dtype), d=d, causal=causal, B=batch, Hq=heads, Hk=kv_heads, Nq=nq, Nk=nk)
    target = served_gpu(gpu)
    predictions = predict_pass(
        _binaries(which.value, problem, target, deterministic, kernel, tile, source), problem, target
    )
    tflops = pass_tflops(predictions, which.value, problem)
    if as_json:
        kernels = [{**asdict(p), "pipes": dict(p.pipes)} for p in predictions]
        _print_json({"evidence": "predicted", "tflops": tflops, "mean_error": ERROR, "kernels": kernels})
    else:
        show.predictions(predictions, tflops, target, ERROR)


@app.command()
def tune(
    gpu: GpuOption = "auto",
    dtype: DtypeOption = "bf16",
    d: DimOption = 128,
    causal: CausalOption = False,
    which: Annotated[Passes, typer.Option("--pass", help="What to tune.")] = Passes.both,
    trials: Annotated[int, typer.Option("--trials", help="Different legal tiles to try for each kernel.")] = 60,
    seed: Annotated[int, typer.Option("--seed", help="Of the search.")] = 0,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the records. Default: the user's.")] = None,
    nq: NqOption = 8192,
    nk: NkOption = None,
    heads: HeadsOption = 16,
    kv_heads: KvHeadsOption = None,
    batch: BatchOption = 2,
    as_json: JsonOption = False,
) -> None:
    """Search the best tiles for a GPU, by predicted time where there is none, and record them."""
    from . import paths
    from .tune import TUNED, tune_kernel

    if trials < 1:
        raise UsageError(f"--trials {trials}: a search needs at least 1.")
    problem = Problem(dtype=cast(Any, dtype), d=d, causal=causal, B=batch, Hq=heads, Hk=kv_heads, Nq=nq, Nk=nk)
    target, folder = served_gpu(gpu), out or paths.user_tuned_dir()
    passes: tuple[Pass, ...] = ("forward", "backward") if which is Passes.both else (which.value,)
    tuned = []
    for kernel in (kernel for each in passes for kernel in TUNED[each]):
        with show.Progress(f"{kernel} {problem.text} on {target.key}", trials) as progress:
            tuned.append(
                tune_kernel(kernel, problem, target, folder, trials=trials, seed=seed, progress=progress.candidate)
            )  # fmt: skip
    if as_json:
        _print_json([{"path": str(t.path), "record": asdict(t.record)} for t in tuned])
    else:
        show.tuned(tuned, problem, target)


@app.command("list")
def list_(
    gpu: Annotated[str | None, typer.Option("--gpu", help="Only this GPU.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder of the records. Default: the user's and the shipped.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """The tuned records: GPU, problem, tile, speed and how it is known."""
    from . import paths
    from .spec.gpu import find_gpu
    from .spec.record import read_records, record_path

    folders = (out,) if out else (paths.user_tuned_dir(), paths.shipped_tuned_dir())
    names = (find_gpu(gpu).key,) if gpu else tuple(GPUS)
    records = [r for folder in folders for name in names for r in read_records(record_path(folder, name))]
    if as_json:
        _print_json([asdict(record) for record in records])
    else:
        show.records(records, folders)


def _present() -> Gpu | None:
    try:
        return present_gpu()
    except UsageError:
        return None


def _spec(kernel: Kernel, problem: Problem, gpu: Gpu, tile: str) -> KernelSpec:
    """The kernel that load serves, with the fields that the user sets."""
    from .load import load_best

    loaded = load_best(problem, kernel.value, gpu)
    return _legal(replace(loaded.spec, tile=parse_tile(tile, loaded.tile)), gpu)


def _legal(spec: KernelSpec, gpu: Gpu) -> KernelSpec:
    from .errors import IllegalTile

    reason = why_illegal(spec, gpu)
    if reason:
        raise IllegalTile(reason)
    return spec


def _source(spec: KernelSpec, edited: Path | None) -> Source:
    from .render import Source, render

    if edited is None:
        return render(spec)
    try:
        return Source(spec, edited.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--source {edited}: {error}") from error


def _compile(source: Source) -> Binary:
    from .compile import compile_source

    return compile_source(source)


def _binaries(
    which: Pass, problem: Problem, gpu: Gpu, deterministic: bool, kernel: Kernel | None, tile: str, source: Path | None
) -> dict[KernelName, Binary]:
    """The kernels of a pass; the user's tile or source stands in for `kernel`, by default the pass's main one."""
    names = kernels_of(which, deterministic=deterministic)
    main = kernel.value if kernel else names[0] if which == "forward" else names[1]
    if main not in names:
        raise UsageError(f"--kernel {main} is not part of this pass; it has {', '.join(names)}.")
    specs = {name: _spec(Kernel(name), problem, gpu, tile if name == main else "") for name in names}
    if "convert" in specs:  # it reads what fused accumulates, in the order of fused's tile
        shared: Tile = specs["fused"].tile
        specs["convert"] = replace(specs["convert"], tile=shared)
    return {name: _compile(_source(spec, source if name == main else None)) for name, spec in specs.items()}


def _engine(name: EngineName) -> Any:
    if name is EngineName.cuda:
        raise UsageError("--engine cuda is not served yet; use --engine emulator.")
    from .engines.emulated import EmulatedEngine

    return EmulatedEngine(check_races=True)


def _text(source: Source, emit: Emit) -> str:
    if emit is Emit.cuda:
        return source.text
    binary = _compile(source)
    if emit is Emit.ptx:
        return binary.ptx
    if emit is Emit.cubin:
        raise UsageError("--diff compares text: use --emit cuda, ptx or sass.")
    from .sass import annotate

    return annotate(binary.cubin, source.text)


def _facts(spec: KernelSpec) -> dict[str, Any]:
    from .spec.limits import smem_bytes

    return {
        "kernel": spec.kernel, "key": spec.key, "tile": asdict(spec.tile), "threads": spec.threads,
        "smem_bytes": smem_bytes(spec),
    }  # fmt: skip


def _emit(text: str, language: str, output: Path | None) -> None:
    if output is None:
        show.code(text, language)
    else:
        _write(output, text.encode())


def _emit_bytes(data: bytes, output: Path | None) -> None:
    if output is not None:
        _write(output, data)
    elif sys.stdout.isatty():
        raise UsageError("a cubin is no text: name a file with -o, or redirect stdout.")
    else:
        sys.stdout.buffer.write(data)


def _write(output: Path, data: bytes) -> None:
    try:
        output.write_bytes(data)
    except OSError as error:
        raise UsageError(f"-o {output}: {error.strerror}") from error


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=1, default=_plain))


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else str(value)


if __name__ == "__main__":
    sys.exit(main())
