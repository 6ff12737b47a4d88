"""Load the best kernel known for a problem on a GPU: Problem + Gpu -> Loaded."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from . import paths
from .compile import Binary, compile_source
from .errors import BadProblem, NoTunedKernel, UsageError
from .forms import FORMS, KERNELS_OF, WITHOUT_ATOMICS, Choice, Form, choose_form, pass_of, timed_kernels
from .lookup import Rung, Step, fitting, steps, warn_once
from .parts import choose_parts
from .render import Source, render
from .spec.defaults import default_tile
from .spec.forward_defaults import SHORT, of_partial
from .spec.gpu import Gpu, served_gpu
from .spec.kernel import CONVERTS, HOPPER, KernelName, KernelSpec
from .spec.limits import check_dtype, why_illegal
from .spec.problem import Pass, Problem
from .spec.record import Evidence, Record, record_path
from .spec.tile import ForwardTile, Tile

# Its default is what there is: nothing to choose, or no search that chooses.
UNTUNED: frozenset[KernelName] = frozenset({"delta", "combine"})

# Kernels that are not searched themselves: convert reads what fused accumulates in the order of its tile, and partial
# does with a part of the keys what forward does with all.
TILE_FROM: dict[KernelName, KernelName] = {**CONVERTS, "partial": "forward"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A kernel that serves a problem, and why it does."""

    spec: KernelSpec
    rung: Rung
    record: Record | None  # None for a default tile: nothing was timed
    found: str  # the file and the lengths of the record, or the rule

    @property
    def evidence(self) -> Evidence | None:
        """How the record's speed is known; None for a default tile."""
        return self.record.evidence if self.record else None

    @property
    def tile(self) -> Tile:
        """The tile chosen."""
        return self.spec.tile

    @property
    def source(self) -> Source:
        """Its CUDA text."""
        return render(self.spec)

    @property
    def binary(self) -> Binary:
        """Its machine code; compiled by the first to ask."""
        return compile_source(self.source)


def load_best(problem: Problem, kernel: KernelName, gpu: str | Gpu = "auto", folder: Path | None = None) -> Loaded:
    """The best kernel for `problem`.

    An exact record; else the record of the nearest length on the same GPU; else a record of a GPU of the same class
    (sm, shared memory, tensor rate); else, for features that take few registers, one of the problem without them; else
    a default computed by arithmetic. dtype, d, mask, kernel and sm are never approximated, and a tile for many query
    rows serves no few, nor the other way round. Records in `folder` (by default the user's) go before those that the
    package ships. Anything but an exact record is named in one warning for each GPU, problem and rung; with
    FLASHSMITH_STRICT=1 it is an error.

    Raises UnknownGpu, BadProblem; NoTunedKernel if not even the default fits, or in strict mode.
    """
    target = served_gpu(gpu) if isinstance(gpu, str) else gpu
    tuned = folder or paths.user_tuned_dir()
    looked_for = record_path(tuned, target.key)
    check_dtype(problem.dtype, target)
    if kernel in UNTUNED:
        return _default(problem, kernel, target, f"{kernel} is not tuned")
    for step in ladder(problem, kernel, target, tuned):
        if step.record is None:
            continue
        if step.rung != "record":
            _of_lower_rung(problem, kernel, target, step.rung, looked_for, f"{step.path} serves")
        tile = step.record.tile
        if kernel == "partial" and isinstance(tile, ForwardTile):
            tile = of_partial(tile)
        spec = KernelSpec.of(kernel, problem, tile, target.sm)
        return Loaded(spec=spec, rung=step.rung, record=step.record, found=step.found)
    _of_lower_rung(problem, kernel, target, "default", looked_for, "a tile computed by arithmetic serves")
    return _default(problem, kernel, target, f"no record in {looked_for}")


def load_pass(
    problem: Problem, which: Pass, gpu: str | Gpu = "auto", *, deterministic: bool = False, folder: Path | None = None
) -> dict[KernelName, Loaded]:
    """The kernels of a pass, in the order of their launches: those of the form that serves."""
    target = served_gpu(gpu) if isinstance(gpu, str) else gpu
    form = pass_form(problem, which, target, deterministic, folder)
    return {kernel: load_best(problem, kernel, target, folder) for kernel in form.kernels}


def pass_form(
    problem: Problem, which: Pass, target: Gpu, deterministic: bool = False, folder: Path | None = None,
    *, maps: bool = True,
) -> Choice:  # fmt: skip
    """The form of a pass that serves `problem`: its kernels, and the parts in which they are launched.

    Without `maps`, of those whose kernels take no tensor maps.
    """
    if which == "forward":
        return forward_form(problem, target, folder, maps=maps)
    return backward_form(problem, target, deterministic, folder, maps=maps)


def forward_form(problem: Problem, target: Gpu, folder: Path | None = None, *, maps: bool = True) -> Choice:
    """Whether the keys of `problem` are cut into parts, and into how many: by what blocks of its tile leave idle.

    If they are not, which kernel serves: the faster by the records.
    """
    if not problem.features.plain or problem.dv:
        whole = Choice(form="whole", reason="whole: keys are parted in plain and causal attention with d = dv alone")
    else:
        whole = choose_parts(load_best(problem, "partial", target, folder).spec, problem, target)
    if whole.form == "parts" or not maps or _why_not("whole90", problem, target):
        return whole
    return _by_records(problem, FORMS["forward"], target, folder)


