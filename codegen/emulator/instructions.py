"""Read one PTX instruction: guard, opcode, modifiers and operands."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from .errors import PtxError

_GUARD = re.compile(r"@\s*(!?)\s*([%\w$]+)\s+")
_SPLIT = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,\[{]*")
_ADDRESS = re.compile(r"\[\s*([%\w$]+)\s*(?:\+\s*)?(-?\s*(?:0[xX][0-9a-fA-F]+|\d+))?\s*\]$")
_TENSOR = re.compile(r"\[\s*([%\w$]+)\s*,\s*\{([^}]*)\}\s*\]$")


@dataclass(frozen=True, slots=True)
class Address:
    """`[base+offset]`; the base is a register, a variable or a number."""

    base: str
    offset: int


@dataclass(frozen=True, slots=True)
class TensorAddress:
    """`[map, {corner}]`: the address of a tensor map and the coordinates of a box, innermost first."""

    map: Address
    corner: tuple[str, ...]


Operand: TypeAlias = "str | Address | TensorAddress | tuple[str, ...]"


class Opcode(NamedTuple):
    """`cvt.rn.f16x2.f32` as `base="cvt"` and its modifiers in order."""

    text: str
    base: str
    modifiers: tuple[str, ...]


@dataclass(slots=True, eq=False)
class Instruction:
    """One instruction. `index` is its position in the kernel, `line` its line in the PTX text."""

    index: int
    line: int
    text: str
    opcode: Opcode
    guard: str | None
    guard_negated: bool
    operands: tuple[Operand, ...]

    @property
    def base(self) -> str:
        """The opcode up to the first dot."""
        return self.opcode.base

    @property
    def modifiers(self) -> tuple[str, ...]:
        """What follows in the opcode."""
        return self.opcode.modifiers

    @property
    def type(self) -> str:
        """The last modifier, which is the type of most instructions."""
        return self.opcode.modifiers[-1] if self.opcode.modifiers else ""

    def __str__(self) -> str:
        return f"PTX line {self.line}: {' '.join(self.text.split())}"


@lru_cache(maxsize=4096)
def _read_opcode(text: str) -> Opcode:
    base, *modifiers = text.split(".")
    return Opcode(text, base, tuple(modifier for modifier in modifiers if modifier))


def read_instruction(text: str, line: int, index: int) -> Instruction:
    """Read the text between two semicolons."""
    guard, negated, rest = None, False, text
    if text[0] == "@":
        found = _GUARD.match(text)
        if found is None:
            raise PtxError(f"PTX line {line}: cannot read the guard of {text!r}")
        negated, guard, rest = bool(found.group(1)), found.group(2), text[found.end() :]
    words = rest.split(None, 1)
    opcode = _read_opcode(words[0])
    operands = _read_operands(words[1]) if len(words) > 1 else ()
    return Instruction(index, line, text, opcode, guard, negated, operands)


def _names(text: str) -> tuple[str, ...]:
    return tuple([name.strip() for name in text.split(",")])


def _read_operands(text: str) -> tuple[Operand, ...]:
    if "[" not in text and "{" not in text:
        return _names(text)
    operands: list[Operand] = []
    for item in _SPLIT.findall(text):
        if item[0] == "{":
            operands.append(_names(item[1:-1]))
        elif item[0] == "[":
            found = _ADDRESS.match(item)
            tensor = _TENSOR.match(item) if found is None else None
            if tensor is not None:
                operands.append(TensorAddress(Address(tensor.group(1), 0), _names(tensor.group(2))))
                continue
            if found is None:
                operands.append(item)  # a form that only its own instruction understands
                continue
            operands.append(Address(found.group(1), int((found.group(2) or "0").replace(" ", ""), 0)))
        else:
            operands.append(item.strip())
    return tuple(operands)
