"""Know the shapes of mma.sync and describe each as products in steps of k = 8, of tf32 k = 4."""

from __future__ import annotations

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
