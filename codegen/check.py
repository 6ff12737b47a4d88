"""Check a pass against the float64 reference: Binaries in, a Verdict out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .compile import Binary
from .engines.engine import Engine
from .plain import plain_attention
from .reference import F64, Result, attention
from .run import Forward, run_backward, run_forward
from .spec.dtype import EPSILON, round_to, widen
from .spec.kernel import KernelName
from .spec.problem import Dtype, Pass, Problem

FACTOR = 2.0  # a kernel's error may be this many times that of plain attention in the same dtype
FLOOR = 1e-5  # plus this
STATISTICS_BOUND = 2e-6  # relative to 1 + |m|: fp32 scores, whatever the dtype of the inputs

Bits = NDArray[np.uint16]


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


@dataclass(frozen=True, slots=True)
class Inputs:
    """q, dO [B, Hq, Nq, d]; k, v [B, Hk, Nk, d]; as the bits of the dtype."""

    q: Bits
    k: Bits
    v: Bits
    dO: Bits


def make_inputs(problem: Problem, seed: int = 0) -> Inputs:
    """Normal numbers shifted by 1/2: with a mean of zero, sums cancel and a relative error means nothing."""
    random = np.random.default_rng(seed)
    queries = (problem.B, problem.Hq, problem.Nq, problem.d)
    keys = (problem.B, problem.kv_heads, problem.keys, problem.d)
    return Inputs(
        *(round_to(random.standard_normal(shape) + 0.5, problem.dtype) for shape in (queries, keys, keys, queries))
    )


def check(
    problem: Problem, which: Pass, binaries: Mapping[KernelName, Binary], engine: Engine, inputs: Inputs | None = None,
    *, parts: int = 1,
) -> Verdict:  # fmt: skip
    """Run `which` on `engine` and compare every output with float64 and with plain attention in the same dtype.

    A forward by parts cuts the keys into `parts`.

    The bound of O, dQ, dK and dV is twice the error of plain attention plus 1e-5 plus half a unit in the last place of
    the largest value: what rounding the right answer costs. The backward runs on the rounded forward of the reference.
    """
    x = inputs or make_inputs(problem)
    scale, dtype = problem.softmax_scale, problem.dtype
    exact = attention(*(widen(a, dtype) for a in (x.q, x.k, x.v, x.dO)), scale=scale, causal=problem.causal)
    plain = plain_attention(x.q, x.k, x.v, x.dO, dtype=dtype, scale=scale, causal=problem.causal)
    q, k, v = (engine.tensor(a) for a in (x.q, x.k, x.v))
    if which == "forward":
        lazy = any(getattr(binary.spec.tile, "lazy", False) for binary in binaries.values())
        out = run_forward(engine, binaries, q, k, v, scale, parts=parts)
        O, m, l = (engine.read(t) for t in (out.O, out.m, out.l))
        lines = [_line("O", widen(O, dtype), exact, plain, dtype), *_statistics(m, l, exact, plain, lazy)]
    else:
        saved = Forward(
            engine.tensor(round_to(exact.O, dtype)),
            engine.tensor(exact.m.astype(np.float32)),
            engine.tensor(exact.l.astype(np.float32)),
        )
        gradients = run_backward(engine, binaries, q, k, v, saved, engine.tensor(x.dO), scale)
        got = {name: widen(engine.read(getattr(gradients, name)), dtype) for name in ("dQ", "dK", "dV")}
        lines = [_line(name, values, exact, plain, dtype) for name, values in got.items()]
    return Verdict(
        problem=problem, which=which, engine=engine.name, lines=tuple(lines), races=_races(engine),
        kernels=tuple(binary.spec.key for binary in binaries.values()),
    )  # fmt: skip


def _line(name: str, got: F64, exact: Result, plain: Result, dtype: Dtype) -> Line:
    want = getattr(exact, name)
    of_plain = _largest(getattr(plain, name) - want)
    bound = FACTOR * of_plain + FLOOR + EPSILON[dtype] * _largest(want)
    return Line(name, _largest(got - want), of_plain, bound)


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
