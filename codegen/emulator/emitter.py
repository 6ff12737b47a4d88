"""Write the Python source of one basic block: names for registers, masks for divergent lanes, merged results."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import NamedTuple, NoReturn

import numpy as np

from .errors import PtxError, UnknownInstruction
from .immediates import immediate_value, is_immediate
from .instructions import Address, Instruction, Operand
from .special import SPECIAL
from .types import CODE, SIZE, UNSIGNED


class Binding(NamedTuple):
    """What a name in generated code stands for: a view of a register's array, or a special register.

    `key` is the name of a special register or one that outlives the block, or the number of the array that registers
    of the block share; `width` is its bytes, 0 for a special register; `code` is how the code sees it.
    """

    key: str | int
    width: int
    code: str


@dataclass(frozen=True, slots=True)
class Lowered:
    """Generated code of one block in one variant, with the names that must be bound before it can run."""

    source: str
    code: CodeType
    bindings: dict[str, Binding]
    constants: dict[str, np.ndarray]


class Symbols(NamedTuple):
    """What a name in the text can mean besides a register."""

    registers: dict[str, str]
    constants: dict[str, int]  # registers with one definition, a mov of a number
    shared: dict[str, int]
    local: dict[str, int]
    params: dict[str, int]
    globals: dict[str, int]
    slots: dict[str, int]  # of registers that live within the block
    read: Collection[str]  # registers that some instruction reads


class Emitter:
    """Collects lines; knows how to name an operand and how to write a result under a mask.

    Two variants exist. The plain one serves a contiguous range of threads that are all active. The masked one gets
    the active lanes as `M` and keeps the other lanes of every register that outlives the block.
    """

    def __init__(self, symbols: Symbols, masked: bool) -> None:
        self.symbols = symbols
        self.masked = masked
        self.lines: list[str] = []
        self.bindings: dict[str, Binding] = {}
        self.constants: dict[str, np.ndarray] = {}
        self._mask: str | None = None
        self._uses: set[str] = set()

    # ---- lines and masks

    def emit(self, line: str) -> None:
        """Add a line."""
        self.lines.append(line)

    def begin(self, instruction: Instruction) -> None:
        """Compute the mask of a guarded instruction."""
        guard = instruction.guard
        if guard is None:
            self._mask = "M" if self.masked else None
            return
        self._mask = "p"
        value = self.source(guard, "pred")
        self.emit(f"p = logical_not({value})" if instruction.guard_negated else f"p = {value}.copy()")
        if self.masked:
            self.emit("logical_and(p, M, p)")

    def begin_unguarded(self) -> None:
        """Start something that is not one instruction: all active lanes take part."""
        self._mask = "M" if self.masked else None

    @property
    def lanes(self) -> str:
        """Expression for the indices of the active lanes, `None` if all are active."""
        if self._mask == "M":
            self._uses.add("L")
            return "L"
        return "None" if self._mask is None else "flatnonzero(p)"

    @property
    def mask(self) -> str:
        """Expression for the active lanes as booleans, `None` if all are active."""
        return "None" if self._mask is None else self._mask

    def write(self, name: str, type_name: str, template: str) -> None:
        """Write a result: `template` computes it into `{d}`, an array of the type's NumPy code."""
        code = CODE[type_name]
        if name == "_":
            self.emit(f"x = empty(n, {code})")
            self.emit(template.format(d="x"))
            return
        target = self.register(name, code)
        private = self._mask == "M" and name in self.symbols.slots
        if self._mask is None or private:
            self.emit(template.format(d=target))
            return
        self.emit(f"x = empty(n, {code})")
        self.emit(template.format(d="x"))
        if self._mask == "M" and SIZE[type_name] in (4, 8):
            self._uses.add(f"M{SIZE[type_name]}")
            self.emit(f"merge{SIZE[type_name]}(x, {target}, M{SIZE[type_name]})")
        else:
            self.emit(f"putmask({target}, {self._mask}, x)")

    def source_of(self) -> str:
        """The whole function."""
        head = ["def block(M):" if self.masked else "def block():"]
        if "L" in self._uses:
            head.append("    L = flatnonzero(M)")
        for width in (4, 8):
            if f"M{width}" in self._uses:
                head.append(f"    M{width} = widened(M, u{width})")
        body = ["    " + line for text in self.lines for line in text.split("\n")]
        return "\n".join(head + (body or ["    pass"])) + "\n"

    # ---- operands

    def register(self, name: str, code: str) -> str:
        """Name of the view of a register that a result is written to."""
        type_name = self.symbols.registers.get(name)
        if type_name is None:
            raise PtxError(f"{name} is not a declared register")
        if SIZE[type_name] != int(code[1]):
            raise PtxError(f"register {name} has type .{type_name}, which does not hold {8 * int(code[1])} bits")
        return self._bind(name, code, False)

    def _bind(self, name: str, code: str, narrow: bool) -> str:
        python = f"{re.sub(r'[%$.]', '_', name).lstrip('_')}_{'n' if narrow else ''}{code}"
        if not name.startswith("%"):
            python = "r_" + python
        type_name = self.symbols.registers.get(name)
        width = SIZE[type_name] if type_name else 0
        binding = Binding(self.symbols.slots.get(name, name), width, code)
        while self.bindings.setdefault(python, binding) != binding:
            python += "_"  # %a_1, and %a of scope 1
        return python

    def source(self, operand: Operand, type_name: str) -> str:
        """Expression for a source operand seen as a type: a register view, a special register or a constant."""
        if not isinstance(operand, str):
            raise PtxError(f"expected a single operand, found {operand}")
        code = CODE[type_name]
        registers = self.symbols.registers
        if operand in registers:
            have, want = SIZE[registers[operand]], int(code[1])
            if have < want:
                raise PtxError(f"register {operand} of type .{registers[operand]} is read as .{type_name}")
            return self._bind(operand, code, have > want)
        if operand in SPECIAL:
            return self._bind(operand, code, False)
        if operand.startswith("%"):
            raise UnknownInstruction(f"{operand} is neither a declared register nor a special one that is implemented")
        if type_name == "pred" and operand.startswith("!"):
            return f"logical_not({self.source(operand[1:], 'pred')})"
        return self.constant(self._constant_bits(operand, type_name), type_name)

    def _constant_bits(self, operand: str, type_name: str) -> int:
        symbols = self.symbols
        for table in (symbols.shared, symbols.local, symbols.params, symbols.globals):
            if operand in table:
                return table[operand]
        value = immediate_value(operand, type_name)
        if value is None:
            raise PtxError(f"{operand} is neither a register, a variable nor a number")
        return value

    def constant(self, bits: int, type_name: str) -> str:
        """Name of a zero-dimensional array that holds these bits as a type."""
        code, size = CODE[type_name], SIZE[type_name]
        bits &= (1 << 8 * size) - 1
        name = f"K{bits:x}_{code}"
        if name not in self.constants:
            value = np.array(bits, f"u{size}")
            self.constants[name] = value.astype(bool) if code == "b1" else value.view(code)
        return name

    def known(self, operand: Operand) -> int | None:
        """The value of an operand that is a number or a register that only ever holds one."""
        if not isinstance(operand, str):
            return None
        if operand in self.symbols.constants:
            return self.symbols.constants[operand]
        return immediate_value(operand, "s64") if is_immediate(operand) else None

    def address(self, operand: Operand) -> str:
        """Expression for an address as unsigned integers; zero-dimensional when it is the same for all threads."""
        if not isinstance(operand, Address):
            raise PtxError(f"expected an address, found {operand}")
        base, offset = operand.base, operand.offset
        if base in self.symbols.registers:
            type_name = UNSIGNED[SIZE[self.symbols.registers[base]]]
            value = self.source(base, type_name)
            return f"add({value}, {self.constant(offset, type_name)})" if offset else value
        return self.constant(self._constant_bits(base, "u64") + offset, "u64")

    # ---- checks

    def flags(self, instruction: Instruction, allowed: Collection[str], types: int = 1) -> Sequence[str]:
        """Modifiers before the trailing types; an error if one is not among the allowed ones."""
        modifiers = instruction.modifiers[: len(instruction.modifiers) - types]
        for modifier in modifiers:
            if modifier not in allowed:
                self.unknown(instruction, f"modifier .{modifier}")
        for type_name in instruction.modifiers[len(modifiers) :]:
            if type_name not in CODE:
                self.unknown(instruction, f"type .{type_name}")
        return modifiers

    def unknown(self, instruction: Instruction, what: str) -> NoReturn:
        """Refuse an instruction."""
        raise UnknownInstruction(f"{instruction}: {what} of {instruction.opcode.text} is not implemented")
