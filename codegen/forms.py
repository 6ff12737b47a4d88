"""Choose between the two forms of the backward by what the records say of both: records -> Choice.

`fused` computes dK, dV and dQ in one kernel and adds up dQ by atomics, `split` computes S and dP twice, in `dkdv` and
in `dq`, and needs neither atomics nor an accumulator in float32. Which is faster depends on the GPU and on d.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from .lookup import distance
from .predict import board_of, sizes_of, work_of
from .sass.kernel_time import memory_seconds
from .spec.defaults import default_tile
from .spec.gpu import GPUS, Gpu
from .spec.kernel import FORWARD, FUSED, PARTS, SPLIT, KernelName, KernelSpec
from .spec.problem import Problem
from .spec.record import Record

Form = Literal["whole", "parts", "fused", "split"]  # two of the forward, see parts.py; two of the backward

KERNELS_OF: dict[Form, tuple[KernelName, ...]] = {"whole": FORWARD, "parts": PARTS, "fused": FUSED, "split": SPLIT}
COMPARED: tuple[KernelName, ...] = ("fused", "dkdv", "dq")  # what has records
MARGIN = 0.05  # by which split must be faster to serve in the place of fused; less is noise of either kind of time


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """Records of both forms for one GPU, one set of lengths and one kind of time."""

    fused: Record
    dkdv: Record
    dq: Record

    @property
    def measured(self) -> bool:
        return self.fused.evidence.kind == "measured"

    def rank(self, problem: Problem, gpu: Gpu) -> tuple[bool, bool, float]:
        """Measured before predicted, wherever from: a ratio of measured times at other lengths says more."""
        return (not self.measured, self.fused.gpu != gpu.key, distance(self.fused, problem))


def choose_form(records: Iterable[Record], problem: Problem, gpu: Gpu) -> Choice:
    """Split, if the best pair of records finds it faster by more than MARGIN; else fused.

    `records` are those of COMPARED that may serve `problem` on `gpu`. Two forms are compared by times of one kind, for
    one GPU and the same lengths; a measured pair outranks a predicted one, then one of `gpu` itself one of its class,
    then the nearer lengths others. Predicted times are those of all kernels of a form; `delta` and `convert` have no
    records, and their time is that of their bytes. Of measured times there is none for these two: they are left out.
    """
    pair = min(_pairs(records), key=lambda pair: pair.rank(problem, gpu), default=None)
    if pair is None:
        return Choice(form="fused", reason="fused: no records of both forms to compare")
    ms = {"fused": pair.fused.evidence.time_ms, "split": pair.dkdv.evidence.time_ms + pair.dq.evidence.time_ms}
    if not pair.measured:
        owner = GPUS.get(pair.fused.gpu, gpu)
        delta, convert = (streaming_ms(kernel, pair.fused, owner) for kernel in ("delta", "convert"))
        ms = {"fused": ms["fused"] + delta + convert, "split": ms["split"] + delta}
    form: Form = "split" if ms["fused"] > (1 + MARGIN) * ms["split"] else "fused"
    return Choice(form=form, reason=_reason(form, ms, pair))


def streaming_ms(kernel: KernelName, fused: Record, gpu: Gpu) -> float:
    """The predicted ms of `delta` or `convert` beside a record of `fused`: that of the bytes they move."""
    problem = _problem(fused)
    tile = fused.tile if kernel == "convert" else default_tile(kernel, problem, gpu)
    spec = KernelSpec.of(kernel, problem, tile, gpu.sm)
    return 1e3 * memory_seconds(board_of(gpu), work_of(spec, sizes_of(problem)))


def _pairs(records: Iterable[Record]) -> Iterator[_Pair]:
    """Of each GPU, lengths and kind of time, the first record of each kernel, where all three are there."""
    groups: dict[tuple[object, ...], dict[KernelName, Record]] = {}
    for record in records:
        evidence = record.evidence
        by = "measured" if evidence.kind == "measured" else evidence.by  # two models are not compared either
        lengths = (record.B, record.Hq, record.Hk, record.Nq, record.Nk)
        groups.setdefault((record.gpu, *lengths, by), {}).setdefault(record.kernel, record)
    for group in groups.values():
        if all(kernel in group for kernel in COMPARED):
            yield _Pair(fused=group["fused"], dkdv=group["dkdv"], dq=group["dq"])


def _reason(form: Form, ms: dict[str, float], pair: _Pair) -> str:
    record = pair.fused
    flops = _problem(record).flops("backward")
    other = "fused" if form == "split" else "split"
    speeds = f"{form}: {flops / ms[form] / 1e9:.0f} against {flops / ms[other] / 1e9:.0f} TFLOP/s"
    where = f"{record.evidence.kind} for Nq={record.Nq}, Nk={record.Nk} on {record.gpu}"
    left_out = ", delta and convert left out" if pair.measured else ""
    close = f"; split must gain more than {MARGIN:.0%}" if ms[form] > ms[other] else ""
    return f"{speeds}, {where}{left_out}{close}"


def _problem(record: Record) -> Problem:
    return Problem(
        dtype=record.dtype, d=record.d, dv=record.dv or None, causal=record.causal, B=record.B, Hq=record.Hq,
        Hk=record.Hk, Nq=record.Nq, Nk=record.Nk,
    )  # fmt: skip
