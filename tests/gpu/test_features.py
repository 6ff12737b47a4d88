"""Kernels with features on a real device, beside float64: what the emulator says of them is true there too."""

from __future__ import annotations

from dataclasses import replace

import pytest
from flashsmith.check import check
from flashsmith.compile import compile_source
from flashsmith.engines.cuda import cuda_engine
from flashsmith.inputs import make_inputs
from flashsmith.load import load_pass
from flashsmith.render import render
from flashsmith.spec.gpu import present_gpu
from flashsmith.spec.problem import Pass, Problem

from ..features import FEATURES

pytestmark = pytest.mark.gpu

BASE = Problem(dtype="fp16", d=64, B=3, Hq=4, Hk=2, Nq=200, Nk=333)


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature: str, deterministic: bool, which: Pass) -> None:
    problem = replace(BASE, **FEATURES[feature])
    if deterministic and problem.score_mod and problem.score_mod.grads:
        pytest.skip("gradients of tables are added up by atomics")
    loaded = load_pass(problem, which, present_gpu(), deterministic=deterministic)
    binaries = {name: compile_source(render(kernel.spec)) for name, kernel in loaded.items()}
    verdict = check(problem, which, binaries, cuda_engine(poison=True), make_inputs(problem, 1))
    assert verdict.ok, verdict.reason
