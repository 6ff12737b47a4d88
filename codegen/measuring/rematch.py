"""Let the best few run again, in turns, so that a lucky sample or a warmer GPU picks no winner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Generic, TypeVar

from ..errors import Rejected

FINALISTS = 5
ROUNDS = 9  # odd, so that the median is a round that took place
SAMPLES = 20  # of each finalist in a round

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Standing(Generic[T]):
    """One finalist after the rematch."""

    entry: T
    rounds: tuple[float, ...]  # seconds: the median of each round
    samples: tuple[float, ...]  # seconds: all of them
    failure: str = ""  # why it fell out

    @property
    def seconds(self) -> float:
        """The median of the medians: an outlier moves neither, a slow round only one of them."""
        return median(self.rounds)


def rematch(
    entries: Sequence[T], sample: Callable[[T, int], Sequence[float]], *, rounds: int = ROUNDS, count: int = SAMPLES
) -> list[Standing[T]]:
    """The finalists, fastest first; those that fell out last.

    Every round times each finalist `count` times, beginning with another one, so that clocks and neighbours that drift
    meet all alike. `sample` returns seconds and raises Rejected for a finalist that fails.
    """
    medians: list[list[float]] = [[] for _ in entries]
    samples: list[list[float]] = [[] for _ in entries]
    failures = [""] * len(entries)
    for turn in range(rounds):
        for step in range(len(entries)):
            n = (turn + step) % len(entries)
            if failures[n]:
                continue
            try:
                times = sample(entries[n], count)
            except Rejected as error:
                failures[n] = str(error)
                continue
            medians[n].append(median(times))
            samples[n].extend(times)
    standings = [
        Standing(entry, tuple(of_rounds), tuple(of_all), failure)
        for entry, of_rounds, of_all, failure in zip(entries, medians, samples, failures, strict=True)
    ]
    return sorted(standings, key=lambda s: (1, 0.0) if s.failure else (0, s.seconds))
