"""Hopper's asynchronous tensor instructions: an estimate, not a simulation."""

import pytest
from flashsmith.sass.path import Trace
from flashsmith.sass.warpgroup import warpgroup_block

from .boards import H100
from .listings import HMMA, make

QK = make("HGMMA.64x176x16.F32.BF16 R24, gdesc[UR8], R24")  # both operands in shared memory
PV = make("HGMMA.64x128x16.F32.BF16 R112, R176, gdesc[UR12].tnspB, R112")  # P in registers
EXP = make("MUFU.EX2 R0, R1")
WAIT = make("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2")


def flash_attention_3(resident=1, specialised=True):
    """128x176, d = 128: two consumer warpgroups and a producer; 90 exponentials a thread and iteration."""
    trace = Trace((make("MOV R0, R1"),), (WAIT, *[QK] * 8, *[EXP] * 90, *[PV] * 11), (make("EXIT"),))
    return warpgroup_block(trace, H100, 12, resident, specialised)


def test_an_iteration_is_tensor_time_and_most_of_the_exponentials():
    block = flash_attention_3()
    assert block.loop_flops == 4 * 128 * 176 * 128
    assert block.cycles_per_iteration == pytest.approx(2816 + 0.9 * 1440)
    assert block.pipes["shared"] * block.cycles_per_iteration == pytest.approx(2 * (8 * 240 + 11 * 128) * 32 / 128)


def test_published_forward_figure():
    """FlashAttention-3 on H100, d = 128, N = 16k: 648 TFLOP/s."""
    block = flash_attention_3()
    tflops = block.loop_flops / block.cycles_per_iteration * H100.sms * H100.clock_ghz / 1e3
    assert tflops == pytest.approx(648, rel=0.03)


def test_blocks_of_one_sm_take_turns():
    assert flash_attention_3(2).cycles_per_iteration == pytest.approx(2 * flash_attention_3(1).cycles_per_iteration)


def test_kind_of_loop():
    assert Trace((), (QK,), ()).uses_warpgroups
    assert not Trace((), (make(HMMA),), ()).uses_warpgroups
