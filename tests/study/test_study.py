"""A study by itself: what it keeps, whom it gives a tile, how it goes on after a death."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flashsmith import propose
from flashsmith.choose import Winner, choose
from flashsmith.measure import Timing
from flashsmith.objective import Candidate
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.tile import Tile, tile_key
from flashsmith.study import Study
from flashsmith.study import name as naming
from flashsmith.study.name import study_name
from flashsmith.study.owner import this_process
from flashsmith.study.storage import open_storage
from optuna.trial import TrialState

from tests.study import crew
from tests.study.crew import GPU, PROBLEM, SPACE

TIMING = Timing(kernel="forward", gpu="a100", seconds=1e-3, low=0.9e-3, high=1.2e-3, samples=50, tflops=99.5, by="me")


def next_of(study: Study) -> Callable[..., Tile | None]:
    return lambda known, running: next((tile for tile in SPACE if tile not in study.book), None)


def run(
    url: str, notes: Path, trials: int, *, ahead: int = 4, space: Sequence[Tile] = SPACE, name: str = "crew"
) -> Winner:  # fmt: skip
    """One worker, in this process."""
    with pytest.MonkeyPatch.context() as patch, crew.open_at(url, name, space) as study:
        patch.setattr(propose, "legal_tiles", lambda *args, **how: space)
        return choose("forward", PROBLEM, GPU, trials=trials, study=study, ahead=ahead,
                      objective=lambda: crew.Cheap(notes))  # fmt: skip


def states(url: str, name: str = "crew") -> Counter[TrialState]:
    with crew.open_at(url, name) as study:
        return Counter(trial.state for trial in study.storage.get_all_trials(study._study))


def test_a_killed_search_goes_on_as_if_nothing_had_been(storage: Callable[[int], str], tmp_path: Path) -> None:
    """20 trials, killed during the seventh: the same command makes them 20, tries the interrupted ones again and no
    other, and finds what an uninterrupted search finds, in the same order; a third run tries nothing; one of 24 trials
    tries 4 (BUG-35)."""
    expected = run(str(tmp_path / "straight.journal"), tmp_path / "straight", 20)
    url, notes = storage(0), tmp_path / "notes"
    (worker,) = crew.start(1, url, "crew", notes, trials=20, takes_s=0.0, ahead=4, dies_at=7)
    worker.join(60)
    assert worker.exitcode == -9 and len(crew.tries(notes)) == 7
    assert states(url)[TrialState.COMPLETE] == 6
    resumed = run(url, notes, 20)
    assert resumed.candidates == expected.candidates and resumed.spec == expected.spec and resumed.reused == 6
    assert states(url) == {TrialState.COMPLETE: 20, TrialState.FAIL: 4}  # the four that it held
    tried = Counter(key for _, key in crew.tries(notes))
    assert sorted(tried.values()) == [1] * 19 + [2]
    third = run(url, notes, 20)
    assert third.candidates == expected.candidates and third.reused == 20 and sum(tried.values()) == 21
    assert len(crew.tries(notes)) == 21
    further = run(url, notes, 24)
    assert further.reused == 20 and further.candidates[:20] == expected.candidates and len(further.candidates) == 24
    assert len(crew.tries(notes)) == 25
    assert run(url, notes, 5).candidates == further.candidates  # fewer than it holds


def test_a_tile_that_kills_its_worker_twice_has_failed(storage: Callable[[int], str], tmp_path: Path) -> None:
    """With a reason; the search goes on without it."""
    url, notes = storage(0), tmp_path / "notes"
    for _ in range(2):
        (worker,) = crew.start(1, url, "crew", notes, space=SPACE[:6], takes_s=0.0, ahead=1, dies_at=1)
        worker.join(60)
        assert worker.exitcode == -9
    winner = run(url, notes, 100, ahead=1, space=SPACE[:6])
    failed = [c for c in winner.candidates if c.time is None]
    assert len(winner.candidates) == 6 and [c.failure for c in failed] == [failed[0].failure]
    assert failed[0].failure.startswith("Lost: its worker died (process ") and str(worker.pid) in failed[0].failure
    assert Counter(key for _, key in crew.tries(notes))[tile_key(failed[0].tile)] == 2
    assert TrialState.RUNNING not in states(url)


def test_a_search_that_was_stopped_gives_its_tiles_back(tmp_path: Path) -> None:
    """However often, and it costs them nothing: that was no fault of theirs."""
    url = str(tmp_path / "journal")
    for _ in range(4):
        with crew.open_at(url) as study:
            claims = [study.ask(20, next_of(study)) for _ in range(3)]
            assert [claim.tile for claim in claims if claim] == list(SPACE[:3])
        assert TrialState.RUNNING not in states(url)
    assert run(url, tmp_path / "notes", 20).candidates[0].tile == SPACE[0]


def test_two_workers_that_want_the_same_tile(storage: Callable[[int], str]) -> None:
    """The first to write it has it; the other gets the next."""
    with crew.open_at(storage(0)) as one, crew.open_at(storage(0)) as other:
        first = one.ask(20, lambda known, running: SPACE[0])
        second = other.ask(20, next_of(other))  # it has not looked since, and wants the same
        assert first and second and (first.tile, second.tile) == (SPACE[0], SPACE[1])
        one.tell(first, Candidate(first.tile, crew.predicted(2.0)))
        other.look()
        assert other.book.candidates == one.book.candidates and len(one.book) == 2


def test_no_tile_more_than_asked_for(storage: Callable[[int], str]) -> None:
    with crew.open_at(storage(0)) as one, crew.open_at(storage(0)) as other:
        assert one.ask(2, lambda known, running: SPACE[0])
        assert one.ask(2, lambda known, running: SPACE[1])
        assert other.ask(2, lambda known, running: SPACE[2]) is None  # it knew of none
        one.look()
        assert len(one.book) == 2 and not one.done(2)


def test_a_silent_worker_is_given_up_and_its_late_answer_refused(storage: Callable[[int], str]) -> None:
    """On another machine, so that only its beats can tell. One that beats is left in peace, however slow (BUG-35)."""
    elsewhere = {**this_process(), "kernel": "another machine"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flashsmith.study.study.this_process", lambda: elsewhere)
        slow = Study(open_storage(storage(0)), "crew", "forward", SPACE, where="a test", beat_s=0.05, grace_s=60)
        claim = slow.ask(1, next_of(slow))
        assert claim
    with Study(open_storage(storage(0)), "crew", "forward", SPACE, where="a test", beat_s=60, grace_s=0.8) as quick:
        for _ in range(6):  # 1.2 s
            quick.wait()
        assert quick.book.running == [SPACE[0]] and quick.book.abandoned(1) is None
        assert slow._heart is not None
        slow._heart.stop()  # stopped by SIGSTOP, say
        while quick.book.abandoned(1) is None:
            quick.wait()
        again = quick.ask(1, next_of(quick))
        assert again and again.tile == claim.tile
        assert quick.tell(again, Candidate(again.tile, crew.predicted(2.0)))
        assert not slow.tell(claim, Candidate(claim.tile, crew.predicted(1.0)))
        assert slow.book.candidates == quick.book.candidates == [Candidate(SPACE[0], crew.predicted(2.0))]
    slow._heart = None
    slow.close()


def test_a_candidate_comes_back_as_it_went(storage: Callable[[int], str]) -> None:
    """Times of both kinds to the last bit, failures and refusals; and the final order with times of its own."""
    told = [
        Candidate(SPACE[0], crew.predicted(1 / 3)),
        Candidate(SPACE[1], TIMING),
        Candidate(SPACE[2], None, "CompileError: NVRTC refused\n  it: é"),
        Candidate(SPACE[3], None, "Pruned: predicted 20% behind"),
    ]
    with crew.open_at(storage(0)) as study:
        for candidate in told:
            claim = study.ask(4, next_of(study))
            assert claim and study.tell(claim, candidate)
        assert study.ranking() is None
        study.keep_ranking([told[1], Candidate(SPACE[0], replace(TIMING, seconds=2e-3))])
    with crew.open_at(storage(0)) as study:
        assert study.book.candidates == told and study.book.candidates[3].pruned
        assert study.ranking() == [told[1], Candidate(SPACE[0], replace(TIMING, seconds=2e-3))]
        trials = study.storage.get_all_trials(study._study)
        assert [trial.state.name for trial in trials] == ["COMPLETE", "COMPLETE", "FAIL", "PRUNED"]
        assert trials[1].value == 1e-3 and trials[1].params["Br"] == SPACE[1].Br  # type: ignore[union-attr]
        shown = trials[1].user_attrs["time"]
        assert shown["kind"] == "measured" and shown["spread"] == TIMING.spread and shown["samples"] == 50
        study.ask(5, next_of(study))
        study.close()
        assert study.ranking() is not None
    with crew.open_at(storage(0)) as study:
        claim = study.ask(5, next_of(study))
        assert claim
        study.tell(claim, Candidate(claim.tile, TIMING))
        assert study.ranking() is None  # of fewer tiles


def test_what_was_found_elsewhere_is_added_once() -> None:
    with Study(open_storage(None), "a", "forward", SPACE) as study:
        for _ in range(2):
            study.add(Candidate(SPACE[0], crew.predicted(1.5)))
        study.add(Candidate(SPACE[1], None, "CompileError: no"))
        study.add(Candidate(replace(SPACE[1], Bc=17), crew.predicted(1.0)))  # no tile of this space
        assert study.book.candidates == [Candidate(SPACE[0], crew.predicted(1.5))]


def test_trials_that_others_put_into_a_study_are_passed_over(tmp_path: Path) -> None:
    """By hand in a dashboard, say: they are no tiles."""
    import optuna

    url = str(tmp_path / "journal")
    with crew.open_at(url) as study:
        optuna.load_study(study_name="crew", storage=study.storage).enqueue_trial({"Br": 64})
        study.look()
        assert len(study.book) == 0
    assert len(run(url, tmp_path / "notes", 3).candidates) == 3


def test_a_space_that_is_used_up_ends_the_search(tmp_path: Path) -> None:
    """12 tiles, 50 trials: each is tried once, the search ends by itself, and the next finds nothing to do (BUG-36)."""
    url, notes = str(tmp_path / "journal"), tmp_path / "notes"
    assert len(run(url, notes, 50, space=SPACE[:12]).candidates) == 12
    assert run(url, notes, 50, space=SPACE[:12]).reused == 12 and len(crew.tries(notes)) == 12
    with crew.open_at(url, space=SPACE[:12]) as study:
        assert study.done(50)


def test_another_space_is_another_study(tmp_path: Path) -> None:
    """The old one is kept, and goes on when its space comes back (BUG-36)."""
    url, notes = str(tmp_path / "journal"), tmp_path / "notes"
    small, large = ([t for t in SPACE if t.Br <= limit] for limit in (128, 256))  # type: ignore[union-attr]
    names = [study_name("forward", PROBLEM, GPU, "predicted", space) for space in (small, large)]
    assert len(set(names)) == 2 and 5 < len(small) < len(large)
    run(url, notes, 5, space=small, name=names[0])
    assert run(url, notes, 8, space=large, name=names[1]).reused == 0
    assert run(url, notes, 6, space=small, name=names[0]).reused == 5


NAME = """
from tests.study.crew import GPU, PROBLEM, SPACE
from flashsmith.study.name import study_name
print(study_name("forward", PROBLEM, GPU, "predicted", SPACE[:3]))
"""


def test_the_name_changes_with_all_that_times_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with nothing else: another process finds the study."""

    def name(**changes: Any) -> str:
        asked = {"kernel": "forward", "problem": PROBLEM, "gpu": GPU, "kind": "predicted", "space": SPACE[:3]}
        return study_name(**{**asked, **changes})

    first = name()
    assert first.startswith("forward-a100-bf16-d64-B1-H16x16-N2048x2048-predicted-")
    assert subprocess.run([sys.executable, "-c", NAME], capture_output=True, text=True).stdout.strip() == first
    changed = [
        name(kind="measured"), name(space=SPACE[:4]), name(problem=replace(PROBLEM, Nq=4096)),
        name(problem=replace(PROBLEM, B=2)), name(problem=replace(PROBLEM, scale=0.3)),
        name(gpu=replace(GPU, clock_ghz=1.2)), name(gpu=find_gpu("a100-40gb")),
    ]  # fmt: skip
    measured = name(kind="measured")
    with monkeypatch.context() as patch:
        patch.setattr(naming, "MODEL", "issue-model 99")
        changed.append(name())
        assert name(kind="measured") == measured  # which it does not depend on
    with monkeypatch.context() as patch:
        patch.setattr(naming, "version_text", lambda: "99.9")
        changed.append(name())
    with monkeypatch.context() as patch:
        render = naming.render
        patch.setattr(naming, "render", lambda spec: replace(render(spec), text=render(spec).text + "// changed"))
        changed.append(name())
    assert len({first, *changed}) == 1 + len(changed)
    assert name() == first
