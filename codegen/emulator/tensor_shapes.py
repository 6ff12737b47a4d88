"""Know the shapes of mma.sync, described as products in steps of k = 8 (of tf32 k = 4), and those of wgmma."""

from __future__ import annotations

import re
from typing import NamedTuple

from .errors import UnknownInstruction
from .instructions import Instruction, Operand


class Product(NamedTuple):
    """One mma.sync. A lists two registers (rows 0-7 and 8-15) for each step of k, B one register.

    `kind` is (type of A and B, type of C and D).
    """

    A: tuple[str, ...]
    B: tuple[str, ...]
    C: tuple[str, ...]
    D: tuple[str, ...]
    kind: tuple[str, str]
    flops: int


def _registers(operand: Operand) -> tuple[str, ...]:
    return operand if isinstance(operand, tuple) else (str(operand),)


_STEPS = {"m16n8k16": 2, "m16n8k8": 1}
_TF32_STEPS = {"m16n8k8": 2, "m16n8k4": 1}


def product_of(instruction: Instruction) -> Product:
    """The product that an `mma.sync` computes; an error for shapes and types that are not implemented."""
    modifiers = instruction.modifiers
    shape = next((m for m in modifiers if m.startswith("m16n8k")), "")
    types = modifiers[-4:]
    tf32 = types[1:2] == ("tf32",)
    steps = (_TF32_STEPS if tf32 else _STEPS).get(shape, 0)
    known = (
        steps
        and modifiers[:2] == ("sync", "aligned")
        and modifiers[3:5] == ("row", "col")
        and len(modifiers) == 9
        and types[1] == types[2]
        and types[0] == types[3]
        and (types[0], types[1]) in (("f32", "f16"), ("f32", "bf16"), ("f32", "tf32"), ("f16", "f16"))
    )
    if not known or len(instruction.operands) != 4:
        raise UnknownInstruction(f"{instruction}: this form of mma is not implemented")
    D, A, B, C = [_registers(operand) for operand in instruction.operands]
    sums = 4 if types[0] == "f32" else 2
    if (len(A), len(B), len(C), len(D)) != (2 * steps, steps, sums, sums):
        raise UnknownInstruction(f"{instruction}: wrong number of registers in a fragment")
    return Product(A, B, C, D, (types[1], types[0]), 2 * 16 * 8 * (4 if tf32 else 8) * steps)


class GroupProduct(NamedTuple):
    """One wgmma.mma_async: D [64, N] in N / 2 registers, A [64, 16] in four registers or behind a descriptor.

    `transposed` says of A and of B whether they lie MN-major in shared memory; `kind` is their type.
    """

    D: tuple[str, ...]
    A: tuple[str, ...]
    a_descriptor: str
    b_descriptor: str
    adds: str
    transposed: tuple[bool, bool]
    kind: str
    flops: int


def group_product_of(instruction: Instruction) -> GroupProduct:
    """The product that a `wgmma.mma_async` computes; an error for shapes and types that are not implemented."""
    modifiers, operands = instruction.modifiers, instruction.operands
    shape = re.fullmatch(r"m64n(\d+)k16", modifiers[3] if len(modifiers) == 7 else "")
    columns = int(shape.group(1)) if shape else 0
    kind = modifiers[-1]
    known = modifiers[4:5] == ("f32",) and modifiers[5:6] == (kind,) and kind in ("f16", "bf16")
    if not known or columns % 8 or not 8 <= columns <= 256 or len(operands) < 6:
        raise UnknownInstruction(f"{instruction}: this form of wgmma is not implemented")
    D, a = _registers(operands[0]), operands[1]
    A = a if isinstance(a, tuple) else ()
    flags = [str(operand) for operand in operands[4:]]  # signs of A and of B, then a layout for each that is in memory
    if len(D) != columns // 2 or len(A) not in (0, 4) or len(flags) != (3 if A else 4):
        raise UnknownInstruction(f"{instruction}: wrong number of operands")
    if flags[:2] != ["1", "1"]:
        raise UnknownInstruction(f"{instruction}: negated operands are not implemented")
    transposed = (not A and flags[2] == "1", flags[-1] == "1")
    descriptors = "" if A else str(a), str(operands[2])
    return GroupProduct(D, A, *descriptors, str(operands[3]), transposed, kind, 2 * 64 * columns * 16)
