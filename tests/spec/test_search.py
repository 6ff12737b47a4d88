"""What is kept of a search: the best other tile, the default, each improvement, the failures."""

from __future__ import annotations

from flashsmith.spec.search import Search, TimedTile
from flashsmith.spec.tile import RowTile

TILES = [RowTile(warps=n) for n in range(6)]
DEFAULT = TimedTile(tile=TILES[0], time_ms=4.0)


def test_of_trials_in_their_order() -> None:
    """Trial 3 is no improvement, trial 2 has no time, trial 6 equals the best: the curve has three points."""
    times = [4.0, None, 5.0, 3.0, 2.0, 2.0]
    search = Search.of(list(zip(TILES, times, strict=True)), TILES[4], DEFAULT, seed=7, pruned=0)
    assert search == Search(
        seed=7, failed=1, pruned=0, default=DEFAULT, runner_up=TimedTile(tile=TILES[5], time_ms=2.0),
        curve=((1, 4.0), (4, 3.0), (5, 2.0)),
    )  # fmt: skip


def test_of_two_equal_tiles_the_earlier_is_the_runner_up() -> None:
    search = Search.of(list(zip(TILES[:4], [1.0, 3.0, 2.0, 2.0], strict=True)), TILES[0], None, seed=0, pruned=0)
    assert search.runner_up == TimedTile(tile=TILES[2], time_ms=2.0)


def test_a_winner_alone_has_no_runner_up() -> None:
    search = Search.of([(TILES[0], None), (TILES[1], 1.0)], TILES[1], None, seed=0, pruned=0)
    assert search.runner_up is None and search.failed == 1 and search.curve == ((2, 1.0),)


def test_what_the_model_turned_down_did_not_fail() -> None:
    search = Search.of(list(zip(TILES[:4], [None, 1.0, None, None], strict=True)), TILES[1], None, seed=0, pruned=2)
    assert (search.failed, search.pruned) == (1, 2)
