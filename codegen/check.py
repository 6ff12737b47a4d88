"""Check a pass against the float64 reference: Binaries in, a Verdict out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .compile import Binary
from .engines.engine import Engine
from .given import F64, Ints
from .inputs import Inputs, extras_of, given_of, make_inputs
from .plain import plain_attention
from .reference import Result, attention
from .run import Extras, Forward, Gradients, run_backward, run_forward
from .spec.dtype import EPSILON, round_to, widen
from .spec.kernel import KernelName
from .spec.problem import Dtype, Pass, Problem

FACTOR = 2.0  # a kernel's error may be this many times that of plain attention in the same dtype
FLOOR = 1e-5  # plus this
SUM_BOUND = 1e-6  # of sums that may cancel, dQ, dK, of tables: relative to the sizes of what is added up in fp32
STATISTICS_BOUND = 2e-6  # relative to 1 + |m|: fp32 scores, whatever the dtype of the inputs


@dataclass(frozen=True, slots=True)
class Line:
    """One tensor's largest error, that of plain attention, and the bound."""

    tensor: str
    error: float
    plain: float
    bound: float

    @property
    def ok(self) -> bool:
        """NaN is never right."""
        return self.error <= self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A check's outcome."""

    problem: Problem
    which: Pass
    kernels: tuple[str, ...]  # keys of what ran
    engine: str
    lines: tuple[Line, ...]
    races: tuple[str, ...] = ()  # missing barriers that the emulator found

    @property
    def ok(self) -> bool:
        """Every tensor within its bound, and no race."""
        return all(line.ok for line in self.lines) and not self.races

    @property
    def reason(self) -> str:
        """What is wrong, in a sentence; empty if nothing is."""
        faults = [f"{x.tensor} is off by {x.error:.2e}, allowed {x.bound:.2e}" for x in self.lines if not x.ok]
        return "; ".join([*faults, *self.races])


def check(
    problem: Problem, which: Pass, binaries: Mapping[KernelName, Binary], engine: Engine, inputs: Inputs | None = None,
    *, parts: int = 1,
) -> Verdict:  # fmt: skip
    """Run `which` on `engine` and compare every output with float64 and with plain attention in the same dtype.

    A forward by parts cuts the keys into `parts`.

    The bound of O and of gradients is twice the error of plain attention plus 1e-5 plus half a unit in the last place
    of the largest value: what rounding the right answer costs. The backward runs on the reference's rounded forward;
    where float64 on that same forward is further off than plain attention, that error counts in its place. Sums that
    cancel are allowed 1e-6 of what they would be without signs: they are added up in fp32.
    """
    x = inputs or make_inputs(problem)
    scale, dtype = problem.softmax_scale, problem.dtype
    given = given_of(problem, x)
    wide = [widen(a, dtype) for a in (x.q, x.k, x.v, x.dO)]
    exact = attention(*wide, scale=scale, causal=problem.causal, given=given)
    plain = plain_attention(x.q, x.k, x.v, x.dO, dtype=dtype, scale=scale, causal=problem.causal, given=given)
    extras = extras_of(problem, x, engine)
    q, k, v = (engine.tensor(a) for a in (x.q, x.k, x.v))
    if which == "forward":
        lazy = any(getattr(binary.spec.tile, "lazy", False) for binary in binaries.values())
        out = run_forward(engine, binaries, q, k, v, scale, parts=parts, extras=extras)
        O, m, l = (engine.read(t) for t in (out.O, out.m, out.l))
        lines = [_line("O", widen(O, dtype), exact.O, plain.O, dtype=dtype), *_statistics(m, l, exact, plain, lazy)]
    else:
        saved = Forward(
            engine.tensor(round_to(exact.O, dtype)),
            engine.tensor(exact.m.astype(np.float32)),
            engine.tensor(exact.l.astype(np.float32)),
        )
        # delta = rowsum(dO o O) of the rounded O: what rounding moves it by, a gradient of lse moves it by.
        moved = (wide[3] * (exact.O - widen(round_to(exact.O, dtype), dtype))).sum(axis=-1)
        rounded = attention(*wide, scale=scale, causal=problem.causal, given=given, dlse=moved)
        gradients = run_backward(engine, binaries, q, k, v, saved, engine.tensor(x.dO), scale, extras=extras)
        made = {name: getattr(gradients, name) for name in ("dQ", "dK", "dV")}
        got = {name: widen(engine.read(x), dtype) for name, x in made.items() if x is not None}
        lines = [
            _line(name, values, *(getattr(result, name) for result in (exact, plain, rounded)), dtype=dtype)
            for name, values in got.items()
        ]
        lines += _shared_lines(engine, gradients, extras, exact, plain, rounded, dtype)
        lines = [
            replace(line, bound=line.bound + SUM_BOUND * _largest(exact.sizes[line.tensor]))
            if line.tensor in exact.sizes
            else line
            for line in lines
        ]
        if x.k_lens is not None and "dK" in got:
            lines.append(_beyond(got, x.k_lens))
    return Verdict(
        problem=problem, which=which, engine=engine.name, lines=tuple(lines), races=_races(engine),
        kernels=tuple(binary.spec.key for binary in binaries.values()),
    )  # fmt: skip


