"""Emit C++ statements that compute a score modification and its derivatives for one score."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from .expression import Expression
from .lower import Graph, Operation
from .parse import MAX_FLOAT, MIN_FLOAT
from .tree import COMPARISONS, FUNCTIONS

_LEVEL = {"?": 1, "||": 2, "&&": 3, "==": 4, "!=": 4, "<": 5, "<=": 5, ">": 5, ">=": 5, "+": 7, "-": 7, "*": 8, "/": 8}
_SHIFT, _UNARY, _ATOM = 6, 9, 10
_LEAVES = ("number", "name")
_LONG = 70  # characters of an expression that gets a name of its own

# what helper a function of floats calls, and what a function of ints is
_FLOAT_CALL = {name: f"score_mod::{name}" for name in FUNCTIONS} | {
    "abs": "fabsf", "floor": "floorf", "log": "logf", "min": "score_mod::least", "max": "score_mod::greatest",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """C++ names, or other primary expressions, that hold what the formula speaks of."""

    score: str = "s"  # float, in natural units
    b: str = "b"  # int, as all below but the two floats
    h: str = "h"
    i: str = "i"
    j: str = "j"
    i_float: str = "i_float"  # float copies of i and j
    j_float: str = "j_float"
    Nq: str = "Nq"
    Nk: str = "Nk"
    prefix: str = "mod"  # of the names that statements define


@dataclass(frozen=True, slots=True)
class GradientCode:
    """The gradient of one entry: add dS * derivative at `score_mod::place(TABLE, index...)`."""

    tensor: str
    index: tuple[str, ...]  # int expressions
    derivative: str  # a float expression


@dataclass(frozen=True, slots=True)
class Code:
    """Statements, and expressions that hold the results after them."""

    uniform: tuple[str, ...]  # once, where b, h, Nq and Nk are known: before the loop over scores
    lines: tuple[str, ...]  # for each score
    value: str  # a float expression, as are the others; empty if it was not asked for
    slope: str
    gradients: tuple[GradientCode, ...]
    functions: tuple[str, ...]  # what they call, for device_functions


def table_name(tensor: str) -> str:
    """The C++ name of a tensor's Table: prefixed, so that it meets no keyword and no name of a kernel."""
    return f"table_{tensor}"


def emit(
    expression: Expression,
    names: Names | None = None,
    *,
    value: bool = True,
    slope: bool = False,
    gradients: bool | Collection[str] = False,
) -> Code:
    """C++ for the value, d / d score and d / d entries of all tensors or those named; what they share is computed once.

    >>> from flashsmith.score_mod import Names, emit, parse
    >>> code = emit(parse("score - slope[h] * abs(i + Nk - Nq - j)"), Names(score="S[n]"))
    >>> print("\\n".join((*code.uniform, *code.lines, f"S[n] = {code.value};")))
    const float mod0 = score_mod::read(table_slope, h);
    const float mod1 = static_cast<float>(Nk - Nq);
    S[n] = S[n] - mod0 * fabsf(i_float + mod1 - j_float);
    """
    graph = Graph()
    value_root = [graph.real(expression.tree)] if value else []
    slope_root = [graph.real(expression.slope.tree)] if slope else []
    wanted = expression.tensors if gradients is True else gradients or ()
    entries = [entry for entry in expression.gradients if entry.tensor in wanted] if wanted else []
    derivatives = [graph.real(entry.derivative.tree) for entry in entries]
    indexes = [[graph.whole(index.tree) for index in entry.index] for entry in entries]
    writer = _Writer(graph, names or Names())
    writer.write([*value_root, *slope_root, *derivatives, *(number for index in indexes for number in index)])
    if entries:
        writer.called.add("place")
    return Code(
        uniform=tuple(writer.uniform),
        lines=tuple(writer.lines),
        value=writer.text(value_root[0]) if value else "",
        slope=writer.text(slope_root[0]) if slope else "",
        gradients=tuple(
            GradientCode(entry.tensor, tuple(map(writer.text, index)), writer.text(derivative))
            for entry, index, derivative in zip(entries, indexes, derivatives, strict=True)
        ),
        functions=tuple(sorted(writer.called)),
    )


