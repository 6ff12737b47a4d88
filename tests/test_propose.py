"""What a search tries next: the known good first, then what promises most, never the same twice."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
from flashsmith.propose import Known, Proposer
from flashsmith.spec.defaults import default_tile, published_tiles
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import KernelName
from flashsmith.spec.problem import Problem
from flashsmith.spec.space import legal_tiles
from flashsmith.spec.tile import ForwardTile, Tile

GPU = find_gpu("a100")
PROBLEM = Problem(dtype="bf16", d=64, Nq=2048)
SEARCHED: tuple[KernelName, ...] = ("forward", "fused", "dkdv", "dq")


def valley(tile: Tile) -> float:
    """A smooth stand-in for a time, least at Br = 128, Bc = 80."""
    return 1 + abs(math.log2(tile.Br / 128)) + abs(tile.Bc - 80) / 80  # type: ignore[union-attr]


def explore(propose: Proposer, trials: int, time: Callable[[Tile], float | None] = valley) -> list[Tile]:
    """The tiles of a search in order."""
    known: list[Known] = []
    while len(known) < trials and (tile := propose(known, ())):
        known.append(Known(tile, time(tile)))
    return [tile for tile, _ in known]


@pytest.mark.parametrize("kernel", SEARCHED)
def test_every_proposal_is_legal_and_new(kernel: KernelName) -> None:
    tried = explore(Proposer(kernel, PROBLEM, GPU), 40)
    assert len(tried) == len(set(tried)) == 40
    assert set(tried) <= set(legal_tiles(kernel, PROBLEM, GPU))


@pytest.mark.parametrize("gpu", ["a100", "rtx3090", "h100-sxm", "rtx5090"])
@pytest.mark.parametrize("d", [64, 80, 96, 128, 192, 256])
def test_the_default_is_first_and_the_published_follow(gpu: str, d: int) -> None:
    """Also where the default's values are none of the usual ones."""
    for kernel in SEARCHED:
        problem, target = Problem(dtype="bf16", d=d), find_gpu(gpu)
        default, bold = (default_tile(kernel, problem, target, spilling=spilling) for spilling in (False, True))
        legal = set(legal_tiles(kernel, problem, target))
        published = [tile for tile in published_tiles(kernel, problem, target) if tile in legal]
        expected = list(dict.fromkeys([default, *({bold} & legal), *published]))
        assert explore(Proposer(kernel, problem, target), len(expected)) == expected


def test_tiles_that_are_asked_for_follow_the_default() -> None:
    """As far as they are legal."""
    asked, impossible = legal_tiles("forward", PROBLEM, GPU)[-1], ForwardTile(Br=512, Bc=64, warps=4)
    tried = explore(Proposer("forward", PROBLEM, GPU, first=(impossible, asked)), 20)
    assert tried.index(asked) <= 2 and impossible not in tried


def test_the_same_history_brings_the_same_proposal() -> None:
    """In any order, with any worker; the seed decides between equals."""
    known = [Known(tile, valley(tile)) for tile in explore(Proposer("forward", PROBLEM, GPU), 12)]
    again = [*known]
    random.Random(0).shuffle(again)
    proposals = [Proposer("forward", PROBLEM, GPU)(history, ()) for history in (known, again)]
    assert proposals[0] == proposals[1]
    assert explore(Proposer("dq", PROBLEM, GPU, seed=1), 9) != explore(Proposer("dq", PROBLEM, GPU, seed=2), 9)


def test_what_runs_is_not_proposed_and_its_neighbours_wait() -> None:
    """A tile that runs makes what lies near it less uncertain, and no faster or slower."""
    propose = Proposer("forward", PROBLEM, GPU)
    known = [Known(tile, valley(tile)) for tile in explore(propose, 12)]
    running: list[Tile] = []
    for _ in range(4):
        tile = propose(known, running)
        assert tile is not None and tile not in running and tile not in [k.tile for k in known]
        running.append(tile)
    at = [propose._place[k.tile] for k in known]
    times = np.log([k.seconds or 0.0 for k in known])
    first = propose._place[running[0]]
    near = [n for n in range(len(propose.space)) if n not in (first, *at) and propose._alike[n, first] > 0.75]
    (mean, deviation), (same, less) = (propose._expect(at, times, waits, near) for waits in ([], [first]))
    assert near and (mean == same).all() and (less < deviation).all()


def test_a_failure_drives_the_search_away() -> None:
    """With everything of 8 warps failing, the search spends few trials there."""
    propose = Proposer("forward", PROBLEM, GPU)
    tried = explore(propose, 40, lambda tile: None if tile.warps == 8 else valley(tile))
    share = sum(tile.warps == 8 for tile in propose.space) / len(propose.space)
    assert share > 0.25 and sum(tile.warps == 8 for tile in tried) < share / 2 * len(tried)


def test_a_space_in_which_all_fail_is_tried_to_its_end() -> None:
    few = legal_tiles("forward", PROBLEM, GPU)[::40]
    tried = explore(Proposer("forward", PROBLEM, GPU, space=few), 500, lambda tile: None)
    assert len(tried) == len(few) and set(tried) == set(few)


def test_the_valley_is_found() -> None:
    for seed in range(5):
        best = min(explore(Proposer("forward", PROBLEM, GPU, seed=seed), 40), key=valley)
        assert best.Br == 128 and best.Bc == 80  # type: ignore[union-attr]
