"""The search: what is tried, in which order, at what cost, and who may win."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from flashsmith.choose import Candidate, _best, _Search, choose
from flashsmith.errors import NothingFound
from flashsmith.predict import Prediction
from flashsmith.spec.defaults import default_tile, published_tiles
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import TILE_OF, KernelName, KernelSpec
from flashsmith.spec.limits import why_illegal
from flashsmith.spec.problem import Problem
from flashsmith.spec.space import choices, legal_tiles
from flashsmith.spec.tile import ForwardTile, Tile

GPU = find_gpu("a100")
PROBLEM = Problem(dtype="bf16", d=64, Nq=2048)
SEARCHED: tuple[KernelName, ...] = ("forward", "fused", "dkdv", "dq")


def timed(seconds: float) -> Prediction:
    return Prediction(
        kernel="forward", gpu="a100", seconds=seconds, tflops=1.0, spread=0.0, blocks_per_sm=1, pipes={},
        bound_by="", spills_in_loop=0,
    )  # fmt: skip


def landscape(tile: Tile) -> float:
    """A smooth stand-in for a time, least at Br = 128, Bc = 80."""
    return 1 + abs(math.log2(tile.Br / 128)) + abs(tile.Bc - 80) / 80  # type: ignore[union-attr]


def explore(kernel: KernelName, trials: int, seed: int = 0, value: Callable[[Tile], float] = landscape) -> list[Tile]:
    """The tiles of a search in the order in which they are given out."""
    search, tried = _Search(kernel, PROBLEM, GPU, trials, seed), []
    while asked := search.ask():
        trial, tile = asked
        tried.append(tile)
        search.tell(trial, Candidate(tile, timed(value(tile))))
    return tried


@pytest.mark.parametrize("kernel", SEARCHED)
def test_every_trial_is_a_legal_tile_that_was_not_tried(kernel: KernelName) -> None:
    tried = explore(kernel, 40)
    assert len(tried) == len(set(tried)) == 40
    assert all(why_illegal(KernelSpec.of(kernel, PROBLEM, tile, GPU.sm), GPU) is None for tile in tried)


@pytest.mark.parametrize("kernel", SEARCHED)
def test_the_default_and_the_published_tiles_come_first(kernel: KernelName) -> None:
    tried = explore(kernel, 12)
    assert tried[0] == default_tile(kernel, PROBLEM, GPU)
    published = [
        tile
        for tile in published_tiles(kernel, PROBLEM, GPU)
        if why_illegal(KernelSpec.of(kernel, PROBLEM, tile, GPU.sm), GPU) is None
        and all(getattr(tile, name) in allowed for name, allowed in choices(kernel, PROBLEM, GPU).items())
    ]
    bold = default_tile(kernel, PROBLEM, GPU, spilling=True)
    expected = list(dict.fromkeys([tried[0], bold, *published]))[:12]
    assert tried[: len(expected)] == expected
    assert kernel == "dq" or len(expected) > 1


@pytest.mark.parametrize("gpu", ["a100", "rtx3090", "h100-sxm", "rtx5090"])
@pytest.mark.parametrize("d", [64, 80, 96, 128, 192, 256])
def test_the_default_is_always_tried_first(gpu: str, d: int) -> None:
    """Also where its values are none of the usual ones."""
    for kernel in SEARCHED:
        problem, target = Problem(dtype="bf16", d=d), find_gpu(gpu)
        search = _Search(kernel, problem, target, 1, 0)
        asked = search.ask()
        assert asked is not None and asked[1] == default_tile(kernel, problem, target)


def test_a_seed_fixes_the_search() -> None:
    assert explore("forward", 25, seed=1) == explore("forward", 25, seed=1)
    assert explore("forward", 25, seed=1) != explore("forward", 25, seed=2)


def test_a_space_that_is_used_up_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far more trials than tiles: each is measured once, and the search ends by itself (BUG-36)."""
    few = legal_tiles("forward", PROBLEM, GPU)[::40]
    monkeypatch.setattr("flashsmith.choose.legal_tiles", lambda kernel, problem, gpu: few)
    tried = explore("forward", 500)
    assert len(tried) == len(few) and set(tried) == set(few)


def test_every_trial_is_used_while_tiles_are_left() -> None:
    """TPE repeats itself around the best it knows; then a neighbour of it is tried instead."""
    tried = explore("fused", 80)
    assert len(tried) == len(set(tried)) == 80
    best = min(tried, key=landscape)
    near = [tile for tile in tried if sum(getattr(tile, f) != getattr(best, f) for f in tile.short) == 1]
    assert len(near) >= 5


def test_tpe_finds_the_valley() -> None:
    best = min(explore("forward", 60), key=landscape)
    assert best.Br == 128 and abs(best.Bc - 80) <= 16  # type: ignore[union-attr]


def test_a_wrong_kernel_cannot_win() -> None:
    """The fastest candidate fails its check, the next is right; the reason is kept (BUG-30)."""
    fast, slow = ForwardTile(Br=128, Bc=64, warps=4), ForwardTile(Br=64, Bc=64, warps=4)
    candidates = [Candidate(fast, timed(1.0)), Candidate(slow, timed(2.0))]

    def verify(spec: KernelSpec) -> str:
        return "O is off by 1.0e-01, allowed 1.0e-02" if spec.tile == fast else ""

    winner = _best("forward", PROBLEM, GPU, candidates, candidates, verify)
    assert winner.spec.tile == slow
    assert len(winner.rejected) == 1 and "O is off" in winner.rejected[0]


def test_nothing_valid_says_why() -> None:
    """Counts for each class of failure, not an empty minimum (BUG-33)."""
    tile = default_tile("forward", PROBLEM, GPU)
    failed = [Candidate(tile, None, "CompileError: no such thing")] * 3
    with pytest.raises(NothingFound, match=r"3 x CompileError: no such thing"):
        _best("forward", PROBLEM, GPU, failed, [], lambda spec: "")
    with pytest.raises(NothingFound, match="dK is off"):
        _best("forward", PROBLEM, GPU, *[[Candidate(tile, timed(1.0))]] * 2, lambda spec: "dK is off")


def test_fields_of_a_tile_are_all_searched() -> None:
    for kernel in SEARCHED:
        assert set(choices(kernel, PROBLEM, GPU)) == set(TILE_OF[kernel].__dataclass_fields__) - {"short"}


def test_a_search_on_the_real_thing() -> None:
    """Four tiles compiled and timed in worker processes; the same twice; the default among them."""
    seen: list[Candidate] = []
    problem = replace(PROBLEM, Nq=1024, Nk=1024)
    first = choose("forward", problem, GPU, trials=4, progress=seen.append)
    assert [c.tile for c in seen] == [c.tile for c in first.candidates] and len(seen) == 4
    assert first.default is not None and first.time.seconds <= first.default.seconds
    second = choose("forward", problem, GPU, trials=4)
    assert second.candidates == first.candidates and second.spec == first.spec
