"""What a search leaves in its record."""

from __future__ import annotations

from flashsmith.choose import Winner
from flashsmith.objective import PRUNED, Candidate
from flashsmith.predict import Prediction
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import KernelSpec
from flashsmith.spec.problem import Problem
from flashsmith.spec.search import Search, TimedTile
from flashsmith.spec.tile import ForwardTile, Tile
from flashsmith.tune import record_of

A100 = find_gpu("a100")
PROBLEM = Problem(dtype="bf16", d=64, Nq=1024)
DEFAULT = default_tile("forward", PROBLEM, A100)
WRONG, SLOW, BEST, BROKEN, DULL = (ForwardTile(Br=64, Bc=Bc, warps=4) for Bc in (16, 32, 48, 64, 80))
FAILURE = {BROKEN: "CompileError: x", DULL: f"{PRUNED}: the model expects 9 ms"}


def time(seconds: float) -> Prediction:
    return Prediction(
        kernel="forward", gpu="a100", seconds=seconds, tflops=1.0, spread=0.0, blocks_per_sm=1, pipes={},
        bound_by="", spills_in_loop=0,
    )  # fmt: skip


def winner(*tried: tuple[Tile, float | None], rejected: tuple[Tile, ...] = ()) -> Winner:
    candidates = tuple(Candidate(tile, time(s) if s else None, "" if s else FAILURE[tile]) for tile, s in tried)
    times = {c.tile: c.time for c in candidates}
    best, default = times[BEST], times.get(DEFAULT)
    assert best is not None
    return Winner(
        spec=KernelSpec.of("forward", PROBLEM, BEST, 80), time=best, default=default, candidates=candidates,
        rejected=tuple(f"{KernelSpec.of('forward', PROBLEM, tile, 80).key}: O is off" for tile in rejected),
    )  # fmt: skip


def test_a_record_keeps_the_search() -> None:
    """Times are rounded to 10 ns; a fast and wrong tile has none and failed; one that the model turned down did not."""
    found = winner(
        (DEFAULT, 3e-3),
        (WRONG, 1e-4),
        (BROKEN, None),
        (DULL, None),
        (SLOW, 2.00000016e-3),
        (BEST, 1e-3),
        rejected=(WRONG,),
    )
    record = record_of(found, PROBLEM, A100, seed=11)
    assert record.search == Search(
        seed=11, failed=2, pruned=1, default=TimedTile(tile=DEFAULT, time_ms=3.0),
        runner_up=TimedTile(tile=SLOW, time_ms=2.0), curve=((1, 3.0), (5, 2.0), (6, 1.0)),
    )  # fmt: skip
    assert record.evidence.trials == 6 and record.evidence.time_ms == 1.0


def test_a_default_that_is_wrong_has_no_time() -> None:
    record = record_of(winner((DEFAULT, 1e-4), (BEST, 1e-3), rejected=(DEFAULT,)), PROBLEM, A100, seed=0)
    assert record.search == Search(seed=0, failed=1, pruned=0, default=None, runner_up=None, curve=((2, 1.0),))
