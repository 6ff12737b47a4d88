"""Apply atomic operations: reductions vectorised, operations that return the old value one lane after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import OutOfBounds
from .halves import half_add
from .window import Window

Array: TypeAlias = "NDArray[Any]"
Views: TypeAlias = "dict[int, Array]"

_HALF_BYTES = {"f16": 2, "bf16": 2, "f16x2": 4, "bf16x2": 4}
_UFUNCS: dict[tuple[str, bool], np.ufunc] = {
    ("add", False): np.add,
    ("add", True): np.add,
    ("min", False): np.minimum,
    ("min", True): np.fmin,
    ("max", False): np.maximum,
    ("max", True): np.fmax,
    ("and", False): np.bitwise_and,
    ("or", False): np.bitwise_or,
    ("xor", False): np.bitwise_xor,
}


def reduce(
    window: Window, space: str, address: Array, operation: str, kind: str, values: Sequence[Array],
    compare: Array | None, lanes: Array | None, at: int,
) -> None:  # fmt: skip
    """red, and atom whose result nobody reads. `kind` is a NumPy code or a 16-bit floating type of PTX."""
    ufunc = None if kind in _HALF_BYTES else _UFUNCS.get((operation, kind[0] == "f"))
    size = _bytes(kind)
    for views, offset, chosen in _targets(window, space, address, size * len(values), size, lanes, at):
        if ufunc is None:
            _one_by_one(views, offset, operation, kind, *_spread(window, values, compare, chosen))
            continue
        buffer = views[1].view(kind)
        where = offset // size
        for k, value in enumerate(_spread(window, values, None, chosen)[0]):  # as many as lanes
            ufunc.at(buffer, where + k if k else where, value)


def atomic(
    window: Window, space: str, address: Array, operation: str, kind: str, values: Sequence[Array],
    compare: Array | None, lanes: Array | None, at: int,
) -> Array:  # fmt: skip
    """atom: the old values [active threads, parts]."""
    size = _bytes(kind)
    old = np.zeros((window.n, len(values)), f"u{size}" if kind in _HALF_BYTES else kind)
    for views, offset, chosen in _targets(window, space, address, size * len(values), size, lanes, at):
        old[chosen] = _one_by_one(views, offset, operation, kind, *_spread(window, values, compare, chosen))
    return old[window.active(lanes)]


def _bytes(kind: str) -> int:
    return _HALF_BYTES[kind] if kind in _HALF_BYTES else int(kind[1])


def _spread(
    window: Window, values: Sequence[Array], compare: Array | None, lanes: Array
) -> tuple[list[Array], Array | None]:
    """Values of the chosen lanes."""
    everyone = lanes is window.all
    chosen = [value if everyone and value.ndim else np.broadcast_to(value, window.n)[lanes] for value in values]
    return chosen, None if compare is None else np.broadcast_to(compare, window.n)[lanes]


def _targets(
    window: Window, space: str, address: Array, size: int, align: int, lanes: Array | None, at: int
) -> list[tuple[Views, Array, Array]]:
    """(memory, offsets, lanes) for each state space that is hit."""
    active = window.active(lanes)
    if not active.size:
        return []
    window.batch.writes += 1
    targets: list[tuple[Views, Array, Array]] = []
    pieces: list[tuple[str, int, Array | None]] = [(space, 0, None)]
    if space == "generic":
        pieces = list(window.spaces(address, active))
    for name, first, part in pieces:
        where, chosen = address - address.dtype.type(first), active if part is None else active[part]
        if name == "shared":
            offset = window.in_shared(where, size, None if chosen is window.all else chosen, at, align)
            if window.batch.detector is not None:
                window.batch.detector.atomic(offset, size, window.threads(chosen), at)
            targets.append((window.batch.shared_views, offset, chosen))
        elif name == "global":
            offset, index = window.in_global(where, size, None if chosen is window.all else chosen, at, align)
            window.counters.add_written(index, size, offset.size)
            window.counters.global_written_bytes += size * offset.size
            window.counters.atomic_bytes += size * offset.size
            targets.append((window.memory.views, offset, chosen))
        else:
            window.fail(OutOfBounds, at, chosen, 0, f"atomics do not reach {name} memory")
    return targets


def _one_by_one(
    views: Views, offset: Array, operation: str, kind: str, values: Sequence[Array], compare: Array | None
) -> Array:
    """Serial in lane order; returns the old values [lanes, parts]."""
    size = _bytes(kind)
    code = f"u{size}" if kind in _HALF_BYTES else kind
    buffer = views[1].view(code)
    old = np.empty((offset.size, len(values)), code)
    function = _half_adder(kind, code) if kind in _HALF_BYTES else _FUNCTIONS[operation]
    for lane, start in enumerate((offset // size).tolist()):
        for k, value in enumerate(values):
            before = buffer[start + k]
            old[lane, k] = before
            argument = value[lane] if compare is None else (value[lane], compare[lane])
            buffer[start + k] = function(before, argument)
    return old


def _half_adder(kind: str, code: str) -> Callable[[Any, Any], Any]:
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
