"""Opcodes and architectures that no table knows are errors that name them; every constant has a source."""

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest
from flashsmith.sass import (
    Control,
    Instruction,
    UnknownArchitecture,
    UnknownOpcode,
    board,
    issue,
    warpgroup,
    warpgroup_time,
)
from flashsmith.sass.plan import instruction_cost, plan_steps, tensor_cycles
from flashsmith.sass.rates import MemoryPath, pipe_rates
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


# ---- where the constants come from -------------------------------------------------------------------------------

SOURCES = re.compile(r"\[[PLD?]\]|\bfitted\b")
CONSTANT = re.compile(r"^ *(\w+)(?:: \w+)? = (?:[-\d.]+|False|True)(?: +# (.*))?$", re.M)
CYCLES = ("QUEUE_TO_PIPE", "OPERANDS_READ", "ARITHMETIC_READ", "STORED", "QUEUED", "HBM_SHARE")
OF_WARPGROUPS = (
    "CONCURRENCY",
    "L2_SHARE",
    "PRODUCT_LATENCY",
    "LOADS",
    "L2_PORT",
    "SHARED_BYTES_PER_CLOCK",
    "ISSUED",
    "TO_SHARED",
)
DOCUMENT = Path(__file__).parents[2] / "docs" / "model.md"


def remarks():
    """What is said beside each physical constant of the model: fields of MemoryPath, and those of single modules."""
    modules = (issue, board, warpgroup, warpgroup_time)
    texts = [inspect.getsource(MemoryPath), *(inspect.getsource(module) for module in modules)]
    found = {name: remark for text in texts for name, remark in CONSTANT.findall(text)}
    wanted = [*(field.name for field in fields(MemoryPath)), *CYCLES, *OF_WARPGROUPS]
    return {name: found[name] for name in wanted}


def test_every_constant_names_its_source():
    without = [name for name, remark in remarks().items() if not SOURCES.search(remark)]
    assert not without


def test_the_fitted_constants_are_those_of_the_document():
    """Four in this package and the A100's L2 rate in the table of GPUs; and two of kernels with warpgroups."""
    fitted = {name for name, remark in remarks().items() if re.search(r"\bfitted\b", remark)}
    before, found, of_warpgroups = DOCUMENT.read_text().partition("## Kernels of warpgroups\n")
    assert found
    for text, wanted, count in (
        (before, (fitted - set(OF_WARPGROUPS)) | {"l2_bytes_clk"}, "Five were chosen"),
        (of_warpgroups, fitted & set(OF_WARPGROUPS), "two constants are fitted"),
    ):
        table = re.findall(r"^\| `(\w+)`[^|]*\| `[\w/.]+` \|", text, re.M)
        assert set(table) == wanted and len(table) == len(wanted)
        assert count in text and len(wanted) == {"Five": 5, "two": 2}[count.split()[0]]
