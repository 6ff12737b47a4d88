"""The search on recorded spaces: near the optimum soon, and sooner than tiles in any order."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from recorded_space import recorded_names
from search_replay import BUDGETS, Recorded, replay, table

SEEDS = 3


@pytest.mark.parametrize("name", recorded_names())
def test_near_the_optimum_within_forty_trials(name: str) -> None:
    """98% of it within 40, 99% within 80, never behind random order."""
    reached = dict(zip(BUDGETS, map(median, zip(*replay(name, "ours", SEEDS), strict=True)), strict=True))
    assert reached[40] >= 0.98 and reached[80] >= 0.99
    by_chance = map(median, zip(*replay(name, "random", 10 * SEEDS), strict=True))
    assert all(ours >= other for ours, other in zip(reached.values(), by_chance, strict=True))


def test_a_table_holds_every_legal_tile_of_its_time() -> None:
    """Hundreds of tiles, a time or a failure each, and worth searching: half of them are far from the best."""
    for name in recorded_names():
        space = Recorded(name)
        times = sorted(seconds for seconds in space.seconds.values() if seconds is not None)
        assert len(space.seconds) > 20 and len(times) > 0.9 * len(space.seconds)
        assert times[0] == space.best < 0.99 * times[len(times) // 2]


def test_the_document_shows_what_a_replay_prints() -> None:
    """The rows of one space, in full; TPE's are left to the command, which takes minutes."""
    document = (Path(__file__).parents[1] / "docs" / "search.md").read_text()
    name = "dq_h100-sxm_d256"
    head, rule, *rows = table([(name, search, replay(name, search, 30)) for search in ("random", "ours")])
    assert all(line in document.splitlines() for line in (head, rule, *rows))
    assert all(f"| {recorded} |" in document for recorded in recorded_names())
