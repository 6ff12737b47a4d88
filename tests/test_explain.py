"""Why a kernel serves: its rivals, each once, and which of their times are known how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flashsmith import explain as module
from flashsmith.explain import Explanation, explain
from flashsmith.predict import NOISE, Prediction
from flashsmith.sass import SassError
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.problem import Problem
from flashsmith.spec.record import write_record
from flashsmith.spec.search import Search, TimedTile
from flashsmith.spec.tile import ForwardTile, Tile

from tests.records import record_of

A100 = find_gpu("a100")
PROBLEM = Problem(dtype="bf16", d=64, B=2, Nq=1024)
DEFAULT = default_tile("forward", PROBLEM, A100)
WINNER, SECOND = ForwardTile(Br=64, Bc=32, warps=4), ForwardTile(Br=64, Bc=64, warps=4)


def search(default: Tile = DEFAULT, second: Tile = SECOND) -> Search:
    return Search(
        seed=1, failed=2, pruned=0, default=TimedTile(tile=default, time_ms=3.0),
        runner_up=TimedTile(tile=second, time_ms=2.0), curve=((1, 3.0), (5, 1.0)),
    )  # fmt: skip


@pytest.fixture
def predicts(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[Tile, float]], None]:
    """A model that has an answer ready for some tiles, in seconds, and takes 1 s for any other."""

    def to(seconds: dict[Tile, float]) -> None:
        def predict(tile: Any, problem: Any, gpu: Any, parts: int) -> Prediction:
            return Prediction(
                kernel="forward", gpu="a100", seconds=seconds.get(tile, 1.0), tflops=1.0, spread=0.0, blocks_per_sm=1,
                pipes={}, bound_by="nothing", spills_in_loop=0,
            )  # fmt: skip

        monkeypatch.setattr(module, "compile_source", lambda source: source.spec.tile)
        monkeypatch.setattr(module, "predict", predict)

    to({})
    return to


def of_forward(folder: Path, problem: Problem = PROBLEM, gpu: str = "a100") -> Explanation:
    return explain(problem, "forward", find_gpu(gpu), folder)


def test_the_winner_stands_beside_its_rivals(tmp_path: Path, predicts: object) -> None:
    write_record(tmp_path, record_of("forward", 1.0, "measured", tile=WINNER, search=search()))
    found = of_forward(tmp_path)
    assert [(c.roles, c.tile, c.recorded_ms) for c in found.contenders] == [
        (("served",), WINNER, 1.0), (("runner-up",), SECOND, 2.0), (("default",), DEFAULT, 3.0),
    ]  # fmt: skip
    assert found.search == search() and found.form.form == "whole"
    assert found.looked[0].record == found.record and found.looked[0].rung == "record"


def test_a_tile_with_two_roles_stands_there_once(tmp_path: Path, predicts: object) -> None:
    write_record(tmp_path, record_of("forward", 1.0, tile=WINNER, search=search(second=DEFAULT)))
    assert [c.roles for c in of_forward(tmp_path).contenders] == [("served",), ("runner-up", "default")]
    write_record(tmp_path, record_of("forward", 1.0, tile=DEFAULT, search=search()))
    assert [c.roles for c in of_forward(tmp_path).contenders] == [("served", "default"), ("runner-up",)]


def test_without_a_record_nothing_is_made_up(tmp_path: Path, predicts: object) -> None:
    found = of_forward(tmp_path)
    (only,) = found.contenders
    assert only.roles == ("served", "default") and only.recorded_ms is None and only.prediction
    assert found.record is None and found.search is None and found.against_served() == {}


def test_a_record_that_kept_no_search(tmp_path: Path, predicts: object) -> None:
    write_record(tmp_path, record_of("forward", 1.0, tile=WINNER))
    found = of_forward(tmp_path)
    assert [(c.roles, c.recorded_ms) for c in found.contenders] == [(("served",), 1.0), (("default",), None)]


def test_the_time_of_another_default_is_not_that_of_todays(tmp_path: Path, predicts: object) -> None:
    write_record(tmp_path, record_of("forward", 1.0, tile=WINNER, search=search(default=replace(DEFAULT, warps=8))))
    assert [(c.roles, c.recorded_ms) for c in of_forward(tmp_path).contenders][2] == (("default",), None)


def test_what_the_model_cannot_tell_apart_is_equal(
    tmp_path: Path, predicts: Callable[[dict[Tile, float]], None]
) -> None:
    write_record(tmp_path, record_of("forward", 1.0, tile=WINNER, search=search()))
    predicts({WINNER: 1.0, SECOND: 1 + 0.99 * NOISE, DEFAULT: 1.5})
    assert of_forward(tmp_path).against_served() == {"runner-up": 0.0, "default": 0.5}
    predicts({WINNER: 1.0, SECOND: 1 - 0.99 * NOISE, DEFAULT: 0.75})
    assert of_forward(tmp_path).against_served() == {"runner-up": 0.0, "default": -0.25}


def test_a_rival_without_a_prediction_says_why(
    tmp_path: Path, predicts: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tile that is not legal, one whose code the model does not know."""
    illegal = ForwardTile(Br=256, Bc=256, warps=4)
    write_record(tmp_path, record_of("forward", 1.0, tile=WINNER, search=search(second=illegal)))

    def refuse(tile: Tile, problem: Problem, gpu: object, parts: int) -> Prediction:
        raise SassError("FROB is unknown")

    monkeypatch.setattr(module, "predict", refuse)
    found = of_forward(tmp_path)
    assert "256" in found.contenders[1].failure and found.contenders[2].failure == "SassError: FROB is unknown"
    assert found.against_served() == {} and all(c.prediction is None for c in found.contenders)


def test_convert_borrows_its_tile_and_no_time(tmp_path: Path, predicts: object) -> None:
    """The record that gives it its tile speaks of fused."""
    write_record(tmp_path, record_of("fused", 1.0, search=None))
    found = explain(PROBLEM, "convert", A100, tmp_path)
    (only,) = found.contenders
    assert found.loaded.rung == "record" and found.record is None and only.recorded_ms is None
    assert found.form.form == "fused"


def test_of_what_is_not_tuned_no_file_is_named(tmp_path: Path, predicts: object) -> None:
    assert explain(PROBLEM, "delta", A100, tmp_path).looked == ()