def _shared_lines(
    engine: Engine, gradients: Gradients, extras: Extras, exact: Result, plain: Result, rounded: Result, dtype: Dtype
) -> list[Line]:
    """Gradients of what all rows share: sinks, each row's part added up, and tables."""
    lines = []
    wanted = [result.dsinks for result in (exact, plain, rounded) if result.dsinks is not None]
    if gradients.dsinks is not None:
        got = engine.read(gradients.dsinks).sum(axis=(0, 2), dtype=np.float64)
        lines.append(_line("dsinks", got, *wanted, dtype=dtype))
    for name, want in exact.dtables.items():
        got = engine.read(extras.grads[name]).astype(np.float64)
        lines.append(_line(f"dtable_{name}", got, want, plain.dtables[name], rounded.dtables[name], dtype=dtype))
    return lines


def _beyond(got: Mapping[str, F64], k_lens: Ints) -> Line:
    """dK and dV of keys past the end of their sequence are 0, to the bit."""
    beyond = np.arange(got["dK"].shape[2]) >= k_lens[:, None]  # [B, Nk]
    worst = max(_largest(got[name].swapaxes(1, 2)[beyond]) for name in ("dK", "dV"))
    return Line("dK and dV beyond k_lens", worst, 0.0, 0.0)


def _line(name: str, got: F64, want: F64, *others: F64, dtype: Dtype) -> Line:
    """`others`: by plain attention, and of a gradient by float64 on the rounded forward."""
    error = max(_largest(other - want) for other in others)
    bound = FACTOR * error + FLOOR + EPSILON[dtype] * _largest(want)
    return Line(name, _largest(got - want), _largest(others[0] - want), bound)


def _statistics(
    m: NDArray[np.float32], l: NDArray[np.float32], exact: Result, plain: Result, lazy: bool
) -> tuple[Line, Line]:
    """m and l. A lazy kernel's m may lie 2^8 below the max; l is compared on the scale of the exact max."""
    blind = exact.l == 0
    size = 1 + _largest(np.where(blind, 0, exact.m))
    right_blind = np.isneginf(m[blind]).all() and (l[blind] == 0).all()
    with np.errstate(divide="ignore", invalid="ignore"):
        lse_error = np.where(blind, 0, m.astype(np.float64) + np.log(l.astype(np.float64)) - exact.lse)
        plain_lse = np.where(blind, 0, plain.lse - exact.lse)
        m_error = np.where(blind, 0, m - exact.m)
        plain_m = np.where(blind, 0, plain.m - exact.m)
    bound = STATISTICS_BOUND * size
    nan = 0.0 if right_blind else np.nan
    return (
        Line("m", _largest(m_error) + nan, _largest(plain_m), bound + (8 * math.log(2) if lazy else 0)),
        Line("l", _largest(lse_error) + nan, _largest(plain_lse), bound),
    )


def _largest(values: F64) -> float:
    return float(np.abs(values).max(initial=0.0))


def _races(engine: Engine) -> tuple[str, ...]:
    reports = getattr(engine, "reports", ())
    return tuple(f"{name}: {race}" for name, report in reports for race in report.races[:3])
