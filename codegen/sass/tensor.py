"""Say how many FLOPs a tensor core instruction does, from the shape in its name."""

import re

from .errors import UnknownOpcode

WARP_TENSOR = frozenset({"HMMA", "IMMA", "QMMA"})  # one warp, synchronous: stall counts and scoreboards time it
WARPGROUP_TENSOR = frozenset({"HGMMA", "IGMMA", "QGMMA"})  # four warps, asynchronous (sm_90a)
TENSOR = WARP_TENSOR | WARPGROUP_TENSOR | {"BMMA", "DMMA", "OMMA", "UTCHMMA", "UTCQMMA", "UTCIMMA", "UTCOMMA"}

# Multiply-adds of a warp instruction by the shape suffix m,n,k run together: 16816 is m16 n8 k16.
WARP_SHAPES = {"1688": 16 * 8 * 8, "16816": 16 * 8 * 16, "16832": 16 * 8 * 32, "16864": 16 * 8 * 64}
WARPGROUP_SHAPE = re.compile(r"\.(\d+)x(\d+)x(\d+)")
WARPS_OF_A_GROUP = 4
DESCRIPTOR = "gdesc"  # a shared-memory operand; the form with A in registers names a register before it
K_BYTES = 32  # of one row of A or B that one warpgroup instruction reads: 16 elements of 16 bits, 32 of 8


def tensor_flops(opcode: str) -> int:
    """FLOPs (two a multiply-add) that one warp's share of the instruction does; 0 for everything else.

    >>> tensor_flops("HMMA.16816.F32.BF16"), tensor_flops("FFMA")
    (4096, 0)
    """
    base, *suffixes = opcode.split(".")
    if base not in TENSOR:
        return 0
    if base in WARP_TENSOR and "SP" not in suffixes:
        for suffix in suffixes:
            if suffix in WARP_SHAPES:
                return 2 * WARP_SHAPES[suffix]
    shape = WARPGROUP_SHAPE.search(opcode)
    if base in WARPGROUP_TENSOR and shape and "SP" not in suffixes:
        m, n, k = map(int, shape.groups())
        return 2 * m * n * k // WARPS_OF_A_GROUP
    raise UnknownOpcode(f"{opcode}: no FLOP count for this tensor instruction; add its shape to sass/tensor.py")


def shared_operand_bytes(opcode: str, text: str) -> int:
    """Bytes that a warpgroup instruction reads from shared memory: B, and A unless it is in registers."""
    shape = WARPGROUP_SHAPE.search(opcode)
    if shape is None:
        return 0
    m, n, _ = map(int, shape.groups())
    before_descriptor = text.partition(DESCRIPTOR)[0].split(",")  # "HGMMA.64x176x16.F32.BF16 R24", " R4", " " or " "
    a_in_registers = any(operand.strip().startswith("R") for operand in before_descriptor[1:])
    return (n if a_in_registers else m + n) * K_BYTES
