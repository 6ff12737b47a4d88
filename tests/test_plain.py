"""Plain attention in PyTorch: in float32 it is the float64 reference but for rounding, with every feature."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from flashsmith.inputs import given_of, make_inputs
from flashsmith.plain import plain_attention
from flashsmith.reference import Result, attention
from flashsmith.spec.dtype import widen
from flashsmith.spec.problem import Dtype, Problem

from .features import FEATURES

BASE = Problem(dtype="fp32", d=16, B=3, Hq=4, Hk=2, Nq=21, Nk=30)


def both(problem: Problem) -> tuple[Result, Result]:
    """Of plain attention and of the reference."""
    x = make_inputs(problem)
    given, scale, causal = given_of(problem, x), problem.softmax_scale, problem.causal
    wide = [widen(bits, problem.dtype) for bits in (x.q, x.k, x.v, x.dO)]
    got = plain_attention(x.q, x.k, x.v, x.dO, dtype=problem.dtype, scale=scale, causal=causal, given=given)
    return got, attention(*wide, scale=scale, causal=causal, given=given)


def outputs(result: Result) -> dict[str, np.ndarray]:
    named = {name: getattr(result, name) for name in ("O", "m", "l", "dQ", "dK", "dV", "dsinks")}
    return {**{name: x for name, x in named.items() if x is not None}, **result.dtables}


@pytest.mark.parametrize("feature", FEATURES)
def test_float32_is_float64_but_for_rounding(feature: str) -> None:
    got, want = map(outputs, both(replace(BASE, **FEATURES[feature])))
    assert got.keys() == want.keys()
    for name, values in want.items():
        np.testing.assert_allclose(got[name], values, rtol=1e-4, atol=1e-4 * np.abs(values[np.isfinite(values)]).max(),
                                   err_msg=name)  # fmt: skip
        assert np.abs(values[np.isfinite(values)]).max() > 1e-3, name


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_16_bits_round_the_matrices(dtype: Dtype) -> None:
    """A few units in the last place of 8 or 11 bits: not fewer, or it would be no yardstick."""
    for feature in ("plain", "everything"):
        got, want = both(replace(BASE, dtype=dtype, **FEATURES[feature]))
        error = np.abs(got.O - want.O).max() / np.abs(want.O).max()
        assert {"bf16": 1e-3, "fp16": 1e-4}[dtype] < error < {"bf16": 3e-2, "fp16": 4e-3}[dtype], feature
