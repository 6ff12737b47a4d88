"""Parse what a user wrote into a tree; what is not allowed is named, with a caret under it. Nothing is evaluated."""

from __future__ import annotations

import ast
import math
import warnings
from typing import NoReturn

from ..errors import UsageError
from .tree import (
    FUNCTIONS,
    INTEGERS,
    MAX_RANK,
    SCORE,
    Name,
    Node,
    Number,
    Op,
    Read,
    Type,
    integer,
    negative,
    operation,
    real,
    spell,
)

MAX_LENGTH = 2000  # characters
MAX_DEPTH = 50  # levels of the tree
MAX_INTEGER = 2**31 - 1
MAX_FLOAT, MIN_FLOAT = 3.4028234e38, 1.1754944e-38  # of float32; what is smaller but not 0 would be flushed
MAX_POWER = 32

_BINARY = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**"}
_COMPARE = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
_CONSTANTS = {"inf": math.inf, "pi": math.pi}
_NAMES = ", ".join((SCORE, *INTEGERS, *_CONSTANTS))
_CALLS = ", ".join(FUNCTIONS)


class BadScoreMod(UsageError):
    """A formula that is not understood or not allowed; the message shows it with a caret under the place."""

    def __init__(self, what: str, text: str, column: int) -> None:
        self.text, self.column = text, column
        # a long formula is shown around the caret
        start = max(0, column - 60)
        shown = ("..." if start else "") + text[start : column + 60] + ("..." if column + 60 < len(text) else "")
        self.caret = column - start + (3 if start else 0)
        super().__init__(f"score_mod: {what}\n    {shown}\n    {' ' * self.caret}^")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.args[0], self.text, self.column, self.caret)


def _rebuild(message: str, text: str, column: int, caret: int) -> BadScoreMod:
    """The error as it was, after it travelled between processes."""
    error = BadScoreMod("", text, column)
    error.args, error.caret = (message,), caret
    return error


