"""The simulation on listings whose answer is known."""

import pytest
from flashsmith.sass.block_time import simulated_block
from flashsmith.sass.issue import mean_iteration, simulate
from flashsmith.sass.load import sum_load
from flashsmith.sass.path import Trace
from flashsmith.sass.plan import plan_steps

from .boards import A100, H100, RTX4090, T4
from .listings import HMMA, LDSM_X4, make


def iteration(instructions, board, warps=4, blocks=1, trips=8):
    return mean_iteration(simulate(plan_steps(instructions, board), trips, warps, [0.0] * blocks, board))


@pytest.mark.parametrize(
    ("board", "cycles"), [(A100, 128), (H100, 96), (RTX4090, 512)], ids=lambda x: getattr(x, "name", None)
)
def test_sixteen_independent_hmma(board, cycles):
    assert iteration([make(HMMA)] * 16, board) == pytest.approx(cycles)
    assert iteration([make(HMMA)] * 16, board, warps=8) == pytest.approx(2 * cycles)  # two warps share a tensor core


def test_half_sized_hmma_takes_half_the_time():
    assert iteration([make("HMMA.1688.F32.BF16 R4, R8, R12, R4")] * 16, A100) == pytest.approx(64)


def test_turing_waits_for_an_hmma_and_has_half_the_shared_memory():
    """8 cycles each and 14 in a chain; an LDSM.x4 takes 8 cycles of the SM, and so does an STS of 16 bytes a lane."""
    hmma = "HMMA.1688.F32 R4, R8, R12, R4"
    assert iteration([make(hmma)] * 16, T4) == pytest.approx(128)
    assert iteration([make(hmma, write=5, waits=(5,))] * 16, T4, warps=1) == pytest.approx(16 * 14)
    assert iteration([make(LDSM_X4)] * 8, T4) == pytest.approx(256, rel=0.05)
    assert iteration([make("STS.128 [R2], R4")] * 8, T4) == pytest.approx(256, rel=0.05)
    assert iteration([make("SHFL.BFLY PT, R0, R1, 0x1, 0x1f")] * 8, T4) == pytest.approx(64, rel=0.05)


def test_stalls_are_obeyed():
    assert iteration([make("FADD R0, R1, R2", stall=11)] * 10, A100) == pytest.approx(110)


def test_one_issue_slot_for_all_warps_of_a_sub_partition():
    slots = [make("UIADD3 UR4, UR4, 0x1, URZ")] * 20
    assert iteration(slots, A100) == pytest.approx(20)
    assert iteration(slots, A100, warps=16) == pytest.approx(80, rel=0.05)


def test_pipes_overlap():
    """8 MUFU of 8 cycles hide 16 FADD of 2 behind another warp's."""
    mixed = [make("MUFU.EX2 R0, R1")] * 8 + [make("FADD R0, R1, R2")] * 16
    assert iteration(mixed, A100, warps=8) == pytest.approx(2 * 64, rel=0.05)


def test_one_shared_pipe_for_four_sub_partitions():
    """8 LDSM.x4 of 4 wavefronts from each of 4 warps: 128 cycles of the SM, not 32."""
    assert iteration([make(LDSM_X4)] * 8, A100) == pytest.approx(128, rel=0.05)
    assert iteration([make(LDSM_X4)] * 8, A100, warps=1) == pytest.approx(32, rel=0.2)


def test_a_padding_load_costs_an_issue_slot_only():
    assert iteration([make("@!PT LDS RZ, [RZ]")] * 30, A100) == pytest.approx(30)


def test_a_scoreboard_holds_the_reader_back():
    chain = [make("LDS R0, [R1]", write=0), make("FADD R2, R0, R0", waits=(0,), stall=2)]
    latency = 3 + 2 + 26 - 6  # address unit, request, return: see rates.MEMORY_PATH
    assert iteration(chain, A100, warps=1) == pytest.approx(latency + 2, abs=2)


def test_a_barrier_waits_for_the_slowest_warp():
    """One warp in four sub-partitions each; a fifth shares the first: all five are as slow as those two."""
    loop = [make(HMMA)] * 16 + [make("BAR.SYNC.DEFER_BLOCKING 0x0", stall=5)]
    assert iteration(loop, A100, warps=5) == pytest.approx(2 * 128 + 20, rel=0.1)
    free = mean_iteration(simulate(plan_steps(loop[:-1], A100), 8, 5, [0.0], A100))
    assert iteration(loop, A100, warps=5) > free


def test_copies_are_waited_for():
    copy = make("LDGSTS.E.BYPASS.128 [R2], [R4.64]", read=0)
    loop = [copy, make("LDGDEPBAR", write=0), make("DEPBAR.LE SB0, 0x0", stall=2)]
    assert iteration(loop, A100, warps=1) > A100.l2_latency
    pipelined = [copy, make("LDGDEPBAR", write=0), make("DEPBAR.LE SB0, 0x1", stall=2)]
    assert iteration(pipelined, A100, warps=1) < iteration(loop, A100, warps=1)


def test_reductions_are_limited_by_their_bytes():
    """512 bytes a warp instruction, 24 B a clock: vectors of four move four times as much."""
    scalar = iteration([make("RED.E.ADD.F32.FTZ.RN.STRONG.GPU [R2.64], R4")] * 64, A100, trips=20)
    vector = iteration([make("REDG.E.ADD.F32x4.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R4")] * 16, A100, trips=20)
    assert scalar == pytest.approx(4 * 64 * 128 / 24, rel=0.1)
    assert vector == pytest.approx(scalar, rel=0.1)


def test_load_adds_up_each_pipe():
    load = sum_load(
        plan_steps([make(HMMA), make(LDSM_X4), make("MUFU.EX2 R0, R1"), make("FADD R0, R1, R2")], A100), A100
    )
    assert load == (8, 4, 2, 0, 8, 4, 0)
    assert load.on_sm(8)["tensor"] == 16 and load.on_sm(8)["shared"] == 32


def test_many_small_blocks_share_the_machine():
    """Sixteen blocks, apart by more than a short iteration: the tensor cores still set the pace."""
    time = simulated_block(Trace((), (make(HMMA),) * 4, ()), A100, warps=4, resident=16)
    assert time.cycles_per_iteration == pytest.approx(16 * 32, rel=0.02)
    assert mean_iteration([[0.0, 10.0, 20.0], [500.0, 510.0, 520.0]]) == 10
