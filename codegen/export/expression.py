"""Compute with sizes that remember how they were combined: whole numbers that print as a formula."""

from __future__ import annotations

from collections.abc import Callable

HUGE = 2**16  # what a number of this size or larger is compared with is a limit, not a choice

_LEVEL = {"+": 1, "-": 1, "*": 2, "/": 2}


class Expression(int):
    """A whole number and its formula in C, where `/` of numbers that are not negative rounds down.

    It is an int for everybody who computes with it, so arithmetic that is written for numbers runs on it as it stands.
    `limits` collects the comparisons `x > limit` that came out false, from all numbers that were made of one another.

    >>> n = Expression("Nq", 200)
    >>> blocks = -(-n // 128) * 6
    >>> int(blocks), blocks.text
    (12, 'ceil_div(Nq, 128) * 6')
    """

    text: str
    limits: list[tuple[str, int]]
    _level: int
    _of: tuple[str, int, int] | None  # the operation that made it and its operands

    def __new__(cls, text: str, value: int, limits: list[tuple[str, int]] | None = None, level: int = 3) -> Expression:
        made = super().__new__(cls, value)
        made.text, made.limits, made._level, made._of = text, [] if limits is None else limits, level, None
        return made

    def __add__(self, other: int) -> Expression:
        return self._made("+", self, other, int.__add__)

    def __radd__(self, other: int) -> int:
        return self if other == 0 and not isinstance(other, Expression) else self._made("+", other, self, int.__add__)

    def __sub__(self, other: int) -> Expression:
        return self._made("-", self, other, int.__sub__)

    def __rsub__(self, other: int) -> Expression:
        return self._made("-", other, self, int.__sub__)

    def __mul__(self, other: int) -> Expression:
        return self._made("*", self, other, int.__mul__)

    def __rmul__(self, other: int) -> Expression:
        return self if other == 1 and not isinstance(other, Expression) else self._made("*", other, self, int.__mul__)

    def __floordiv__(self, other: int) -> int:
        if self._of and self._of[0] == "*" and type(other) is int and self._of[2] == other:  # x * 128 / 128
            return self._of[1]
        return self._made("/", self, other, int.__floordiv__)

    def __rfloordiv__(self, other: int) -> Expression:
        return self._made("/", other, self, int.__floordiv__)

    def __neg__(self) -> Expression:
        if self._of and self._of[0] == "/":
            numerator, step = self._of[1:]
            if isinstance(numerator, Expression) and numerator._of and numerator._of[0] == "negate":
                return Expression(f"ceil_div({_text(numerator._of[1])}, {_text(step)})", -int(self), self.limits)
        made = Expression(f"-{_operand(self, 3)}", -int(self), self.limits, level=2)
        made._of = ("negate", self, 0)
        return made

    def __gt__(self, other: int) -> bool:
        above = int(self) > int(other)
        if not above and other >= HUGE:
            self.limits.append((self.text, int(other)))
        return above

    def _made(self, sign: str, left: int, right: int, combine: Callable[[int, int], int]) -> Expression:
        text = f"{_operand(left, _LEVEL[sign])} {sign} {_operand(right, _LEVEL[sign] + 1)}"
        made = Expression(text, combine(int(left), int(right)), self.limits, _LEVEL[sign])
        made._of = (sign, left, right)
        return made


def _text(x: int) -> str:
    return x.text if isinstance(x, Expression) else str(int(x))


def _operand(x: int, level: int) -> str:
    """The text of an operand, in parentheses if it binds less than `level`."""
    return f"({x.text})" if isinstance(x, Expression) and x._level < level else _text(x)
