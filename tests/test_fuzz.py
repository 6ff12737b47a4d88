"""Random checks: the same for the same number, every feature among them, and repeated by the line that they print."""

from __future__ import annotations

import shlex

import pytest
from flashsmith import fuzz
from flashsmith.cli import main
from flashsmith.forms import KERNELS_OF, timed_kernels
from flashsmith.render import Source, render
from flashsmith.spec.kernel import KernelSpec
from flashsmith.spec.limits import why_illegal

CASES = [fuzz.draw(seed) for seed in range(200)]


def test_a_number_draws_the_same_case_again() -> None:
    assert fuzz.draw(7) == CASES[7] and len({case.command for case in CASES}) == len(CASES)


def test_every_feature_is_drawn() -> None:
    words = {word.split()[0] for case in CASES for word in case.problem.features.words}
    assert {"left", "shifted", "top-left", "sinks", "dropout", "padded", "packed", "score_mod"} <= words
    assert {case.problem.dtype for case in CASES} == {"bf16", "fp16", "fp32"}
    assert {case.gpu.key for case in CASES} == set(fuzz.GPUS) and any(case.problem.dv for case in CASES)
    drawn = {case.kernel for case in CASES}
    every = {kernel for form in KERNELS_OF for kernel in timed_kernels(form)}
    assert drawn >= every - {"partial", "combine", "dkdv90_wide"}  # wide heads on one GPU of four are seldom


def test_tiles_are_legal() -> None:
    for case in CASES:
        assert why_illegal(KernelSpec.of(case.kernel, case.problem, case.tile, case.gpu.sm), case.gpu) is None


@pytest.mark.parametrize("seed", [3, 24, 31])
def test_a_case_is_repeated_by_its_line(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The command checks the same kernels on the same inputs: the same errors, to the digit."""
    case = CASES[seed]
    verdict = fuzz.run(case)
    assert verdict.ok, verdict.reason
    assert main([*shlex.split(case.command)[1:], "--json"]) == 0
    said = capsys.readouterr().out
    for line in verdict.lines:
        assert f'"tensor": "{line.tensor}"' in said
        assert f'"error": {line.error}' in said
    for key in verdict.kernels:
        assert key in said


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward with dropout, whose random numbers are drawn with a round too few."""
    case = next(case for case in CASES if case.problem.dropout and case.which == "forward" and case.problem.keys > 60)
    assert not fuzz.run(case).reason
    monkeypatch.setattr(fuzz, "render", lambda spec: Source(spec, render(spec).text.replace("round < 7", "round < 6")))
    assert "O is off" in fuzz.run(case).reason