def parse_tree(text: str) -> Node:
    """The tree of a formula; see the package for what may be written.

    Raises BadScoreMod.
    """
    return _Parser(text).tree()


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text.rstrip(" ")
        self.indent = len(self.text) - len(self.text.lstrip(" "))
        self.ranks: dict[str, int] = {}

    def tree(self) -> Node:
        text = self.text
        if len(text) > MAX_LENGTH:
            raise BadScoreMod(f"{len(text)} characters; a formula has at most {MAX_LENGTH}.", text, MAX_LENGTH)
        for column, character in enumerate(text):
            if not " " <= character <= "~":
                shown = "".join(c if " " <= c <= "~" else "?" for c in text)
                raise BadScoreMod(f"character {character!a}; write one line of printable ASCII.", shown, column)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of Python's compiler, on what is refused here anyway
                parsed = ast.parse(text[self.indent :], mode="eval")
        except SyntaxError as error:
            # Python points at nothing when the end comes too early
            column = min(error.offset - 1 + self.indent, len(text)) if error.offset else len(text)
            raise BadScoreMod(f"this is no expression: {error.msg}.", text, column) from None
        except (RecursionError, MemoryError):
            raise BadScoreMod(f"nested deeper than {MAX_DEPTH} levels.", text, self.indent) from None
        root = self.number(parsed.body, 1)
        if len(spell(root)) > MAX_LENGTH:  # a chained comparison is longer than it was written
            self.fail(parsed.body, f"written out it has {len(spell(root))} characters; at most {MAX_LENGTH}.")
        return root

    def fail(self, node: ast.expr, what: str) -> NoReturn:
        raise BadScoreMod(what, self.text, node.col_offset + self.indent)

    # ---- by the type that is needed

    def number(self, node: ast.expr, level: int) -> Node:
        """An integer or a float."""
        tree = self.any(node, level)
        if tree.type is Type.BOOL:
            self.fail(node, "a comparison is no number; write `x if condition else y`.")
        return tree

    def integer(self, node: ast.expr, level: int, where: str) -> Node:
        tree = self.number(node, level)
        if tree.type is not Type.INT:
            self.fail(node, f"{where} needs an integer and this is a float; floor(x) makes an integer.")
        return tree

    def truth(self, node: ast.expr, level: int) -> Node:
        tree = self.any(node, level)
        if tree.type is not Type.BOOL:
            self.fail(node, "a condition is needed: a comparison, or several joined by and, or, not.")
        return tree

    # ---- by what was written

    def any(self, node: ast.expr, level: int) -> Node:
        if level > MAX_DEPTH:
            self.fail(node, f"nested deeper than {MAX_DEPTH} levels.")
        below = level + 1
        if isinstance(node, ast.Constant):
            return self.literal(node)
        if isinstance(node, ast.Name):
            return self.name(node)
        if isinstance(node, ast.BinOp):
            return self.binary(node, below)
        if isinstance(node, ast.UnaryOp):
            return self.unary(node, below)
        if isinstance(node, ast.Compare):
            return self.compare(node, below)
        if isinstance(node, ast.BoolOp):
            return self.join(node, below)
        if isinstance(node, ast.IfExp):
            condition = self.truth(node.test, below)
            return operation("if", condition, self.number(node.body, below), self.number(node.orelse, below))
        if isinstance(node, ast.Call):
            return self.call(node, below)
        if isinstance(node, ast.Subscript):
            return self.read(node, below)
        self.fail(
            node,
            f"{_said(node)} is not allowed; a formula has numbers, names, tensor[index], operators, comparisons, "
            f"`x if condition else y` and the functions {_CALLS}.",
        )

    def literal(self, node: ast.Constant) -> Node:
        value = node.value
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(node, f"{value!r} is no number; integers and floats are.")
        if isinstance(value, int):
            if value > MAX_INTEGER:
                self.fail(node, f"an integer is at most {MAX_INTEGER}; write a float.")
            return integer(value)
        if value > MAX_FLOAT or 0 < value < MIN_FLOAT:
            self.fail(node, f"a float is 0 or {MIN_FLOAT} to {MAX_FLOAT}, what float32 holds; inf is a name.")
        return real(value)

    def name(self, node: ast.Name) -> Node:
        name = node.id
        if name in _CONSTANTS:
            return real(_CONSTANTS[name])
        if name == SCORE or name in INTEGERS:
            return Name(name)
        if name in FUNCTIONS:
            self.fail(node, f"{name} is a function: {name}({', '.join('xy'[: FUNCTIONS[name]])}).")
        if name in self.ranks:
            self.fail(node, f"tensor {name} needs {self.ranks[name]} indexes in brackets.")
        self.fail(node, f"unknown name {name}; there are {_NAMES}, and tensors as {name}[index].")

    def unary(self, node: ast.UnaryOp, level: int) -> Node:
        if isinstance(node.op, ast.Not):
            return operation("not", self.truth(node.operand, level))
        if not isinstance(node.op, ast.USub | ast.UAdd):
            self.fail(node, "~ is not allowed; -, + and not are.")
        operand = self.number(node.operand, level)
        if isinstance(node.op, ast.UAdd):
            return operand
        return negative(operand)

    def binary(self, node: ast.BinOp, level: int) -> Node:
        op = _BINARY.get(type(node.op))
        if op is None:
            self.fail(node, f"{_said(node.op)} is not allowed; + - * / // % ** are.")
        if op == "**":
            return self.power(node, level)
        if op in ("//", "%"):
            left, right = (self.integer(part, level, f"{op}") for part in (node.left, node.right))
            positive = isinstance(right, Number) and right.value > 0
            if not positive and right not in (Name("Nq"), Name("Nk")):
                self.fail(node.right, f"{op} divides by a positive literal, Nq or Nk.")
            return operation(op, left, right)
        return operation(op, self.number(node.left, level), self.number(node.right, level))

    def power(self, node: ast.BinOp, level: int) -> Node:
        base, power = self.number(node.left, level), self.number(node.right, level)
        if not isinstance(power, Number) or abs(power.value) > MAX_POWER or power.value * 2 % 1:
            self.fail(
                node.right,
                f"an exponent is a literal, whole or half, from -{MAX_POWER} to {MAX_POWER}; for others write "
                "exp(y * log(x)).",
            )
        return operation("**", base, power)

    def join(self, node: ast.BoolOp, level: int) -> Node:
        op, below = "and" if isinstance(node.op, ast.And) else "or", level + len(node.values) - 2
        joined, *others = (self.truth(value, below) for value in node.values)
        for other in others:
            joined = operation(op, joined, other)
        return joined

    def compare(self, node: ast.Compare, level: int) -> Node:
        below = level + len(node.ops) - 1
        parts = [self.number(part, below) for part in (node.left, *node.comparators)]
        chained: Op | None = None
        for left, op, right in zip(parts, node.ops, parts[1:], strict=False):
            if type(op) not in _COMPARE:
                self.fail(node, f"{_said(op)} is not allowed; < <= > >= == != are.")
            compared = operation(_COMPARE[type(op)], left, right)
            chained = compared if chained is None else operation("and", chained, compared)
        assert chained is not None  # ast gives one comparison or more
        return chained

    def call(self, node: ast.Call, level: int) -> Node:
        if not isinstance(node.func, ast.Name):
            self.fail(node.func, f"{_said(node.func)} cannot be called; the functions are {_CALLS}.")
        name = node.func.id
        if name not in FUNCTIONS:
            self.fail(node.func, f"unknown function {name}; there are {_CALLS}.")
        if node.keywords:
            self.fail(node.keywords[0].value, f"{name} takes no named arguments.")
        for arg in node.args:
            if isinstance(arg, ast.Starred):
                self.fail(arg, f"{name} takes its arguments one by one.")
        count, given = FUNCTIONS[name], len(node.args)
        if given != count and not (count == 2 and given > 2):
            wanted = "1 argument" if count == 1 else "2 arguments or more"
            self.fail(node, f"{name} takes {wanted}, {given} given.")
        # a tree has two children at most here: of three and more, each is a level deeper
        first, *others = (self.number(arg, level + max(given - 2, 0)) for arg in node.args)
        if not others:
            return operation(name, first)
        for other in others:
            first = operation(name, first, other)
        return first

    def read(self, node: ast.Subscript, level: int) -> Node:
        if not isinstance(node.value, ast.Name):
            self.fail(node.value, f"{_said(node.value)} has no indexes; a tensor is a name.")
        name = node.value.id
        if name == SCORE or name in INTEGERS or name in _CONSTANTS or name in FUNCTIONS:
            self.fail(node.value, f"{name} is no tensor; give the tensor another name.")
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if not 1 <= len(parts) <= MAX_RANK:
            self.fail(node.value, f"tensor {name} has {len(parts)} indexes; 1 to {MAX_RANK} are allowed.")
        rank = self.ranks.setdefault(name, len(parts))
        if rank != len(parts):
            self.fail(node.value, f"tensor {name} has {len(parts)} indexes here and {rank} before.")
        return Read(name, tuple(self.integer(part, level, f"an index of {name}") for part in parts))


def _said(node: ast.AST) -> str:
    """What a node of Python's is called."""
    words = {
        ast.Attribute: "an attribute", ast.Lambda: "a lambda", ast.JoinedStr: "a string", ast.List: "a list",
        ast.Tuple: "a tuple", ast.Dict: "a dict", ast.Set: "a set", ast.NamedExpr: "an assignment",
        ast.Slice: "a slice", ast.Starred: "a starred value", ast.Call: "the result of a call", ast.Is: "is",
        ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.MatMult: "@", ast.BitAnd: "&", ast.BitOr: "|",
        ast.BitXor: "^", ast.LShift: "<<", ast.RShift: ">>", ast.Constant: "a literal",
    }  # fmt: skip
    return words.get(type(node), f"a {type(node).__name__}")
