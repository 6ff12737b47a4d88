"""Replay searches on recorded spaces: the share of the optimum that each has reached after so many trials.

    python benchmarks/search_replay.py [--seeds 30] [--spaces NAME ...] [--searches random TPE ours]

Every legal tile of these kernels was compiled and predicted once (benchmarks/record_spaces.py), so a trial is a look
into a table. Three searches: random order; Optuna's TPE with its defaults, whose illegal and repeated suggestions cost
nothing; ours (flashsmith.propose). A share of 0.98 means that the best tile so far takes 1/0.98 of the least time.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from functools import partial
from itertools import islice
from statistics import median, quantiles

from flashsmith.propose import Known, Proposer
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.space import tile_of
from flashsmith.spec.tile import Tile
from recorded_space import Space, recorded_names

PATIENCE = 10  # suggestions of TPE in a row that are illegal or repeated
BUDGETS = (10, 20, 40, 80)  # trials: different legal tiles


class Recorded:
    """A space with its times, read once."""

    def __init__(self, name: str) -> None:
        self.space = Space.of(name)
        self.seconds = self.space.read()
        self.best = min(s for s in self.seconds.values() if s is not None)


def ours(recorded: Recorded, seed: int) -> Iterator[Tile]:
    """What `flashsmith tune` tries, one tile at a time."""
    tiles = list(recorded.seconds)
    of = recorded.space
    propose = Proposer(of.kernel, of.problem, find_gpu(of.gpu), seed=seed, space=tiles)
    known: list[Known] = []
    while tile := propose(known, ()):
        known.append(Known(tile, recorded.seconds[tile]))
        yield tile


def at_random(recorded: Recorded, seed: int) -> Iterator[Tile]:
    """Every tile once, in any order."""
    tiles = list(recorded.seconds)
    random.Random(seed).shuffle(tiles)
    yield from tiles


def tpe(recorded: Recorded, seed: int) -> Iterator[Tile]:
    """Optuna's TPE with its defaults over the fields of the tile.

    It knows nothing of legality and repeats itself: what is illegal it is told as pruned, and where PATIENCE
    suggestions bring nothing new, a tile that was not tried is given to it.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="minimize", sampler=optuna.samplers.TPESampler(seed=seed))
    names = [f.name for f in fields(next(iter(recorded.seconds)))]
    values = {name: sorted({int(getattr(tile, name)) for tile in recorded.seconds}) for name in names}
    untried, repeats = list(at_random(recorded, seed)), 0
    while untried:
        trial = study.ask()
        tile = tile_of(recorded.space.kernel, {name: trial.suggest_categorical(name, values[name]) for name in names})
        seconds = recorded.seconds.get(tile)
        if seconds is None:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            study.tell(trial, seconds)
        if tile in untried:
            untried.remove(tile)
            repeats = 0
            yield tile
        elif (repeats := repeats + 1) == PATIENCE:
            study.enqueue_trial({name: int(getattr(untried[0], name)) for name in names})
            repeats = 0


SEARCHES: dict[str, Callable[[Recorded, int], Iterator[Tile]]] = {"random": at_random, "TPE": tpe, "ours": ours}


def shares(recorded: Recorded, search: str, seed: int) -> list[float]:
    """The share of the optimum after each budget."""
    best, reached = math.inf, []
    for n, tile in enumerate(islice(SEARCHES[search](recorded, seed), max(BUDGETS)), start=1):
        best = min(best, recorded.seconds[tile] or math.inf)
        if n in BUDGETS:
            reached.append(recorded.best / best)
    return reached + [recorded.best / best] * (len(BUDGETS) - len(reached))  # a small space is used up before


def replay(name: str, search: str, seeds: int) -> list[list[float]]:
    """[seeds][budgets]"""
    recorded = Recorded(name)
    return [shares(recorded, search, seed) for seed in range(seeds)]


def table(results: Sequence[tuple[str, str, list[list[float]]]]) -> Iterator[str]:
    """Markdown: median, and the 10th percentile of the seeds in brackets."""
    yield "| space | tiles | search | " + " | ".join(f"{budget} trials" for budget in BUDGETS) + " |"
    yield "| --- | --- | --- |" + " --- |" * len(BUDGETS)
    for name, search, reached in results:
        cells = [f"{median(column):.3f} ({_low(column):.3f})" for column in zip(*reached, strict=True)]
        yield f"| {name} | {len(Recorded(name).seconds)} | {search} | " + " | ".join(cells) + " |"


def _low(values: Sequence[float]) -> float:
    return quantiles(values, n=10, method="inclusive")[0] if len(values) > 1 else values[0]


def main() -> None:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--spaces", nargs="*", choices=recorded_names(), default=recorded_names())
    parser.add_argument("--searches", nargs="*", choices=list(SEARCHES), default=list(SEARCHES))
    asked = parser.parse_args()
    work = [(name, search) for name in asked.spaces for search in asked.searches]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        reached = pool.map(partial(replay, seeds=asked.seeds), *zip(*work, strict=True))
        results = [(name, search, shares) for (name, search), shares in zip(work, reached, strict=True)]
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
