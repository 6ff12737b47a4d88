"""Where times come from, when the processes that help with them die or the model does not know a tile."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
from flashsmith.errors import Rejected
from flashsmith.objective import Candidate, Measured, Predicted, prepare
from flashsmith.sass import SassError
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import KernelSpec
from flashsmith.spec.problem import Problem

GPU = find_gpu("a100")
PROBLEM = Problem(dtype="bf16", d=64, Nq=1024)
DEFAULT = default_tile("forward", PROBLEM, GPU)
SPEC = KernelSpec.of("forward", PROBLEM, DEFAULT, GPU.sm)


def test_a_killed_process_does_not_cost_the_tile() -> None:
    """It is compiled and predicted by another one, to the same time (BUG-32)."""
    objective = Predicted("forward", PROBLEM, GPU, processes=1)
    try:
        expected = objective.submit(DEFAULT).result()
        later: Any = objective.submit(DEFAULT)
        (pid,) = objective._pool._executor._processes
        os.kill(pid, signal.SIGKILL)
        assert later.result() == expected and expected.time is not None
    finally:
        objective.close()


class Deadly:
    """A pool whose processes die of everything."""

    def submit(self, *task: Any) -> Any:
        def result() -> Any:
            raise Rejected("Crash: the process that compiled it died, and so did another one.")

        return SimpleNamespace(result=result)

    def close(self) -> None:
        return None


def test_a_tile_that_kills_again_has_failed() -> None:
    expected = Candidate(DEFAULT, None, "Crash: the process that compiled it died, and so did another one.")
    nobody = SimpleNamespace(close=lambda: None)
    assert Measured("forward", PROBLEM, GPU, nobody, pool=Deadly()).submit(DEFAULT).result() == expected  # type: ignore[arg-type]
    predicted = Predicted("forward", PROBLEM, GPU)
    predicted._pool = Deadly()  # type: ignore[assignment]
    assert predicted.submit(DEFAULT).result() == expected


def test_code_that_the_model_does_not_know_is_left_to_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def predict(*asked: Any) -> Any:
        raise SassError("no such opcode")

    monkeypatch.setattr("flashsmith.objective.predict", predict)
    built = SimpleNamespace()
    assert prepare(lambda spec: built, SPEC, PROBLEM, GPU, True) == (built, None)  # type: ignore[arg-type,return-value]
    assert prepare(lambda spec: "CompileError: no", SPEC, PROBLEM, GPU, True) == ("CompileError: no", None)
