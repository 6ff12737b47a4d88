"""Evaluate a score modification on NumPy arrays or torch tensors, reading tensors as the kernels do."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from ..errors import UsageError
from .expression import Expression
from .tree import COMPARISONS, Name, Node, Number, Op, Read, Type

Array: TypeAlias = Any  # a NumPy array or a torch tensor, by what `score` is

_FLOOR = 2**30  # floor(x) as an integer lies within this, as in the kernels


def evaluate(
    expression: Expression,
    *,
    score: Array,
    b: Array,
    h: Array,
    i: Array,
    j: Array,
    Nq: int,
    Nk: int,
    tensors: Mapping[str, Array] | None = None,
) -> Array:
    """The value for each score: of score's shape, dtype and library. torch tensors are differentiated through.

    b, h, i and j are arrays of integers that broadcast against the score, for instance [B, 1, 1, 1], [H, 1, 1], [Nq, 1]
    and [Nk]. Tensors are of the same library; an index outside becomes the nearest inside.
    Raises UsageError for a tensor that is missing, empty, or of another number of dimensions than the formula reads.

    >>> import numpy as np
    >>> from flashsmith.score_mod import evaluate, parse
    >>> i, j = np.arange(2)[:, None], np.arange(3)
    >>> values = evaluate(parse("score - 0.5 * abs(i - j)"), score=np.ones((2, 3)), b=0, h=0, i=i, j=j, Nq=2, Nk=3)
    >>> values.tolist()
    [[1.0, 0.5, 0.0], [0.5, 1.0, 0.5]]
    """
    tensors = tensors or {}
    for name, rank in expression.tensors.items():
        _check(name, rank, tensors)
    integers = {"b": b, "h": h, "i": i, "j": j, "Nq": Nq, "Nk": Nk}
    evaluator = (_Numpy if isinstance(score, np.ndarray | np.generic) else _Torch)(score, integers, tensors)
    with np.errstate(all="ignore"):  # infinities and NaN are values here
        return evaluator.library.broadcast_to(evaluator.real(expression.tree), score.shape)


def _check(name: str, rank: int, tensors: Mapping[str, Array]) -> None:
    if name not in tensors:
        raise UsageError(f"score_mod reads tensor {name}, which is not given; given are {sorted(tensors) or 'none'}.")
    shape = tuple(tensors[name].shape)
    if len(shape) != rank or 0 in shape:
        raise UsageError(
            f"score_mod reads {rank} indexes of tensor {name}; its shape {shape} must have as many, none 0."
        )


class _Evaluator:
    """Walks a tree; what libraries do differently is in the classes below."""

    library: Any

    def __init__(self, score: Array, integers: Mapping[str, Array], tensors: Mapping[str, Array]) -> None:
        self.score, self.tensors = score, tensors
        self.integers = {name: self.whole_array(value) for name, value in integers.items()}

    def whole_array(self, value: Array) -> Array:
        """int64, in the library and on the device of the score."""
        raise NotImplementedError

    def real_array(self, value: Array) -> Array:
        """The same as a float of the score's type."""
        raise NotImplementedError

    def real(self, node: Node) -> Array:
        """A node as a float."""
        if isinstance(node, Number):
            return self.real_array(node.value)
        if isinstance(node, Name):
            return self.score if node.name == "score" else self.real_array(self.integers[node.name])
        if isinstance(node, Read):
            return self.read(node)
        if node.op in ("//", "%"):
            return self.real_array(self.whole(node))
        if node.op == "if":
            condition, then, other = node.args
            return self.library.where(self.truth(condition), self.real(then), self.real(other))
        if node.op == "**":
            return self.real(node.args[0]) ** _literal(node.args[1])
        return self.apply(node.op, *map(self.real, node.args))

    def whole(self, node: Node) -> Array:
        """A node of type INT as int64."""
        if isinstance(node, Number):
            return self.whole_array(node.value)
        if isinstance(node, Name):
            return self.integers[node.name]
        assert isinstance(node, Op)
        if node.op == "floor":
            value = self.library.nan_to_num(self.library.floor(self.real(node.args[0])), nan=0.0)
            return self.whole_array(self.library.clip(value, -_FLOOR, _FLOOR))
        if node.op == "if":
            condition, then, other = node.args
            return self.library.where(self.truth(condition), self.whole(then), self.whole(other))
        if node.op == "**":
            return self.whole(node.args[0]) ** _literal(node.args[1])
        return self.apply(node.op, *map(self.whole, node.args))

    def truth(self, node: Node) -> Array:
        """A condition as booleans."""
        assert isinstance(node, Op)
        if node.op in COMPARISONS:
            whole = all(arg.type is Type.INT for arg in node.args)
            return self.apply(node.op, *map(self.whole if whole else self.real, node.args))
        return self.apply(node.op, *map(self.truth, node.args))

    def read(self, node: Read) -> Array:
        """Entries of a tensor; indexes are clamped."""
        tensor = self.tensors[node.tensor]
        last = [size - 1 for size in tensor.shape]
        index = [self.library.clip(self.whole(at), 0, end) for at, end in zip(node.index, last, strict=True)]
        return self.real_array(tensor[tuple(index)])

    def apply(self, op: str, x: Array, y: Array = None) -> Array:
        """An operation on values of one type."""
        library = self.library
        if op in ("min", "max"):  # the first at a tie, NaN if one is: unlike torch, which halves the gradient
            first = x <= y if op == "min" else x >= y
            return library.where(first | (x != x), x, y)
        if op == "sign":
            one = library.ones_like(x)
            return library.where(x > 0, one, library.where(x < 0, -one, x * 0))
        if op == "sigmoid":
            return 1 / (1 + library.exp(-x))
        if op in _TWO:
            return _TWO[op](x, y)
        return (_ONE[op] if op in _ONE else getattr(library, op))(x)


_TWO: dict[str, Callable[[Array, Array], Array]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq,
    "!=": operator.ne, "and": operator.and_, "or": operator.or_,
}  # fmt: skip
_ONE: dict[str, Callable[[Array], Array]] = {"not": operator.invert, "neg": operator.neg}


class _Numpy(_Evaluator):
    library = np

    def whole_array(self, value: Array) -> Array:
        return np.asarray(value).astype(np.int64)

    def real_array(self, value: Array) -> Array:
        return np.asarray(value).astype(self.score.dtype)


class _Torch(_Evaluator):
    def __init__(self, score: Array, integers: Mapping[str, Array], tensors: Mapping[str, Array]) -> None:
        import torch

        self.library = torch
        super().__init__(score, integers, tensors)

    def whole_array(self, value: Array) -> Array:
        return self.library.as_tensor(value, device=self.score.device).to(self.library.int64)

    def real_array(self, value: Array) -> Array:
        return self.library.as_tensor(value, device=self.score.device, dtype=self.score.dtype)


def _literal(node: Node) -> int | float:
    assert isinstance(node, Number)
    return node.value
