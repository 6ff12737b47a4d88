"""Apply atomic operations in lane order: reductions vectorised, exchanges that return old values one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .halves import half_add

Array = NDArray[Any]

_UFUNCS: dict[str, np.ufunc] = {
    "add": np.add,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def _size(kind: str) -> int:
    return int(kind[1]) if kind[1:].isdigit() and len(kind) == 2 else (4 if kind.endswith("x2") else 2)


def apply_reduction(
    views: dict[int, Array], offset: Array, operation: str, kind: str, values: Sequence[Array], compare: Array | None
) -> None:
    """Atomics without a result: order within the call is that of the lanes."""
    code = kind if len(kind) == 2 else ""
    ufunc = _UFUNCS.get(operation)
    if operation in ("min", "max"):
        name = operation if code[:1] == "f" else f"{operation}imum"
        ufunc = {"min": np.fmin, "max": np.fmax, "minimum": np.minimum, "maximum": np.maximum}[name]
    if ufunc is None or not code:
        apply_atomic(views, offset, operation, kind, values, compare)
        return
    size = _size(kind)
    buffer = views[1].view(code)
    where = offset // size
    for k, value in enumerate(values):
        ufunc.at(buffer, where + k if k else where, np.ascontiguousarray(value))


def apply_atomic(
    views: dict[int, Array], offset: Array, operation: str, kind: str, values: Sequence[Array], compare: Array | None
) -> Array:
    """Atomics with a result, serial in lane order; returns the old values [lanes, parts]."""
    half = len(kind) != 2
    size = _size(kind)
    code = f"u{size}" if half else kind
    buffer = views[1].view(code)
    old = np.empty((offset.size, len(values)), code)
    function = _half_add(kind, code) if half else _FUNCTIONS[operation]
    for lane, start in enumerate((offset // size).tolist()):
        for k, value in enumerate(values):
            before = buffer[start + k].copy()
            old[lane, k] = before
            argument = (value[lane], compare[lane]) if compare is not None else value[lane]
            buffer[start + k] = function(before, argument)
    return old


def _half_add(kind: str, code: str) -> Callable[[Any, Any], Any]:
    def add(before: Any, value: Any) -> Any:
        out = np.empty(1, code)
        half_add(out, kind.startswith("bf"), np.array([before], code), np.array([value], code))
        return out[0]

    return add


_FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda old, value: old + value,
    "min": lambda old, value: np.fmin(old, value),
    "max": lambda old, value: np.fmax(old, value),
    "and": lambda old, value: old & value,
    "or": lambda old, value: old | value,
    "xor": lambda old, value: old ^ value,
    "exch": lambda old, value: value,
    "cas": lambda old, pair: pair[0] if old == pair[1] else old,
    "inc": lambda old, value: type(old)(0) if old >= value else old + type(old)(1),
    "dec": lambda old, value: value if old == 0 or old > value else old - type(old)(1),
}
