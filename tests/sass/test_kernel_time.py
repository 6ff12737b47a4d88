"""Whole-kernel times: trip counts, waves, causal launches, helpers, warpgroups."""

import time
from dataclasses import replace
from functools import cache

import pytest
from flashsmith.sass import MissingWork, Work, disassemble, predict_time, static_bound

from .boards import A100, H100, RTX4090
from .cuda import SCALE, compile_cubin, compile_scores

TILE_FLOPS = 2.0 * 128 * 64 * 64  # S of a 128x64 tile, d = 64


@cache
def scores(sm=80, **shape):
    return disassemble(compile_scores(sm, **shape)).functions["scores"]


def work(blocks=864, tiles=64, warps=4, **more):
    return Work(blocks, warps, 2 * 64 * 144, TILE_FLOPS * tiles * blocks, **more)


def test_trip_count_comes_from_flops():
    assert predict_time(scores(), A100, work(tiles=64)).iterations == pytest.approx(64)
    assert predict_time(scores(outer=True), A100, work(tiles=256)).iterations == pytest.approx(256)
    assert predict_time(scores(masked=True), A100, work(tiles=64)).iterations == pytest.approx(63)  # one is masked
    assert predict_time(scores(warps=8, m_tiles=1), A100, work(tiles=64, warps=8)).iterations == pytest.approx(64)


def test_time_grows_with_the_work():
    short, long = (predict_time(scores(), A100, work(tiles=t)) for t in (64, 128))
    assert long.cycles == pytest.approx(short.cycles + 64 * short.cycles_per_iteration * 2, rel=0.02)
    assert long.tflops > short.tflops


def test_more_rows_a_warp_beat_more_warps():
    """Eight warps of 16 rows read each tile of B eight times, four of 32 rows four times."""
    four = predict_time(scores(90), H100, work())
    eight = predict_time(scores(90, warps=8, m_tiles=1), H100, work(warps=8))
    assert eight.seconds > 1.05 * four.seconds
    assert eight.pipes["shared"] > four.pipes["shared"]


def test_tensor_cores_bound_geforce():
    predicted = predict_time(scores(89), RTX4090, work(blocks=1024))
    assert predicted.pipes["tensor"] > 0.95
    assert predicted.bound_by.startswith("tensor cores")
    assert max(predicted.pipes.values()) <= 1.0


def test_a_tail_wave_costs_a_wave():
    slots = 108 * predict_time(scores(), A100, work()).blocks_per_sm
    full, one_more = (predict_time(scores(), A100, work(blocks=b)) for b in (2 * slots, 2 * slots + 1))
    assert 1.1 * full.seconds < one_more.seconds < 1.5 * full.seconds
    assert "slots stand empty" in one_more.bound_by


def test_a_small_launch_has_the_sm_to_itself():
    assert predict_time(scores(), A100, work(blocks=50)).blocks_per_sm == 1


def test_unequal_blocks():
    pattern = tuple(range(32, 0, -1))
    flops = TILE_FLOPS * sum(pattern) * 640
    longest_first = Work(32 * 640, 4, 18432, flops, unequal=pattern)
    shortest_first = replace(longest_first, unequal=pattern[::-1])
    first, last = (predict_time(scores(), A100, w) for w in (longest_first, shortest_first))
    assert first.seconds < last.seconds
    alike = predict_time(scores(), A100, replace(longest_first, unequal=None))
    assert first.seconds == pytest.approx(alike.seconds, rel=0.1)


def test_rare_blocks_count_as_often_as_told():
    function = scores(80, rare=True)
    assert len(function.short_trace.loop) < len(function.trace.loop) - 100
    always, half, never = (predict_time(function, A100, work(rare_share=r)).seconds for r in (1.0, 0.5, 0.0))
    assert always > 1.1 * never
    assert half == pytest.approx((always + never) / 2, rel=0.03)
    assert predict_time(function, A100, work()).seconds == always


def test_bytes_time_a_streaming_kernel():
    function = disassemble(compile_cubin(SCALE, 80)[0]).functions["scale"]
    predicted = predict_time(function, A100, Work(1000, 8, hbm_bytes=2e9))
    assert predicted.seconds == pytest.approx(2e9 / (0.85 * 2039e9))
    assert predicted.bound_by.startswith("memory bandwidth: 2000.0 MB")
    with pytest.raises(MissingWork, match="hbm_bytes"):
        predict_time(function, A100, Work(1000, 8))


def test_bytes_overlap_with_computing_unless_serial():
    alone = predict_time(scores(), A100, work(hbm_bytes=1e6))
    assert predict_time(scores(), A100, work(hbm_bytes=1e10)).bound_by.startswith("memory bandwidth")
    serial = predict_time(scores(), A100, work(serial_hbm_bytes=1e8)).seconds
    assert serial == pytest.approx(alone.seconds + 1e8 / (0.85 * 2039e9))


def test_flops_are_needed():
    for ask in (predict_time, static_bound):
        with pytest.raises(MissingWork, match="tensor_flops"):
            ask(scores(), A100, Work(100, 4))


@pytest.mark.parametrize("shape", [{}, {"masked": True}, {"warps": 8, "m_tiles": 1}], ids=str)
@pytest.mark.parametrize(("sm", "board"), [(80, A100), (90, H100), (89, RTX4090)], ids=["a100", "h100", "4090"])
def test_the_static_bound_is_below(sm, board, shape):
    function = scores(sm, **shape)
    launch = work(blocks=64 * board.sms, warps=shape.get("warps", 4))
    predicted = predict_time(function, board, launch).seconds
    assert 0.3 * predicted < static_bound(function, board, launch) <= 1.001 * predicted


def test_a_prediction_is_quick():
    cubin = compile_scores(80)
    start = time.process_time()
    predict_time(disassemble(cubin).functions["scores"], A100, work())
    assert time.process_time() - start < 1.0
