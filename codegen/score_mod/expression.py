"""Hold one score modification: its text, what it depends on, its derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from .parse import BadScoreMod, parse_tree
from .tree import (
    SCORE,
    Name,
    Node,
    Number,
    Op,
    Read,
    integer,
    names_in,
    negative,
    operation,
    replace_score,
    spell,
    walk,
)


@dataclass(frozen=True)
class Expression:
    """A formula: equal, hashed and named by what it says, not by how it was written.

    >>> parse("score+(slope[h])*(j-i)").text
    'score + slope[h] * (j - i)'
    """

    tree: Node

    @cached_property
    def text(self) -> str:
        """The one spelling; parsing it gives this expression again."""
        return spell(self.tree)

    def __str__(self) -> str:
        return self.text

    # ---- what it depends on

    @cached_property
    def names(self) -> frozenset[str]:
        """Of score, b, h, i, j, Nq and Nk those that occur, be it in an index."""
        return names_in(self.tree)

    @cached_property
    def tensors(self) -> dict[str, int]:
        """The tensors by name, in alphabetical order, with the number of their indexes."""
        return dict(sorted((n.tensor, len(n.index)) for n in walk(self.tree) if isinstance(n, Read)))

    def depends_on(self, *names: str) -> bool:
        """Whether one of these names or tensors occurs."""
        return any(name in self.names or name in self.tensors for name in names)

    @property
    def is_one(self) -> bool:
        """Whether it is the number 1."""
        return isinstance(self.tree, Number) and self.tree.value == 1

    @property
    def is_zero(self) -> bool:
        """Whether it is the number 0."""
        return isinstance(self.tree, Number) and self.tree.value == 0

    @cached_property
    def addend(self) -> Expression | None:
        """What is added to the score, if that is all that happens to it.

        A branch that is -inf counts as one that adds -inf: its weight exp(-inf) is 0, and with it the gradient.

        >>> parse("score + bias[h] if i >= j else -inf").addend.text
        'bias[h] if i >= j else -inf'
        """
        tree = _addend(self.tree)
        return None if tree is None else Expression(tree)

    @property
    def additive(self) -> bool:
        """Whether it is score + addend: the slope is 1 wherever a weight is not 0, and need not be multiplied by."""
        return self.addend is not None

    # ---- derivatives

    @cached_property
    def slope(self) -> Expression:
        """d expression / d score.

        >>> parse("30 * tanh(score / 30)").slope.text
        '1 - tanh(score / 30) * tanh(score / 30)'
        """
        from .derive import derivative  # SymPy takes half a second to import, and the forward needs none

        return Expression(derivative(self.tree, Name(SCORE)))

    @cached_property
    def gradients(self) -> tuple[TensorGradient, ...]:
        """d expression / d entry for each entry that is read, in the order of reading; without those that are 0.

        >>> [(g.tensor, [str(x) for x in g.index], g.derivative.text) for g in parse("score + w[h] * j").gradients]
        [('w', ['h'], 'j')]
        """
        from .derive import derivative

        found: list[TensorGradient] = []
        for read in dict.fromkeys(n for n in walk(self.tree) if isinstance(n, Read)):
            derived = Expression(derivative(self.tree, read))
            if not derived.is_zero:
                found.append(TensorGradient(read.tensor, tuple(map(Expression, read.index)), derived))
        return tuple(found)


@dataclass(frozen=True)
class TensorGradient:
    """One entry that the expression reads, and what the expression changes by with it."""

    tensor: str
    index: tuple[Expression, ...]
    derivative: Expression


def parse(text: str) -> Expression:
    """What a user wrote as an Expression; see the package for what may be written.

    Raises BadScoreMod, with a caret under the place.
    """
    if not isinstance(text, str):
        raise BadScoreMod(f"a formula is a string, not {type(text).__name__}.", repr(text)[:80], 0)
    return _parsed(text)


@lru_cache(maxsize=256)
def _parsed(text: str) -> Expression:
    """One object for a text, so that it is differentiated once, however often a caller parses it."""
    return Expression(parse_tree(text))


def compose(texts: Sequence[str]) -> Expression:
    """Several modifications one after the other: the value of one is the score of the next.

    Raises BadScoreMod if one of them is bad, if two read tensors of the same name, and if the whole grows too long.

    >>> compose(["score + bias[b, h, i, j]", "30 * tanh(score / 30)"]).text
    '30 * tanh((score + bias[b, h, i, j]) / 30)'
    """
    whole = Expression(Name(SCORE))
    for text in texts:
        part = parse(text)
        for tensor in part.tensors:
            if tensor in whole.tensors:
                raise BadScoreMod(
                    f"tensor {tensor} is read by an earlier modification too; give one of them another name.",
                    part.text,
                    part.text.index(f"{tensor}["),
                )
        whole = parse(spell(replace_score(part.tree, whole.tree)))
    return whole


def _addend(tree: Node) -> Node | None:
    """The tree less the score; None where it is not score + something without the score."""
    if tree == Name(SCORE):
        return integer(0)
    if isinstance(tree, Number) and tree.value == float("-inf"):
        return tree
    if not isinstance(tree, Op):
        return None
    if tree.op == "if":
        condition, *branches = tree.args
        then, other = map(_addend, branches)
        if then is None or other is None or SCORE in names_in(condition):
            return None
        return operation("if", condition, then, other)
    if tree.op not in ("+", "-"):
        return None
    left, right = tree.args
    if tree.op == "+" and SCORE not in names_in(left):
        rest = _addend(right)
        return None if rest is None else left if rest == integer(0) else operation("+", left, rest)
    rest = _addend(left)
    if rest is None or SCORE in names_in(right):
        return None
    if rest == integer(0):
        return negative(right) if tree.op == "-" else right
    return operation(tree.op, rest, right)
