"""Opcodes and architectures that no table knows are errors that name them."""

import pytest
from flashsmith.sass import Control, Instruction, UnknownArchitecture, UnknownOpcode
from flashsmith.sass.plan import instruction_cost, plan_steps, tensor_cycles
from flashsmith.sass.rates import pipe_rates
from flashsmith.sass.tensor import shared_operand_bytes, tensor_flops

from .boards import A100, H100
from .listings import make


@pytest.mark.parametrize(
    "text", ["FROB.X R0, R1", "SYNCS.PHASECHK.TRANS64 P0, [UR4], R2", "HMMA.SP.16832.F32 R0, R1, R2, R3"]
)
def test_unknown_opcode_is_named(text):
    with pytest.raises(UnknownOpcode, match=text.split(".")[0]):
        plan_steps([make(text)], A100)


def test_unknown_architecture_is_named():
    with pytest.raises(UnknownArchitecture, match="sm_70"):
        pipe_rates(70)


@pytest.mark.parametrize(
    ("opcode", "flops"),
    [
        ("HMMA.16816.F32.BF16", 4096),
        ("HMMA.1688.F32", 2048),
        ("QMMA.16832.F32.E4M3.E4M3", 8192),
        ("HGMMA.64x176x16.F32.BF16", 2 * 64 * 176 * 16 // 4),
        ("FFMA", 0),
    ],
)
def test_flops_come_from_the_shape(opcode, flops):
    assert tensor_flops(opcode) == flops


def test_tensor_cycles_follow_the_board():
    assert tensor_cycles("HMMA.16816.F32.BF16", A100) == 8
    assert tensor_cycles("HMMA.16816.F32.BF16", H100) == pytest.approx(6)
    assert tensor_cycles("HMMA.1688.F32.TF32", A100) == 8
    assert tensor_cycles("IMMA.16832.S8.S8", A100) == 8


def test_warpgroup_operands_in_shared_memory():
    both, b_only = (
        "HGMMA.64x176x16.F32.BF16 R24, gdesc[UR8], R24",
        "HGMMA.64x128x16.F32.BF16 R112, R176, gdesc[UR12].tnspB, R112",
    )
    assert shared_operand_bytes(both.split()[0], both) == (64 + 176) * 32
    assert shared_operand_bytes(b_only.split()[0], b_only) == 128 * 32


def test_guards_count_as_executed_but_for_the_padding():
    never = Instruction(0, "!PT", "LDS", "LDS RZ, [RZ]", Control(1, False, 7, 7, (), 0))
    assert instruction_cost(never, A100).held == 0
    assert instruction_cost(never._replace(guard="!P0"), A100).held == 2
