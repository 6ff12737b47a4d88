"""Choose between the forms of a pass by what the records say of them: records -> Choice.

`fused` computes dK, dV and dQ in one kernel and adds up dQ by atomics, `split` computes S and dP twice, in `dkdv` and
in `dq`, and needs neither atomics nor an accumulator in float32. Which is faster depends on the GPU and on d. On sm_90
each form has a second family of kernels, of warpgroups (the names with 90).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .lookup import distance
from .predict import board_of, model_of, sizes_of, work_of
from .sass.kernel_time import memory_seconds
from .spec.defaults import default_tile
from .spec.gpu import GPUS, Gpu
from .spec.kernel import (
    CONVERTS,
    FORWARD,
    FUSED,
    FUSED90,
    PARTS,
    SPLIT,
    SPLIT90,
    SPLIT90_WIDE,
    WARPGROUPS,
    KernelName,
    KernelSpec,
    split90,
)
from .spec.problem import Pass, Problem
from .spec.record import Record

Form = Literal["whole", "parts", "whole90", "fused", "split", "fused90", "split90", "split90_wide"]

KERNELS_OF: dict[Form, tuple[KernelName, ...]] = {
    "whole": FORWARD, "parts": PARTS, "whole90": WARPGROUPS, "fused": FUSED, "split": SPLIT, "fused90": FUSED90,
    "split90": SPLIT90, "split90_wide": SPLIT90_WIDE,
}  # fmt: skip
# Of each pass, the forms that records choose from; the first that can serve does so unless another is faster by MARGIN.
FORMS: dict[Pass, tuple[Form, ...]] = {
    "forward": ("whole90", "whole"), "backward": ("fused90", "fused", "split90", "split90_wide", "split"),
}  # fmt: skip
WITHOUT_ATOMICS: frozenset[Form] = frozenset({"split", "split90", "split90_wide"})  # bit-identical from run to run
STREAMING: tuple[KernelName, ...] = ("delta", *CONVERTS)  # have no records: their time is that of their bytes
MARGIN = 0.05  # by which a form must be faster to serve in the place of the first; less is noise of either kind of time


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The form that serves, and why."""

    form: Form
    reason: str
    parts: int = 1  # into which a forward by parts cuts the keys

    @property
    def kernels(self) -> tuple[KernelName, ...]:
        """Its kernels, in the order of their launches."""
        return KERNELS_OF[self.form]


def pass_of(kernel: KernelName) -> Pass:
    """The pass that a kernel is part of."""
    return "forward" if kernel in (*FORWARD, *PARTS, *WARPGROUPS) else "backward"


def launches_with(kernel: KernelName, problem: Problem) -> tuple[KernelName, ...]:
    """The kernels of the form that `kernel` is part of where it serves `problem`."""
    forms = [names for names in KERNELS_OF.values() if kernel in names]
    return next(
        (names for names in forms if names not in (SPLIT90, SPLIT90_WIDE) or names == split90(problem)), forms[0]
    )


def of_other_widths(kernel: KernelName, problem: Problem) -> bool:
    """Whether a kernel is of the split backward of warpgroups for heads that are wider, or less wide."""
    return kernel in (*SPLIT90, *SPLIT90_WIDE) and kernel not in (*split90(problem), *SPLIT)


def timed_kernels(form: Form) -> tuple[KernelName, ...]:
    """The kernels of a form that have records."""
    return tuple(kernel for kernel in KERNELS_OF[form] if kernel not in STREAMING)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evidence:
    """Records of several forms for one GPU, one set of lengths and one kind of time."""

    records: Mapping[KernelName, Record]
    forms: tuple[Form, ...]  # of which all kernels have one

    @property
    def first(self) -> Record:
        return next(iter(self.records.values()))

    @property
    def measured(self) -> bool:
        return self.first.evidence.kind == "measured"

    def rank(self, problem: Problem, gpu: Gpu) -> tuple[int, bool, bool, float]:
        """Of more forms first; then measured before predicted, wherever from: such a ratio says more."""
        return (-len(self.forms), not self.measured, self.first.gpu != gpu.key, distance(self.first, problem))

    def ms(self, form: Form, gpu: Gpu) -> float:
        """The time of a form. Of measured times there is none for STREAMING kernels: they are left out."""
        timed = [self.records[kernel] for kernel in timed_kernels(form)]
        owner = GPUS.get(self.first.gpu, gpu)
        others = [kernel for kernel in KERNELS_OF[form] if kernel in STREAMING and not self.measured]
        return sum(r.evidence.time_ms for r in timed) + sum(streaming_ms(k, timed[0], owner) for k in others)


