"""Lower trees to a graph of C++ operations in which nothing is computed twice.

Each operation is `float`, `int` or `bool`. An integer that is needed as a number is computed in float, from the float
copies of i and j: converting an int in the inner loop would cost a slow pipe. Sums and differences of names are exact
there while they stay below 2^24. Ints remain where an index, // or % needs them, and in comparisons of what float might
round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from .tree import COMPARISONS, INTEGERS, Name, Node, Number, Op, Read, Type, names_in

Kind: TypeAlias = Literal["float", "int", "bool"]

UNIFORM = ("b", "h", "Nq", "Nk")
"""Names that have one value in all of a query head's rows and keys."""

_EXACT = 2**22  # a literal in a comparison in float; with lengths up to as much, four terms stay below 2^24
_SMALL_FACTOR = 64  # of a length in int arithmetic: the product stays below 2^31 for lengths up to 2^24


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation on operands that come before it in the graph.

    `op`: number, name (an int), real_name (its float copy, or the score), read, float (of an int), int (floor of a
    float), neg, + - * / // %, rcp, a comparison, && || !, ? (a choice), or a function. `what`: the literal, the name or
    the tensor.
    """

    op: str
    operands: tuple[int, ...]
    kind: Kind
    what: str | int | float = ""


@dataclass(slots=True)
class Graph:
    """Operations by number; equal ones are one."""

    operations: list[Operation] = field(default_factory=list)
    uniform: list[bool] = field(default_factory=list)  # depends on nothing but UNIFORM
    _numbers: dict[Operation, int] = field(default_factory=dict)
    _lowered: dict[tuple[Node, str], int] = field(default_factory=dict)

    # ---- trees

    def real(self, node: Node) -> int:
        """The node as a float."""
        key = (node, "float")
        if key not in self._lowered:
            if node.type is Type.INT and not isinstance(node, Number):
                self._lowered[key] = self._sum_of_integers(node)
            else:
                self._lowered[key] = self._real(node)
        return self._lowered[key]

    def whole(self, node: Node) -> int:
        """An integer node as an int."""
        key = (node, "int")
        if key not in self._lowered:
            self._lowered[key] = self._whole(node)
        return self._lowered[key]

    def truth(self, node: Node) -> int:
        """A condition."""
        assert isinstance(node, Op)
        if node.op == "not":
            return self._add("!", self.truth(node.args[0]), kind="bool")
        left, right = node.args
        if node.op in COMPARISONS:
            whole = left.type is right.type is Type.INT and not _compares_in_float(node)
            lower = self.whole if whole else self.real
            return self._add(node.op, lower(left), lower(right), kind="bool")
        return self._add("&&" if node.op == "and" else "||", self.truth(left), self.truth(right), kind="bool")

    def _real(self, node: Node) -> int:
        if isinstance(node, Number):
            return self._number(float(node.value))
        if isinstance(node, Name):  # the score; integers are sums
            return self._add("real_name", kind="float", what=node.name)
        if isinstance(node, Read):
            return self._read(node)
        op = node.op
        if op == "**":
            base, power = node.args
            assert isinstance(power, Number)
            return self._power(self.real(base), power.value)
        if op == "if":
            condition, then, other = node.args
            return self._choose(self.truth(condition), self.real(then), self.real(other))
        operands = [self.real(arg) for arg in node.args]
        values = [self._literal(operand) for operand in operands]
        if op == "/" and values[1]:
            return self._times(operands[0], self._number(1 / values[1]))
        if op == "/" and (values[0] == 1 or (self.uniform[operands[1]] and not self.uniform[operands[0]])):
            return self._times(operands[0], self._add("rcp", operands[1], kind="float"))
        if op == "*":
            return self._times(*operands)
        if op in ("+", "-", "neg") and None not in values:
            return self._number(_folded(op, [value for value in values if value is not None]))
        if op in ("+", "-") and values[1] == 0:
            return operands[0]
        if op == "+" and values[0] == 0:
            return operands[1]
        if op in ("+", "-") and values[1] is not None and values[1] < 0:
            op, operands[1] = "-" if op == "+" else "+", self._number(-values[1])
        return self._add(op, *operands, kind="float")

    def _times(self, left: int, right: int) -> int:
        a, b = self._literal(left), self._literal(right)
        if a is not None and b is not None:
            return self._number(a * b)
        if a == 1:
            return right
        return left if b == 1 else self._add("*", left, right, kind="float")

    def _power(self, base: int, power: float) -> int:
        """Products of squares; half a power is a root."""
        whole, half = divmod(abs(power), 1)
        result = self._add("sqrt", base, kind="float") if half else None
        square = base
        for bit in reversed(f"{int(whole):b}"):
            if bit == "1":
                result = square if result is None else self._times(result, square)
            square = self._times(square, square)  # what is not used is not emitted
        if result is None:
            return self._number(1.0)
        return self._add("rcp", result, kind="float") if power < 0 else result

    def _choose(self, condition: int, then: int, other: int) -> int:
        return then if then == other else self._add("?", condition, then, other, kind=self.operations[then].kind)

    def _read(self, node: Read) -> int:
        return self._add("read", *map(self.whole, node.index), kind="float", what=node.tensor)

    # ---- integers as numbers

    def _sum_of_integers(self, node: Node) -> int:
        """An integer as a float. What j does not enter comes first, so that it can be computed once a row; in it b, h,
        Nq and Nk make one int that is converted once.
        """
        terms: dict[Node, int] = {}
        constant = _collect(node, 1, terms)
        fixed: dict[Node, int] = {}
        rows: dict[Node, int] = {}
        others: dict[Node, int] = {}
        for term, factor in terms.items():
            small = isinstance(term, Name) and term.name in UNIFORM and abs(factor) <= _SMALL_FACTOR
            if factor:
                (fixed if small else rows if not names_in(term) & {"j", "score"} else others)[term] = factor
        total = self._weighted_sum(None, rows, self._integer_as_real)
        if fixed:
            late = constant if abs(constant) > _EXACT else 0  # so that the int does not overflow
            whole = self._weighted_sum(None, fixed, self.whole)
            assert whole is not None
            converted = self._add("float", self._plus_constant(whole, constant - late), kind="float")
            total = converted if total is None else self._add("+", total, converted, kind="float")
            constant = late
        if total is not None:
            total, constant = self._plus_constant(total, constant), 0
        elif not others or max(others.values()) < 0:
            total, constant = self._number(float(constant)), 0
        total = self._weighted_sum(total, others, self._integer_as_real)
        assert total is not None
        return self._plus_constant(total, constant)

    def _weighted_sum(self, total: int | None, terms: dict[Node, int], lower: Callable[[Node], int]) -> int | None:
        """total + sum of factor * term; what is added comes before what is taken off."""
        for term, factor in sorted(terms.items(), key=lambda item: item[1] < 0):
            total = self._plus(total, factor, lower(term))
        return total

    def _plus(self, total: int | None, factor: int, term: int) -> int:
        """total + factor * term."""
        kind = self.operations[term].kind
        if abs(factor) != 1:
            term = self._add("*", self._number(abs(factor), kind), term, kind=kind)
        if total is None or self._literal(total) == 0:
            return term if factor > 0 else self._add("neg", term, kind=kind)
        return self._add("+" if factor > 0 else "-", total, term, kind=kind)

    def _plus_constant(self, total: int, constant: int) -> int:
        if not constant:
            return total
        kind = self.operations[total].kind
        return self._add("+" if constant > 0 else "-", total, self._number(abs(constant), kind), kind=kind)

    def _integer_as_real(self, node: Node) -> int:
        """A term of a sum of integers as a float."""
        if isinstance(node, Name):
            return self._add("real_name", kind="float", what=node.name)
        assert isinstance(node, Op)
        if node.op == "floor":
            return self._add("floor", self.real(node.args[0]), kind="float")
        if node.op in ("//", "%"):
            return self._add("float", self.whole(node), kind="float")
        return self._real(node)

    # ---- integers as integers

    def _whole(self, node: Node) -> int:
        if isinstance(node, Number):
            return self._number(int(node.value), "int")
        if isinstance(node, Name):
            return self._add("name", kind="int", what=node.name)
        assert isinstance(node, Op)
        op = node.op
        if op == "floor":
            arg = node.args[0]
            return self.whole(arg) if arg.type is Type.INT else self._add("int", self.real(arg), kind="int")
        if op == "if":
            condition, then, other = node.args
            return self._choose(self.truth(condition), self.whole(then), self.whole(other))
        if op == "**":
            base, power = node.args
            assert isinstance(power, Number)
            result, factor = self._number(1, "int"), self.whole(base)
            for turn in range(int(power.value)):
                result = self._add("*", result, factor, kind="int") if turn else factor
            return result
        return self._add(op, *map(self.whole, node.args), kind="int")

    # ---- the graph

    def _number(self, value: int | float, kind: Kind = "float") -> int:
        return self._add("number", kind=kind, what=float(value) if kind == "float" else int(value))

    def _literal(self, number: int) -> float | None:
        found = self.operations[number]
        return float(found.what) if found.op == "number" else None

    def _add(self, op: str, *operands: int, kind: Kind, what: str | int | float = "") -> int:
        made = Operation(op, operands, kind, what)
        if made not in self._numbers:
            self._numbers[made] = len(self.operations)
            self.operations.append(made)
            uniform = op not in ("name", "real_name") or what in UNIFORM
            self.uniform.append(uniform and all(self.uniform[operand] for operand in operands))
        return self._numbers[made]


def _folded(op: str, values: Sequence[float]) -> float:
    if op == "neg":
        return -values[0]
    return values[0] + values[1] if op == "+" else values[0] - values[1]


def _collect(node: Node, factor: int, terms: dict[Node, int]) -> int:
    """Add factor * node to the sum of `terms`; returns the constant part."""
    if isinstance(node, Number):
        return factor * int(node.value)
    if isinstance(node, Op):
        if node.op == "neg":
            return _collect(node.args[0], -factor, terms)
        if node.op in ("+", "-"):
            left, right = node.args
            return _collect(left, factor, terms) + _collect(right, factor if node.op == "+" else -factor, terms)
        if node.op == "*":
            left, right = node.args
            if isinstance(right, Number):
                left, right = right, left
            if isinstance(left, Number) and abs(factor * left.value) <= _EXACT:
                return _collect(right, factor * int(left.value), terms)
    terms[node] = terms.get(node, 0) + factor
    return 0


def _compares_in_float(node: Op) -> bool:
    """Whether two sums of integers are compared in float: i or j enters, and no rounding can."""
    moves = False
    for side in node.args:
        terms: dict[Node, int] = {}
        constant = _collect(side, 1, terms)
        if abs(constant) > _EXACT or sum(map(abs, terms.values())) > 4:
            return False
        for term in terms:
            if not (isinstance(term, Name) and term.name in INTEGERS):
                return False
            moves |= term.name not in UNIFORM
    return moves