class _Writer:
    """Spells the operations of a graph; those that are used twice, or outside a loop, get a name."""

    def __init__(self, graph: Graph, names: Names) -> None:
        self.graph, self.names = graph, names
        self.spelt: dict[int, tuple[str, int]] = {}
        self.uniform: list[str] = []
        self.lines: list[str] = []
        self.called: set[str] = set()

    def text(self, number: int) -> str:
        """The expression that holds an operation's result."""
        return self.spelt[number][0]

    def write(self, roots: Sequence[int]) -> None:
        operations, uniform = self.graph.operations, self.graph.uniform
        uses, leaves_loop = Counter(roots), {root for root in roots if uniform[root]}
        needed, pending = set(roots), list(roots)
        while pending:
            number = pending.pop()
            for operand in operations[number].operands:
                uses[operand] += 1
                if uniform[operand] and not uniform[number]:
                    leaves_loop.add(operand)
                if operand not in needed:
                    needed.add(operand)
                    pending.append(operand)
        for number in sorted(needed, key=lambda number: (not uniform[number], number)):
            operation = operations[number]
            text, level = self.spell(operation)
            leaf = operation.op in _LEAVES or (operation.op == "real_name" and not uniform[number])
            if not leaf and (uses[number] > 1 or number in leaves_loop or len(text) > _LONG):
                name = f"{self.names.prefix}{len(self.uniform) + len(self.lines)}"
                (self.uniform if uniform[number] else self.lines).append(f"const {operation.kind} {name} = {text};")
                text, level = name, _ATOM
            self.spelt[number] = text, level

    def spell(self, operation: Operation) -> tuple[str, int]:
        """The C++ of an operation, and how tightly its outermost operator binds."""
        op, operands = operation.op, operation.operands
        if op == "number":
            return self.literal(operation)
        if op == "name":
            return str(getattr(self.names, str(operation.what))), _ATOM
        if op == "real_name":
            return self.real_name(str(operation.what)), _ATOM
        if op == "rcp":
            return f"{self.helper('rcp')}({self.text(operands[0])})", _ATOM
        if op == "read":
            index = "".join(f", {self.text(operand)}" for operand in operands)
            return f"{self.helper('read')}({table_name(str(operation.what))}{index})", _ATOM
        if op == "float":
            return f"static_cast<float>({self.text(operands[0])})", _ATOM
        if op == "int":
            return f"{self.helper('floor_int')}({self.text(operands[0])})", _ATOM
        if op in ("neg", "!"):
            return f"{'-' if op == 'neg' else '!'}{self.within(operands[0], _ATOM)}", _UNARY
        if op == "?":
            condition, then, other = operands
            return f"{self.within(condition, 2)} ? {self.within(then, 2)} : {self.within(other, 1)}", _LEVEL[op]
        if op in ("//", "%"):
            return self.division(operation)
        if op in FUNCTIONS:
            return self.function(operation), _ATOM
        left, right = operands
        if op == "/":
            return f"{self.helper('divide')}({self.text(left)}, {self.text(right)})", _ATOM
        level = _LEVEL[op]
        lowest = _SHIFT + 1 if op in COMPARISONS else level
        return f"{self.within(left, lowest)} {op} {self.within(right, max(lowest, level + 1))}", level

    def within(self, number: int, level: int) -> str:
        text, own = self.spelt[number]
        return text if own >= level else f"({text})"

    def helper(self, name: str) -> str:
        self.called.add(name)
        return f"score_mod::{name}"

    def real_name(self, name: str) -> str:
        if name == "score":
            return self.names.score
        if name in ("i", "j"):
            return self.names.i_float if name == "i" else self.names.j_float
        return f"static_cast<float>({getattr(self.names, name)})"

    def literal(self, operation: Operation) -> tuple[str, int]:
        value = operation.what
        if operation.kind == "int":
            return str(value), _ATOM if int(value) >= 0 else _UNARY
        size = abs(float(value))
        normal = 0.0 if size < MIN_FLOAT else size
        text = f"{self.helper('infinity')}()" if size > MAX_FLOAT else _float_text(normal)
        return (f"-{text}", _UNARY) if float(value) < 0 else (text, _ATOM)

    def division(self, operation: Operation) -> tuple[str, int]:
        """Rounded down, as Python does; by a power of two with one instruction."""
        left, right = operation.operands
        by = self.graph.operations[right]
        divisor = int(by.what) if by.op == "number" else 0
        if divisor and not divisor & (divisor - 1):
            inner = self.within(left, _ATOM)
            if operation.op == "//":
                return f"{inner} >> {divisor.bit_length() - 1}", _SHIFT
            return f"({inner} & {divisor - 1})", _ATOM
        helper = self.helper("floor_div" if operation.op == "//" else "floor_mod")
        return f"{helper}({self.text(left)}, {self.text(right)})", _ATOM

    def function(self, operation: Operation) -> str:
        op, arguments = operation.op, ", ".join(map(self.text, operation.operands))
        if operation.kind == "int":
            if op == "sign":
                inner = self.within(operation.operands[0], _SHIFT + 1)
                return f"(({inner} > 0) - ({inner} < 0))"
            return f"{op}({arguments})"
        call = _FLOAT_CALL[op]
        if call.startswith("score_mod::"):
            self.helper(call.removeprefix("score_mod::"))
        return f"{call}({arguments})"


def _float_text(value: float) -> str:
    """The shortest literal that is this float32: 30.f, 0.1f, 1e-10f."""
    text = str(np.float32(value))
    if "e" in text:
        return f"{text}f"
    return f"{text.removesuffix('.0')}.f" if text.endswith(".0") else f"{text}f"
