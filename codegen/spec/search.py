"""Hold what a search leaves besides its winner: the runner-up, the default, and how its best time fell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .tile import Tile


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedTile:
    """A tile that was tried, and its time."""

    tile: Tile
    time_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What a search left. Its times are of the kind that the record's evidence names, its trials are counted there.

    Where times are measured, those of the curve and of the runner-up are of the trials; the winner's and the default's
    are of the rematch.
    """

    seed: int
    failed: int  # trials that left no valid time: not compiled, not run, or wrong
    pruned: int  # trials that the model turned down, so that the GPU was not asked
    default: TimedTile | None  # None if it failed
    runner_up: TimedTile | None  # the best tile that is not the winner; None if no other has a time
    curve: tuple[tuple[int, float], ...]  # (trial, counted from 1; best time so far, ms), where it improved

    @classmethod
    def of(
        cls,
        tried: Sequence[tuple[Tile, float | None]],
        winner: Tile,
        default: TimedTile | None,
        *,
        seed: int,
        pruned: int,
    ) -> Search:
        """From the tiles in the order of their trials, each with its ms, or None where it failed or was pruned."""
        curve: list[tuple[int, float]] = []
        others: list[tuple[float, int]] = []
        for trial, (tile, ms) in enumerate(tried, 1):
            if ms is None:
                continue
            if not curve or ms < curve[-1][1]:
                curve.append((trial, ms))
            if tile != winner:
                others.append((ms, trial))
        runner_up = TimedTile(tile=tried[min(others)[1] - 1][0], time_ms=min(others)[0]) if others else None
        failed = sum(ms is None for _, ms in tried) - pruned
        return cls(
            seed=seed, failed=failed, pruned=pruned, default=default, runner_up=runner_up, curve=tuple(curve)
        )  # fmt: skip
