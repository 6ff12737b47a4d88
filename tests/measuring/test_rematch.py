"""Noise, luck, drift and crashes in the last round: who wins in spite of them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flashsmith.errors import Rejected
from flashsmith.measure import Again, Try, timing_of
from flashsmith.measuring.rematch import FINALISTS, ROUNDS, SAMPLES, rematch
from flashsmith.objective import Measured
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import KernelSpec
from flashsmith.spec.problem import Problem
from flashsmith.spec.tile import ForwardTile, Tile

GPU = find_gpu("a100")
PROBLEM = Problem(dtype="bf16", d=64, Hq=2, Nq=256)
SEARCHES = 200
FAST, SLOW, SIGMA = 100e-6, 104e-6, 8e-6  # seconds
OUTLIERS, LUCK = 0.01, 0.3  # share of the samples, and what is left of their time

DEFAULT = default_tile("forward", PROBLEM, GPU)
OTHER = [ForwardTile(Br=64, Bc=16 * n, warps=4) for n in range(1, 8)]


class Noisy:
    """A measuring process with a clock that lies a little; `drift` multiplies its times as it runs."""

    def __init__(self, true: dict[Tile, float], seed: int, drift: float = 0.0) -> None:
        self.true, self.random, self.drift, self.taken = true, np.random.default_rng(seed), drift, 0
        self.asked: list[tuple[type, Tile]] = []

    def samples(self, tile: Tile, count: int) -> list[float]:
        times = self.true[tile] + SIGMA * self.random.standard_normal(count)
        times[self.random.random(count) < OUTLIERS] *= LUCK
        times *= 1 + self.drift * (self.taken + np.arange(count))
        self.taken += count
        return [float(time) for time in times]

    def ask(self, request: Try | Again) -> Any:
        spec: KernelSpec = request.binary.spec
        self.asked.append((type(request), spec.tile))
        if isinstance(request, Again):
            return self.samples(spec.tile, request.count)
        return timing_of(spec, PROBLEM, GPU, self.samples(spec.tile, 100), by="a fake")

    def close(self) -> None:
        return None


class Now:
    """An executor that does it at once."""

    def submit(self, work: Callable[..., Any], *args: Any) -> Any:
        value = work(*args)
        return SimpleNamespace(result=lambda: value)

    def close(self) -> None:
        return None


def search(noisy: Noisy) -> list[Any]:
    """The ranking of a search over the tiles that `noisy` knows."""
    objective = Measured(
        "forward", PROBLEM, GPU, noisy, pool=Now(),  # type: ignore[arg-type]
        builder=lambda spec: SimpleNamespace(spec=spec),  # type: ignore[arg-type,return-value]
    )  # fmt: skip
    return objective.final([objective.submit(tile).result() for tile in noisy.true])


@pytest.mark.parametrize("fast", [DEFAULT, OTHER[0]], ids=["the default", "the other"])
def test_the_faster_of_two_wins_200_noisy_searches(fast: Tile) -> None:
    """4% apart under 8% noise and lucky outliers: at least 95% of the searches (BUG-31)."""
    true = {tile: FAST if tile == fast else SLOW for tile in (DEFAULT, OTHER[0])}
    winners = [search(Noisy(true, seed))[0] for seed in range(SEARCHES)]
    assert sum(winner.tile == fast for winner in winners) >= 0.95 * SEARCHES
    medians = [winner.time.seconds for winner in winners]
    assert min(medians) > 0.95 * FAST and max(medians) < 1.05 * SLOW  # and no outlier becomes the time
    assert {winner.time.samples for winner in winners} == {ROUNDS * SAMPLES}
    assert all(0 < winner.time.spread < 0.3 for winner in winners)


def test_a_lucky_sample_wins_nothing() -> None:
    """One time at 0.3 of the truth, in the minimum of every round, moves no median (BUG-31)."""
    calls: list[str] = []

    def sample(name: str, count: int) -> list[float]:
        calls.append(name)
        lucky = [LUCK * SLOW] if name == "slow" else [FAST]
        return [*lucky, *[SLOW if name == "slow" else FAST] * (count - 1)]

    standings = rematch(["slow", "fast"], sample)
    assert [standing.entry for standing in standings] == ["fast", "slow"]
    assert calls[:4] == ["slow", "fast", "fast", "slow"] and len(calls) == 2 * ROUNDS


@pytest.mark.parametrize("drift", [2e-4, -2e-4], ids=["a GPU that slows down", "one that speeds up"])
def test_drift_meets_all_alike(drift: float) -> None:
    """7% over the rematch, more than lies between them: the turns rotate."""
    true = {DEFAULT: SLOW, OTHER[0]: FAST}
    wins = sum(search(Noisy(true, seed, drift))[0].tile == OTHER[0] for seed in range(50))
    assert wins >= 0.95 * 50


def test_the_best_five_and_the_default_meet_again() -> None:
    """The default though it was the slowest; those in between do not (BUG-31)."""
    true = {tile: FAST * (1 + n) for n, tile in enumerate(OTHER)} | {DEFAULT: 100 * FAST}
    noisy = Noisy(true, 0)
    ranked = search(noisy)
    again = {tile for kind, tile in noisy.asked if kind is Again}
    assert again == {*OTHER[:FINALISTS], DEFAULT}
    assert [candidate.tile for candidate in ranked] == [*OTHER[:FINALISTS], DEFAULT]


def test_a_finalist_that_fails_falls_out() -> None:
    """In the third round: the others finish, and its reason is kept."""

    class Breaking(Noisy):
        def ask(self, request: Try | Again) -> Any:
            if isinstance(request, Again) and request.binary.spec.tile == OTHER[0] and len(self.asked) > 6:
                raise Rejected("Timeout: no answer within 60 s")
            return super().ask(request)

    ranked = search(Breaking({DEFAULT: SLOW, OTHER[0]: FAST}, 0))
    assert [candidate.tile for candidate in ranked] == [DEFAULT, OTHER[0]]
    assert ranked[1].time is None and "Timeout" in ranked[1].failure
