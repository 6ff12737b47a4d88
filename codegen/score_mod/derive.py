"""Differentiate a tree with SymPy, which does the algebra of sums, products and powers and the chain rule.

What is not smooth has a derivative by branches, as in PyTorch's autograd: abs has slope 0 at 0; sign, floor, //, % and
comparisons have slope 0 everywhere. min and max differ at a tie, where PyTorch gives each argument half: here the first
has it all, so that min(score, 50) passes the gradient on at 50, as torch.clamp does. An index is an integer and has no
slope.

Functions are SymPy functions of our own, not SymPy's: those rewrite themselves (exp(a) exp(b) to exp(a + b), |a b| to
|a| |b|), and a value and its derivative would no longer share what they have in common.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import sympy

from .tree import Name, Node, Number, Op, Read, Type, integer, negative, operation, real

Algebra: TypeAlias = Any  # a SymPy expression; SymPy has no types


class _Function(sympy.Function):  # type: ignore[misc]
    """A function that SymPy leaves alone but for the chain rule; `fdiff` is its derivative."""

    op = ""


class Exp(_Function):
    """exp' = exp."""

    op = "exp"

    def fdiff(self, _: int = 1) -> Algebra:
        return self


class Log(_Function):
    """log' = 1 / x."""

    op = "log"

    def fdiff(self, _: int = 1) -> Algebra:
        return 1 / self.args[0]


class Sqrt(_Function):
    """sqrt' = 1 / (2 sqrt)."""

    op = "sqrt"

    def fdiff(self, _: int = 1) -> Algebra:
        return 1 / (2 * self)


class Tanh(_Function):
    """tanh' = 1 - tanh^2."""

    op = "tanh"

    def fdiff(self, _: int = 1) -> Algebra:
        return 1 - self**2


class Sigmoid(_Function):
    """sigmoid' = sigmoid (1 - sigmoid)."""

    op = "sigmoid"

    def fdiff(self, _: int = 1) -> Algebra:
        return self * (1 - self)


class Sin(_Function):
    """sin' = cos."""

    op = "sin"

    def fdiff(self, _: int = 1) -> Algebra:
        return Cos(self.args[0])


class Cos(_Function):
    """cos' = -sin."""

    op = "cos"

    def fdiff(self, _: int = 1) -> Algebra:
        return -Sin(self.args[0])


class Sign(_Function):
    """sign' = 0."""

    op = "sign"

    def fdiff(self, _: int = 1) -> Algebra:
        return sympy.S.Zero


class Absolute(_Function):
    """abs' = sign."""

    op = "abs"

    def fdiff(self, _: int = 1) -> Algebra:
        return Sign(self.args[0])


class Power(_Function):
    """x ** n for a literal n, whole or half; (x ** n)' = n x ** (n - 1)."""

    op = "**"

    @classmethod
    def eval(cls, x: Algebra, n: Algebra) -> Algebra:
        return {0: sympy.S.One, 1: x}.get(n)

    def fdiff(self, place: int = 1) -> Algebra:
        x, n = self.args
        return n * Power(x, n - 1) if place == 1 else sympy.S.Zero


class Choose(_Function):
    """`then if condition else other`; the condition is a symbol, so the derivative is that of each branch."""

    op = "if"

    @classmethod
    def eval(cls, condition: Algebra, then: Algebra, other: Algebra) -> Algebra:
        return then if then == other else None

    def _eval_derivative(self, by: Algebra) -> Algebra:
        condition, then, other = self.args
        return Choose(condition, then.diff(by), other.diff(by))


class Extreme(_Function):
    """min or max of two, with the condition under which it is the first."""

    def _eval_derivative(self, by: Algebra) -> Algebra:
        condition, first, second = self.args
        return Choose(condition, first.diff(by), second.diff(by))


_SMOOTH: dict[str, type[_Function]] = {f.op: f for f in (Exp, Log, Sqrt, Tanh, Sigmoid, Sin, Cos, Sign, Absolute)}


def derivative(tree: Node, by: Name | Read) -> Node:
    """d tree / d by, where `by` is the score or one entry of a tensor."""
    algebra = _Algebra()
    return algebra.tree(algebra.of(tree).diff(algebra.of(by)))