def backward_form(
    problem: Problem, target: Gpu, deterministic: bool = False, folder: Path | None = None, *, maps: bool = True
) -> Choice:  # fmt: skip
    """Which backward serves `problem`: the fastest by the records, of those without atomics if it must be."""
    if deterministic and problem.score_mod and problem.score_mod.grads:
        names = ", ".join(table.name for table in problem.score_mod.grads)
        raise BadProblem(
            f"deterministic: the gradient of {names} is added up by atomics, in another order in every run. Ask for no "
            "gradient of it, or leave deterministic out."
        )
    forms = [form for form in FORMS["backward"] if not deterministic or form in WITHOUT_ATOMICS]
    forms = [form for form in forms if maps or HOPPER.isdisjoint(KERNELS_OF[form])]
    refused = {form: _why_not(form, problem, target) for form in forms}
    left = [form for form in forms if refused[form] is None] or forms[-1:]
    if len(left) > 1:
        return _by_records(problem, left, target, folder)
    asked = "deterministic gradients were asked for"
    return Choice(form=left[0], reason=f"{left[0]}: {asked if deterministic else refused[_usual(forms)]}")


def _usual(forms: Sequence[Form]) -> Form:
    """The form that a user would miss."""
    return "fused" if "fused" in forms else forms[0]


def _by_records(problem: Problem, forms: Sequence[Form], target: Gpu, folder: Path | None) -> Choice:
    folders = (folder or paths.user_tuned_dir(), paths.shipped_tuned_dir())
    kernels = dict.fromkeys(kernel for form in forms for kernel in timed_kernels(form))
    records = (r for kernel in kernels for r in fitting(problem, kernel, target, folders, why_stale))
    return choose_form(records, problem, target, forms)


def _why_not(form: Form, problem: Problem, target: Gpu) -> str | None:
    """Why a form cannot serve `problem`, or is not to; None if it may."""
    kernels = timed_kernels(form)
    if not HOPPER.isdisjoint(kernels):
        if target.sm != 90:
            return f"{kernels[0]} is for sm_90 alone"
        if problem.keys == 0:
            return f"{kernels[0]} has no tensor map of no keys"
        if pass_of(kernels[0]) == "forward" and problem.Nq <= SHORT:
            return f"{kernels[0]} has blocks of many rows"
    for kernel in kernels:
        try:
            KernelSpec.of(kernel, problem, default_tile(kernel, problem, target), target.sm)
        except (NoTunedKernel, BadProblem) as error:
            return str(error)
    return None


def ladder(problem: Problem, kernel: KernelName, target: Gpu, folder: Path | None = None) -> Iterator[Step]:
    """Every place where a record of `kernel` may lie, best first, with the record found there or why there is none."""
    folders = (folder or paths.user_tuned_dir(), paths.shipped_tuned_dir())
    return steps(problem, TILE_FROM.get(kernel, kernel), target, folders, why_stale)


@lru_cache(maxsize=4096)
def source_sha256(spec: KernelSpec) -> str:
    """The hash by which a record knows the text that it speaks of."""
    return hashlib.sha256(render(spec).text.encode()).hexdigest()


def why_stale(record: Record) -> str | None:
    """The field that says that `record` speaks of another text or compiler than today's; None if it does not.

    The text and NVRTC's major version decide what runs: a record that has both passed the tuner's check as it stands.
    """
    from .compile import version_text

    if source_sha256(record.spec) != record.source_sha256:
        return "source_sha256 is that of another text: the templates have changed since"
    now = version_text()
    if record.nvrtc.partition(".")[0] != now.partition(".")[0]:
        return f"nvrtc is {record.nvrtc}, and {now} compiles here"
    return None


def strict() -> bool:
    """Whether only exact records may serve: FLASHSMITH_STRICT. Raises UsageError unless it is empty, 0 or 1."""
    value = os.environ.get("FLASHSMITH_STRICT", "")
    if value not in ("", "0", "1"):
        raise UsageError(f"FLASHSMITH_STRICT={value!r}: use 1 (nothing but an exact record) or 0.")
    return value == "1"


def _of_lower_rung(
    problem: Problem, kernel: KernelName, target: Gpu, rung: Rung, looked_for: Path, instead: str
) -> None:
    """Warn once that no exact record serves; in strict mode raise NoTunedKernel."""
    lengths = f"Nq={problem.Nq} Nk={problem.keys}"
    missing = f"{looked_for} has no record of {TILE_FROM.get(kernel, kernel)} {problem.text} {lengths} for {target.key}"
    remedy = f"`flashsmith tune --gpu {target.key} {problem.options} --nq {problem.Nq} --nk {problem.keys}` makes one"
    if strict():
        raise NoTunedKernel(f"{missing}, and FLASHSMITH_STRICT=1 allows nothing else. {remedy}.")
    warn_once((target.key, problem.text, rung), f"{missing}; {instead} ({rung}). {remedy}.")


def _default(problem: Problem, kernel: KernelName, target: Gpu, found: str) -> Loaded:
    spec = KernelSpec.of(kernel, problem, default_tile(kernel, problem, target), target.sm)
    reason = why_illegal(spec, target)
    if reason:
        raise NoTunedKernel(
            f"no record serves {kernel} {problem.text} on {target.key}, and the default does not fit: {reason}"
        )
    return Loaded(spec=spec, rung="default", record=None, found=found)
