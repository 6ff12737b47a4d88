"""What a study's trials say of each tile: who holds it, what became of it, what is to be done."""

from __future__ import annotations

from typing import Any

from flashsmith.objective import Candidate
from flashsmith.propose import Known
from flashsmith.study.book import Book, Entry

from tests.study.crew import SPACE, predicted

A, B, C, D = SPACE[:4]


def book(*entries: Any, limit: int = 3) -> Book:
    """A book of (tile, fate) in the order of the trials, whose numbers count from 0."""
    made = []
    for trial, (tile, fate) in enumerate(entries):
        candidate = Candidate(tile, predicted(1.0 + trial)) if fate == "done" else None
        made.append(Entry(trial, tile, fate, limit, candidate, "Lost: its worker died." if fate == "lost" else ""))
    return Book(made)


def test_the_first_trial_of_a_tile_holds_it() -> None:
    """Two workers wrote the same tile: the later one must yield. So must one beyond the tiles that are asked for."""
    read = book((A, "running"), (A, "running"), (B, "running"))
    assert read.holds(A, 0, 3) and not read.holds(A, 1, 3) and read.holds(B, 2, 3)
    assert not read.holds(B, 2, 1) and not read.holds(C, 0, 3)
    assert len(read) == 2 and A in read and C not in read


def test_a_finished_tile_is_held_by_nobody() -> None:
    read = book((A, "done"), (A, "running"))
    assert not read.holds(A, 1, 3)
    assert [c.time.seconds for c in read.candidates if c.time] == [1.0]


def test_a_lost_tile_is_tried_once_more_and_then_has_failed() -> None:
    once = book((A, "done"), (B, "lost"), (C, "running"))
    assert once.abandoned(3) == B and once.running == [B, C] and len(once.candidates) == 1
    again = book((A, "done"), (B, "lost"), (C, "running"), (B, "running"))
    assert again.abandoned(3) is None and again.holds(B, 3, 3)
    twice = book((A, "done"), (B, "lost"), (C, "running"), (B, "lost"))
    assert twice.abandoned(3) is None
    assert twice.candidates[1] == Candidate(B, None, "Lost: its worker died.")
    assert twice.known == [Known(A, 1.0), Known(B, None)]


def test_a_tile_that_was_given_back_is_tried_again_however_often() -> None:
    read = book(*[(A, "stopped")] * 5)
    assert read.abandoned(3) == A and not read.candidates


def test_tiles_stand_in_the_order_of_their_first_trials() -> None:
    """So that a retried tile does not change the history that a proposal is made from."""
    read = book((A, "lost"), (B, "done"), (C, "done"), (A, "done"))
    assert [c.tile for c in read.candidates] == [A, B, C]


def test_a_search_is_settled_when_nobody_is_needed() -> None:
    assert book((A, "done"), (B, "done"), (C, "done")).settled(3)
    assert not book((A, "done"), (B, "running")).settled(3)
    assert not book((A, "done"), (B, "lost")).settled(3)
    assert book((A, "done"), (B, "lost"), (B, "lost")).settled(3)


def test_a_trial_too_many_is_waited_for_but_not_one_of_a_longer_search() -> None:
    """Its worker has not yet seen that it came too late; another worker was asked for more tiles."""
    done = [(A, "done"), (B, "done"), (C, "done")]
    assert not book(*done, (D, "running"), limit=3).settled(3)
    assert book(*done, (D, "running"), limit=4).settled(3)
    assert book(*done, (D, "lost"), limit=3).abandoned(3) is None
    assert book(*done, (D, "lost"), limit=4).abandoned(4) == D