class _Algebra:
    """Trees to SymPy and back; what came from a tree goes back to that very tree."""

    def __init__(self) -> None:
        self.symbols: dict[Node, Algebra] = {}
        self.origin: dict[Algebra, Node] = {}

    def of(self, node: Node) -> Algebra:
        """The tree in SymPy: integers, conditions, infinities and reads are symbols there."""
        if isinstance(node, Number) and abs(node.value) != float("inf"):
            return sympy.Rational(repr(node.value))  # 0.1 is a tenth, so that factors cancel
        if isinstance(node, Number | Name | Read) or node.type is not Type.FLOAT:
            return self.symbol(node)
        expression = self.operation(node)
        if not expression.is_Rational:  # a number speaks for itself: 2 / 2 is 1
            self.origin.setdefault(expression, node)
        return expression

    def symbol(self, node: Node) -> Algebra:
        """A symbol that stands for the node; numbered in the order of meeting."""
        if node not in self.symbols:
            self.symbols[node] = sympy.Symbol(f"x{len(self.symbols)}")
            self.origin[self.symbols[node]] = node
        return self.symbols[node]

    def operation(self, node: Op) -> Algebra:
        op = node.op
        if op == "if":
            condition, then, other = node.args
            return Choose(self.symbol(condition), self.of(then), self.of(other))
        if op in ("min", "max"):
            first, second = node.args
            condition = operation("<=" if op == "min" else ">=", first, second)
            return Extreme(self.symbol(condition), self.of(first), self.of(second))
        args = [self.of(arg) for arg in node.args]
        if op == "+":
            return args[0] + args[1]
        if op == "-":
            return args[0] - args[1]
        if op == "*":
            return args[0] * args[1]
        if op == "/":
            return self.quotient(*args)
        if op == "neg":
            return -args[0]
        if op == "**":
            return Power(*args)
        return _SMOOTH[op](*args)

    def quotient(self, over: Algebra, under: Algebra) -> Algebra:
        # x / 0 is an infinity of floats, not of algebra
        return over / (self.symbol(real(0)) if under == 0 else under)

    # ---- back

    def tree(self, expression: Algebra) -> Node:
        """The tree that SymPy's result stands for."""
        if expression in self.origin:
            return self.origin[expression]
        if expression.is_Rational:
            return _number(expression)
        if expression.is_Add:
            return self.sum(expression)
        if expression.is_Mul:
            return self.product(expression)
        if expression.is_Pow:
            return self.power(expression)
        args = [self.tree(arg) for arg in expression.args]
        return operation(expression.op, *args)

    def sum(self, expression: Algebra) -> Node:
        """Terms that are added before terms that are taken off: 1 - x, not -x + 1."""
        added, taken = [], []
        for term in sorted(expression.args, key=sympy.default_sort_key):
            if term not in self.origin and term.as_coeff_Mul()[0] < 0:
                taken.append(self.tree(-term))
            else:
                added.append(self.tree(term))
        total = added[0] if added else negative(taken.pop(0))
        for term in added[1:]:
            total = operation("+", total, term)
        for term in taken:
            total = operation("-", total, term)
        return total

    def product(self, expression: Algebra) -> Node:
        factor, rest = expression.as_coeff_Mul()
        over, under = [], []
        for part in sorted(sympy.Mul.make_args(rest), key=sympy.default_sort_key):
            base, power = part.as_base_exp()
            if part not in self.origin and power.is_Integer and power < 0:
                under.append(self.tree(base**-power))
            else:
                over.append(self.tree(part))
        if factor.is_Rational and factor.p in (1, -1) and factor.q != 1:
            under.insert(0, _number(sympy.Integer(factor.q)))
        elif factor not in (1, -1):
            over.insert(0, _number(abs(factor)))
        tree = _multiplied(over)
        tree = operation("/", tree, _multiplied(under)) if under else tree
        return negative(tree) if factor < 0 else tree

    def power(self, expression: Algebra) -> Node:
        """A whole power, as products: SymPy makes them of equal factors."""
        base, power = expression.as_base_exp()
        tree = _multiplied([self.tree(base)] * abs(int(power)))
        return tree if power > 0 else operation("/", integer(1), tree)


def _multiplied(factors: list[Node]) -> Node:
    product = factors[0] if factors else integer(1)
    for factor in factors[1:]:
        product = operation("*", product, factor)
    return product


def _number(value: Algebra) -> Number:
    """A rational as a literal: whole if it is, else the nearest float."""
    if value.is_Integer and abs(value) < 2**31:
        return integer(int(value))
    try:
        return real(float(int(value.p) / int(value.q)))
    except OverflowError:  # products of literals beyond what a float holds
        return real(float("inf") if value > 0 else float("-inf"))
