"""Hold a formula as a tree of four kinds of node, each with its type, and spell it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias


class Type(Enum):
    """What a node is worth: integers index and compare, a truth chooses, everything is a number where one is needed."""

    INT = "an integer"
    FLOAT = "a float"
    BOOL = "a truth"


SCORE = "score"
MAX_RANK = 4  # indexes of a tensor
INTEGERS = ("b", "h", "i", "j", "Nq", "Nk")
"""Batch, query head, query row, key; numbers of queries and of keys."""

COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
FUNCTIONS = {
    "abs": 1, "cos": 1, "exp": 1, "floor": 1, "log": 1, "max": 2, "min": 2, "sigmoid": 1, "sign": 1, "sin": 1,
    "sqrt": 1, "tanh": 1,
}  # fmt: skip
"""Operations that are spelt as calls, and their arguments; a longer min or max is a nest of them."""


@dataclass(frozen=True, slots=True)
class Number:
    """A literal. The type is part of it: 1 and 1.0 are two numbers."""

    value: int | float
    type: Type


@dataclass(frozen=True, slots=True)
class Name:
    """`score` or one of INTEGERS."""

    name: str

    @property
    def type(self) -> Type:
        """A float for the score, an integer for all others."""
        return Type.FLOAT if self.name == SCORE else Type.INT


@dataclass(frozen=True, slots=True)
class Read:
    """An entry of a tensor; each index is clamped into the tensor."""

    tensor: str
    index: tuple[Node, ...]  # 1 to 4 of type INT

    @property
    def type(self) -> Type:
        """Tensors hold floats."""
        return Type.FLOAT


@dataclass(frozen=True, slots=True)
class Op:
    """An operation: + - * / // % ** neg, a comparison, and or not, if (condition, then, else), or one of FUNCTIONS."""

    op: str
    args: tuple[Node, ...]
    type: Type


Node: TypeAlias = "Number | Name | Read | Op"


def integer(value: int) -> Number:
    """A literal integer."""
    return Number(value, Type.INT)


def real(value: float) -> Number:
    """A literal float; -0.0 is 0.0."""
    return Number(value + 0.0, Type.FLOAT)


def operation(op: str, *args: Node) -> Op:
    """`op` of `args` with its type: integers stay integers but under / and the functions of floats."""
    if op in COMPARISONS or op in ("and", "or", "not"):
        return Op(op, args, Type.BOOL)
    if op in ("//", "%", "floor"):
        return Op(op, args, Type.INT)
    valued = args[1:] if op == "if" else args
    keeps = op in ("+", "-", "*", "neg", "if", "abs", "min", "max", "sign")
    if op == "**":
        power = args[1]
        keeps = isinstance(power, Number) and power.type is Type.INT and power.value >= 0
        valued = args[:1]
    whole = keeps and all(arg.type is Type.INT for arg in valued)
    return Op(op, args, Type.INT if whole else Type.FLOAT)


def negative(node: Node) -> Node:
    """-node; of a literal the literal that it is."""
    return Number(-node.value + 0, node.type) if isinstance(node, Number) else operation("neg", node)


def children(node: Node) -> tuple[Node, ...]:
    """The nodes right below."""
    if isinstance(node, Op):
        return node.args
    return node.index if isinstance(node, Read) else ()


def walk(node: Node) -> Iterator[Node]:
    """The node and all below it, from left to right."""
    yield node
    for child in children(node):
        yield from walk(child)


def names_in(node: Node) -> frozenset[str]:
    """The names that the value depends on; not those of tensors."""
    return frozenset(n.name for n in walk(node) if isinstance(n, Name))


def replace_score(node: Node, by: Node) -> Node:
    """The tree with another in the place of each `score`."""
    if isinstance(node, Name):
        return by if node.name == SCORE else node
    if isinstance(node, Read):
        return Read(node.tensor, tuple(replace_score(index, by) for index in node.index))
    if isinstance(node, Op):
        return operation(node.op, *(replace_score(arg, by) for arg in node.args))
    return node


# ---- spelling ----------------------------------------------------------------------------------------------------

_LEVEL = {"if": 1, "or": 2, "and": 3, "not": 4} | dict.fromkeys(COMPARISONS, 5) | dict.fromkeys("+-", 6)
_LEVEL |= dict.fromkeys(("*", "/", "//", "%"), 7) | {"neg": 8, "**": 9}
_ATOM = 10


def spell(node: Node) -> str:
    """The one spelling of a tree: Python's, with single spaces and no needless parentheses."""
    return _spell(node)[0]


def _spell(node: Node) -> tuple[str, int]:
    """The text, and how tightly its outermost operator binds."""
    if isinstance(node, Number):
        return _spell_number(node)
    if isinstance(node, Name):
        return node.name, _ATOM
    if isinstance(node, Read):
        return f"{node.tensor}[{', '.join(map(spell, node.index))}]", _ATOM
    op, level = node.op, _LEVEL.get(node.op, _ATOM)
    if op in FUNCTIONS:
        return f"{op}({', '.join(map(spell, node.args))})", _ATOM
    if op == "if":
        condition, then, other = node.args
        return f"{_within(then, 2)} if {_within(condition, 2)} else {_within(other, 1)}", level
    if op in ("neg", "not"):
        return f"{'-' if op == 'neg' else 'not '}{_within(node.args[0], level)}", level
    left, right = node.args
    if op == "**":
        return f"{_within(left, _ATOM)} ** {spell(right)}", level
    return f"{_within(left, level + (op in COMPARISONS))} {op} {_within(right, level + 1)}", level


def _within(node: Node, level: int) -> str:
    text, own = _spell(node)
    return text if own >= level else f"({text})"


def _spell_number(number: Number) -> tuple[str, int]:
    size = abs(number.value)
    text = "pi" if size == math.pi else "inf" if size == math.inf else repr(size)
    return (f"-{text}", _LEVEL["neg"]) if number.value < 0 else (text, _ATOM)
