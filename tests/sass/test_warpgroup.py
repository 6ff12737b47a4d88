"""What a warpgroup does one after the other is read from its instructions."""

import pytest
from flashsmith.sass.path import Trace
from flashsmith.sass.rates import pipe_cycles, pipe_rates
from flashsmith.sass.warpgroup import alone_cycles, products_left, read_course

from .boards import H100
from .listings import HMMA, make

QK = make("HGMMA.64x176x16.F32.BF16 R24, gdesc[UR8], R24")  # both operands in shared memory
QK_LAST = make("HGMMA.64x176x16.F32.BF16 R24, gdesc[UR8], R24, gsb0")
PV = make("HGMMA.64x128x16.F32.BF16 R112, R176, gdesc[UR12].tnspB, R112")  # P in registers
PV_LAST = make("HGMMA.64x128x16.F32.BF16 R112, R176, gdesc[UR12].tnspB, R112, gsb0")
EXP = make("MUFU.EX2 R0, R1")
LOOK = make("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2")
TURN, NEXT = make("BAR.SYNC.DEFER_BLOCKING R2, 0x100"), make("BAR.ARV R10, 0x100")
S_FLOPS, O_FLOPS = 2 * 16 * 176 * 128, 2 * 16 * 176 * 128  # of a warp, in a tile of 128x176, d = 128


def wait(left):
    return make(f"WARPGROUP.DEPBAR.LE gsb0, 0x{left}")


# A step of FlashAttention-3's forward, 128x176, d = 128: 90 exponentials under P V.
STEP = (LOOK, TURN, *[QK] * 7, QK_LAST, *[PV] * 10, PV_LAST, NEXT, wait(1), *[EXP] * 90, wait(0), make("MOV R0, R1"))
# The same with all of the softmax behind the wait for P V.
BARE = (LOOK, TURN, *[QK] * 7, QK_LAST, *[PV] * 10, PV_LAST, NEXT, wait(1), wait(0), *[EXP] * 90)


def test_a_step_is_cut_where_products_begin_and_are_waited_for():
    before, issuing, softmax, after = read_course(STEP, H100).stretches
    assert (before.load.issue, before.beside, before.waits) == (2, 0, False)
    assert (issuing.load.issue, issuing.beside, issuing.waits) == (21, S_FLOPS + O_FLOPS, True)
    assert (softmax.load.special, softmax.beside, softmax.waits) == (90 * 8, O_FLOPS, True)  # S is there, O is not
    assert (after.load.issue, after.beside, after.waits) == (1, 0, False)


def test_work_behind_the_wait_has_no_product_beside_it():
    stretches = read_course(BARE, H100).stretches
    assert [s.beside for s in stretches if s.load.special] == [0]


def test_sums_of_a_course():
    course = read_course(STEP, H100)
    assert course.tensor_flops == S_FLOPS + O_FLOPS
    assert course.operand_bytes == (8 * (64 + 176) + 11 * 128) * 32
    assert course.load.special == 720 and course.load.issue == len(STEP) and course.turns
    assert not read_course([i for i in STEP if i is not NEXT], H100).turns


def test_a_wait_for_what_has_been_waited_for_ends_nothing():
    course = read_course((QK_LAST, wait(0), EXP, wait(0), EXP), H100)
    assert [s.waits for s in course.stretches] == [True, False]
    assert course.stretches[1].load.issue == 3


@pytest.mark.parametrize(("text", "left"), [("WARPGROUP.DEPBAR.LE gsb0, 0x2", 2), ("WARPGROUP.ARRIVE", None)])
def test_products_that_may_be_in_flight(text, left):
    assert products_left(make(text)) == left


def test_a_warp_alone_waits_for_pipes_scoreboards_and_barriers():
    assert alone_cycles([make("FFMA R0, R1, R2, R3", stall=4)] * 3, H100) == 12
    exp = pipe_cycles("MUFU", pipe_rates(90))
    assert alone_cycles([EXP] * 10, H100) == 9 * exp + 1  # one pipe
    chain = [make("MUFU.EX2 R0, R1", write=0), make("FADD R2, R0, R1", waits=(0,))]
    assert alone_cycles(chain, H100) == exp + H100.path.special_latency + 1
    four = [make("STS.128 [R4], R8"), make("LDS R0, [R4]", write=1), make("FADD R2, R0, R1", waits=(1,))]
    # Four warps store 4 wavefronts each, and then load one, of which a request holds the pipe for two cycles.
    assert alone_cycles(four, H100) == 6 + 16 + 8 + H100.path.shared_latency + 0.5 + 1
    assert alone_cycles([TURN], H100) == 1 + H100.path.barrier_cycles and alone_cycles([NEXT], H100) == 1


def test_kind_of_loop():
    assert Trace((), (QK,), ()).uses_warpgroups
    assert not Trace((), (make(HMMA),), ()).uses_warpgroups