def choose_form(records: Iterable[Record], problem: Problem, gpu: Gpu, forms: Sequence[Form]) -> Choice:
    """The first of `forms`, unless the best evidence finds another faster by more than MARGIN: then the fastest.

    `records` are those of the timed kernels that may serve `problem` on `gpu`. Forms are compared by times of one kind,
    for one GPU and the same lengths; evidence on more forms goes first, then measured, then of `gpu` itself, then of
    the nearest lengths. Predicted times are those of all kernels of a form. A form on which there is no evidence, where
    there is some on others, does not serve.
    """
    if len(forms) == 1:
        return Choice(form=forms[0], reason=f"{forms[0]}: the only form that serves")
    evidence = min(_evidence(records, forms), key=lambda each: each.rank(problem, gpu), default=None)
    if evidence is None:
        which = "both forms" if len(forms) == 2 else "several forms"
        return Choice(form=forms[0], reason=f"{forms[0]}: no records of {which} to compare")
    ms = {form: evidence.ms(form, gpu) for form in evidence.forms}
    first, fastest = evidence.forms[0], min(ms, key=lambda form: ms[form])
    form = fastest if ms[first] > (1 + MARGIN) * ms[fastest] else first
    return Choice(form=form, reason=_reason(form, ms, evidence))


def streaming_ms(kernel: KernelName, timed: Record, gpu: Gpu) -> float:
    """The predicted ms of one of STREAMING beside a record of the pass's main kernel: that of the bytes they move."""
    problem = _problem(timed)
    tile = default_tile(kernel, problem, gpu) if kernel == "delta" else timed.tile
    spec = KernelSpec.of(kernel, problem, tile, gpu.sm)
    return 1e3 * memory_seconds(board_of(gpu), work_of(spec, sizes_of(problem)))


def _evidence(records: Iterable[Record], forms: Sequence[Form]) -> Iterator[_Evidence]:
    """Of each GPU, lengths and kind of time, the first record of each kernel, where two forms or more are whole."""
    groups: dict[tuple[object, ...], dict[KernelName, Record]] = {}
    for record in records:
        evidence = record.evidence
        # Of a model only today's version is compared, with that of the other family's model.
        by = evidence.by if evidence.kind == "predicted" and evidence.by != model_of(record.kernel) else evidence.kind
        lengths = (record.B, record.Hq, record.Hk, record.Nq, record.Nk)
        groups.setdefault((record.gpu, *lengths, by), {}).setdefault(record.kernel, record)
    for group in groups.values():
        whole = tuple(form for form in forms if all(kernel in group for kernel in timed_kernels(form)))
        if len(whole) > 1:
            yield _Evidence(records=group, forms=whole)


def _reason(form: Form, ms: Mapping[Form, float], evidence: _Evidence) -> str:
    record = evidence.first
    flops = _problem(record).flops(pass_of(record.kernel))
    others = [f"{flops / ms[other] / 1e9:.0f}{f' ({other})' if len(ms) > 2 else ''}" for other in ms if other != form]
    speeds = f"{form}: {flops / ms[form] / 1e9:.0f} against {', '.join(others)} TFLOP/s"
    where = f"{record.evidence.kind} for Nq={record.Nq}, Nk={record.Nk} on {record.gpu}"
    streaming = [kernel for kernel in STREAMING if any(kernel in KERNELS_OF[each] for each in ms)]
    left_out = f", {', '.join(streaming[:-1])} and {streaming[-1]} left out" if evidence.measured and streaming else ""
    faster = min(ms, key=lambda each: ms[each])
    close = f"; {faster} must gain more than {MARGIN:.0%}" if faster != form else ""
    return f"{speeds}, {where}{left_out}{close}"


def _problem(record: Record) -> Problem:
    return Problem(
        dtype=record.dtype, d=record.d, dv=record.dv or None, causal=record.causal, B=record.B, Hq=record.Hq,
        Hk=record.Hk, Nq=record.Nq, Nk=record.Nk,
    )  # fmt: skip
