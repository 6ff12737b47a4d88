"""The search: what is tried, in which order, at what cost, and who may win."""

from __future__ import annotations

from dataclasses import replace

import pytest
from flashsmith.choose import _best, choose
from flashsmith.errors import NothingFound
from flashsmith.objective import Candidate
from flashsmith.predict import Prediction
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import TILE_OF, KernelName, KernelSpec
from flashsmith.spec.problem import Problem
from flashsmith.spec.space import choices
from flashsmith.spec.tile import ForwardTile

GPU = find_gpu("a100")
PROBLEM = Problem(dtype="bf16", d=64, Nq=2048)
SEARCHED: tuple[KernelName, ...] = ("forward", "fused", "dkdv", "dq")


def timed(seconds: float, *, spills: int = 0) -> Prediction:
    return Prediction(
        kernel="forward", gpu="a100", seconds=seconds, tflops=1.0, spread=0.0, blocks_per_sm=1, pipes={},
        bound_by="", spills_in_loop=spills,
    )  # fmt: skip


def test_a_wrong_kernel_cannot_win() -> None:
    """The fastest candidate fails its check, the next is right; the reason is kept (BUG-30)."""
    fast, slow = ForwardTile(Br=128, Bc=64, warps=4), ForwardTile(Br=64, Bc=64, warps=4)
    candidates = [Candidate(fast, timed(1.0)), Candidate(slow, timed(2.0))]

    def verify(spec: KernelSpec) -> str:
        return "O is off by 1.0e-01, allowed 1.0e-02" if spec.tile == fast else ""

    winner = _best("forward", PROBLEM, GPU, candidates, candidates, verify)
    assert winner.spec.tile == slow
    assert len(winner.rejected) == 1 and "O is off" in winner.rejected[0]


def test_a_loop_that_spills_wins_only_where_all_do() -> None:
    fast, even, slow = (ForwardTile(Br=Br, Bc=64, warps=4) for Br in (128, 192, 64))
    candidates = [
        Candidate(fast, timed(1.0, spills=3)),
        Candidate(slow, timed(2.0)),
        Candidate(even, timed(3.0, spills=1)),
    ]
    winner = _best("forward", PROBLEM, GPU, candidates, candidates, lambda spec: "")
    assert winner.spec.tile == slow
    assert [reason.partition(": ")[2].split()[0] for reason in winner.rejected] == ["spills"]
    assert "Br128" in winner.rejected[0]
    all_spill = [candidates[0], candidates[2]]
    winner = _best("forward", PROBLEM, GPU, all_spill, all_spill, lambda spec: "")
    assert winner.spec.tile == fast and not winner.rejected


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
