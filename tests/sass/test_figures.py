"""Predictions for early kernels against what was noted then, and against the model's first version."""

from functools import cache

import pytest
from flashsmith.sass import predict_time, static_bound

from .recorded import BACKWARD, EIGHT_WARPS, FORWARD, FUSED_WQ1, HOPPER_FUSED, function_of, work_of


@cache
def predicted(case):
    return predict_time(function_of(case.cubin, case.kernel), case.board, work_of(case))


def tflops(case):
    return predicted(case).tflops


@pytest.mark.parametrize("case", [*FORWARD, *BACKWARD], ids=lambda case: case.cubin)
def test_as_documented(case):
    assert tflops(case) == pytest.approx(case.documented, rel=0.015)
    assert tflops(case) == pytest.approx(case.first, rel=0.015)


def test_hopper_backward_pays_for_its_vector_reductions():
    """The first model counted REDG.F32x4 as 4 bytes a lane; with its 16 the kernel is 7% slower than documented."""
    assert tflops(HOPPER_FUSED) == pytest.approx(HOPPER_FUSED.first * 0.934, rel=0.01)


def test_eight_warps_lose():
    """One block of eight warps loses to two of four; a fused backward without row split to one with."""
    assert tflops(EIGHT_WARPS) < 0.96 * tflops(FORWARD[0])
    assert tflops(EIGHT_WARPS) == pytest.approx(EIGHT_WARPS.first, rel=0.015)
    assert tflops(FUSED_WQ1) < 0.85 * tflops(BACKWARD[0])
    assert tflops(FUSED_WQ1) == pytest.approx(FUSED_WQ1.first, rel=0.015)


@pytest.mark.parametrize("case", [*FORWARD, *BACKWARD, HOPPER_FUSED], ids=lambda case: case.cubin)
def test_tensor_instructions_of_the_loop_fit_the_tile(case):
    """products * 2 * Br * Bc * d FLOPs a tile, 4096 an HMMA, over the warps: catches a wrong or an unrolled loop."""
    Bc = {"fwd": 64 if case.d == 64 else 48, "fused": 64}[case.kernel]
    hmma = sum(i.base == "HMMA" for i in function_of(case.cubin, case.kernel).trace.loop)
    assert hmma == case.products * 2 * case.rows * Bc * case.d // 4096 // case.warps


@pytest.mark.parametrize("case", [*FORWARD, *BACKWARD], ids=lambda case: case.cubin)
def test_bound_spread_and_pipes(case):
    time = predicted(case)
    assert static_bound(function_of(case.cubin, case.kernel), case.board, work_of(case)) < time.seconds
    assert 0 <= time.spread < 0.25
    assert all(0 <= share <= 1 for share in time.pipes.values())
    assert time.spills_in_loop == 0
    assert max(time.pipes, key=lambda name: time.pipes[name]) in ("tensor", "shared")
