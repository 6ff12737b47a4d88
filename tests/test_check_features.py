"""A check finds a fault in any feature: the reference stands in for kernels, told something else than was asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flashsmith import check as checking
from flashsmith.check import Verdict, check
from flashsmith.given import Given
from flashsmith.inputs import given_of, make_inputs
from flashsmith.reference import Result, attention
from flashsmith.run import Extras, Forward, Gradients
from flashsmith.spec.dtype import round_to, widen
from flashsmith.spec.features import ScoreMod
from flashsmith.spec.problem import Pass, Problem

from .features import FEATURES

Change = Callable[[Given], Given]
BASE = Problem(dtype="bf16", d=16, B=3, Hq=4, Hk=2, Nq=21, Nk=30)


class Arrays:
    """An engine whose tensors are NumPy arrays; it launches nothing."""

    name = "arrays"

    def tensor(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.zeros(shape, dtype)

    def read(self, tensor: np.ndarray) -> np.ndarray:
        return tensor


def checked(
    problem: Problem, which: Pass, monkeypatch: pytest.MonkeyPatch, change: Change = lambda given: given,
    spoil: Callable[[dict[str, np.ndarray]], None] = lambda outputs: None,
) -> Verdict:  # fmt: skip
    """The verdict on kernels that compute what `change` makes of the features, then `spoil` their outputs."""
    x = make_inputs(problem)

    def result() -> Result:
        wide = (widen(bits, problem.dtype) for bits in (x.q, x.k, x.v, x.dO))
        given = change(given_of(problem, x))
        return attention(*wide, scale=problem.softmax_scale, causal=problem.causal, given=given)

    def forward(*_: Any, **__: Any) -> Forward:
        got = result()
        return Forward(round_to(got.O, problem.dtype), got.m.astype(np.float32), got.l.astype(np.float32))  # type: ignore[arg-type]

    def backward(*_: Any, extras: Extras, **__: Any) -> Gradients:
        got = result()
        outputs = {name: round_to(getattr(got, name), problem.dtype) for name in ("dQ", "dK", "dV")}
        if got.dsinks is not None:
            of_rows = np.broadcast_to(got.dsinks[:, None], got.m.shape)  # each row adds as much
            outputs["dsinks"] = (of_rows / (got.m.size / len(got.dsinks))).astype(np.float32)
        for name, gradient in got.dtables.items():
            extras.grads[name][...] = gradient  # type: ignore[index]
        spoil({**outputs, **extras.grads})  # type: ignore[dict-item]
        return Gradients(**outputs)  # type: ignore[arg-type]

    monkeypatch.setattr(checking, "run_forward", forward)
    monkeypatch.setattr(checking, "run_backward", backward)
    return check(problem, which, {}, Arrays(), x)  # type: ignore[arg-type]


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("feature", FEATURES)
def test_right_results_pass(feature: str, which: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = checked(replace(BASE, **FEATURES[feature]), which, monkeypatch)
    assert verdict.ok, verdict.reason


def later(cu: np.ndarray | None) -> np.ndarray:
    """One row goes from the last sequence to the one before."""
    assert cu is not None
    return cu + np.array([0] * (len(cu) - 2) + [1, 0])


FAULTS: dict[str, tuple[str, Change]] = {
    "a key too many": ("window", lambda x: replace(x, window=(10, 4))),
    "the other anchor": ("top-left", lambda x: replace(x, top_left=False)),
    "a key past the sequence": ("padded", lambda x: replace(x, k_lens=x.k_lens + (x.k_lens < 30))),
    "a row of another sequence": ("packed", lambda x: replace(x, cu_q=later(x.cu_q))),
    "another head's sink": ("sinks", lambda x: replace(x, sinks=x.sinks[::-1])),
    "another seed": ("dropout", lambda x: replace(x, rng=(x.rng[0] + 1, x.rng[1]))),
    "another offset": ("dropout", lambda x: replace(x, rng=(x.rng[0], x.rng[1] + 1))),
    "a weight too many": ("dropout", lambda x: replace(x, keep_below=x.keep_below + 655)),
    "another head's slope": ("alibi", lambda x: replace(x, tables={"slope": x.tables["slope"][::-1]})),
    "a bias from right to left": ("bias", lambda x: replace(x, tables={"bias": x.tables["bias"][..., ::-1]})),
    "another formula": ("softcap", lambda x: replace(x, score_mod=ScoreMod(text="1.9 * tanh(score / 1.9)"))),
}  # fmt: skip


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_results_do_not(fault: str, which: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    feature, change = FAULTS[fault]
    assert not checked(replace(BASE, **FEATURES[feature]), which, monkeypatch, change).ok


def times(tensor: str, factor: float) -> Callable[[dict[str, np.ndarray]], None]:
    def spoil(outputs: dict[str, np.ndarray]) -> None:
        outputs[tensor] *= factor

    return spoil


def past_the_end(outputs: dict[str, np.ndarray]) -> None:
    outputs["dV"][0, 0, -1, 0] = 1  # the smallest number there is


@pytest.mark.parametrize(
    ("feature", "spoil", "tensor"),
    [
        ("sinks", times("dsinks", 1.05), "dsinks"),
        ("alibi", times("slope", 1.05), "dtable_slope"),
        ("bias", times("bias", 1.05), "dtable_bias"),
        ("padded", past_the_end, "dK and dV beyond k_lens"),
    ],
)
def test_each_gradient_has_its_line(
    feature: str, spoil: Callable[[dict[str, np.ndarray]], None], tensor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong by a twentieth, or not 0 where it is to be."""
    verdict = checked(replace(BASE, **FEATURES[feature]), "backward", monkeypatch, spoil=spoil)
    assert [line.tensor for line in verdict.lines if not line.ok] == [tensor], verdict.reason
