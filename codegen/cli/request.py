"""Turn what a command line says into kernels: specs, sources, binaries, an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..errors import IllegalTile, UsageError
from ..spec.gpu import Gpu
from ..spec.kernel import CONVERTS, KernelName, KernelSpec
from ..spec.limits import smem_bytes, why_illegal
from ..spec.problem import Pass, Problem
from ..spec.tile import parse_tile
from .features import FeatureOptions
from .options import EngineName, Kernel

if TYPE_CHECKING:
    from ..compile import Binary
    from ..render import Source


def problem_of(
    dtype: str, d: int, causal: bool, features: FeatureOptions,
    *, batch: int = 1, heads: int = 16, kv_heads: int | None = None, nq: int = 8192, nk: int | None = None,
) -> Problem:  # fmt: skip
    """What the options of a command ask for. Raises BadProblem, UsageError."""
    return Problem(
        dtype=cast(Any, dtype), d=d, causal=causal, B=batch, Hq=heads, Hk=kv_heads, Nq=nq, Nk=nk,
        **features.of_problem(),
    )  # fmt: skip


def spec_of(kernel: Kernel, problem: Problem, gpu: Gpu, tile: str) -> KernelSpec:
    """The kernel that load serves, with the fields that the user sets."""
    from ..load import load_best

    loaded = load_best(problem, kernel.value, gpu)
    return legal(replace(loaded.spec, tile=parse_tile(tile, loaded.tile)), gpu)


def legal(spec: KernelSpec, gpu: Gpu) -> KernelSpec:
    reason = why_illegal(spec, gpu)
    if reason:
        raise IllegalTile(reason)
    return spec


def source_of(spec: KernelSpec, edited: Path | None) -> Source:
    from ..render import Source, render

    if edited is None:
        return render(spec)
    try:
        return Source(spec, edited.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--source {edited}: {error}") from error


def compiled(source: Source) -> Binary:
    from ..compile import compile_source

    return compile_source(source)


def binaries_of(
    which: Pass, problem: Problem, gpu: Gpu, deterministic: bool, kernel: Kernel | None, tile: str, source: Path | None
) -> dict[KernelName, Binary]:
    """The kernels of a pass, compiled; see `sources_of`."""
    sources = sources_of(which, problem, gpu, deterministic, kernel, tile, source)
    return {name: compiled(text) for name, text in sources.items()}


def sources_of(
    which: Pass, problem: Problem, gpu: Gpu, deterministic: bool, kernel: Kernel | None, tile: str,
    source: Path | None, *, maps: bool = True,
) -> dict[KernelName, Source]:  # fmt: skip
    """The kernels of a pass; the user's tile or source stands in for `kernel`, by default the pass's main one.

    Without `maps`, kernels that take tensor maps are there only if the user names one.
    """
    names = _names(which, problem, gpu, deterministic, kernel, maps)
    main = kernel.value if kernel else names[0] if which == "forward" else names[1]
    if main not in names:
        raise UsageError(f"--kernel {main} is not part of this pass; it has {', '.join(names)}.")
    specs = {name: spec_of(Kernel(name), problem, gpu, tile if name == main else "") for name in names}
    for convert, fused in CONVERTS.items():
        if convert in specs:  # it reads what fused accumulates, in the order of fused's tile
            specs[convert] = replace(specs[convert], tile=specs[fused].tile)
    return {name: source_of(spec, source if name == main else None) for name, spec in specs.items()}


def _names(
    which: Pass, problem: Problem, gpu: Gpu, deterministic: bool, kernel: Kernel | None, maps: bool
) -> tuple[KernelName, ...]:
    """The kernels of a pass: those of the form that serves, or of the form that `kernel` is part of."""
    from ..forms import KERNELS_OF, WITHOUT_ATOMICS, launches_with, pass_of
    from ..load import pass_form

    served = pass_form(problem, which, gpu, deterministic, maps=maps).kernels
    if kernel is None or kernel.value in served or pass_of(kernel.value) != which:
        return served
    with_it = launches_with(kernel.value, problem)
    without_atomics = {KERNELS_OF[form] for form in WITHOUT_ATOMICS}
    return with_it if not deterministic or with_it in without_atomics else served


def parts_of(kernels: Mapping[KernelName, Binary | Source], problem: Problem, gpu: Gpu) -> int:
    """Parts in which a pass of these kernels is launched: 1 unless `partial` is one of them."""
    from ..parts import choose_parts

    return choose_parts(kernels["partial"].spec, problem, gpu).parts if "partial" in kernels else 1


def engine_of(name: EngineName) -> Any:
    if name is EngineName.cuda:
        from ..engines.cuda import cuda_engine

        return cuda_engine(poison=True)
    from ..engines.emulated import EmulatedEngine

    return EmulatedEngine(check_races=True)


def facts_of(spec: KernelSpec) -> dict[str, Any]:
    return {
        "kernel": spec.kernel, "key": spec.key, "tile": asdict(spec.tile), "threads": spec.threads,
        "smem_bytes": smem_bytes(spec),
    }  # fmt: skip
