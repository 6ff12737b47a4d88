"""Load and store for a range of threads; generated code calls a Window as `W`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .access import Access
from .addresses import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, WINDOW_BYTES
from .errors import Misaligned, OutOfBounds
from .memory import ITEM_TYPES

Array: TypeAlias = "NDArray[Any]"

_SPACES = (("global", 0), ("shared", SHARED_WINDOW), ("local", LOCAL_WINDOW), ("param", PARAM_WINDOW))


class Window(Access):
    """Loads give an array [active threads, parts] of the type `code`; stores take one array for each part."""

    def load_global(self, address: Array, code: str, parts: int, lanes: Array | None, at: int) -> Array:
        """ld.global and ld.const."""
        size = int(code[1]) * parts
        if lanes is not None and not lanes.size:
            return np.empty((0, parts), code)
        offset, _ = self.in_global(address, size, lanes, at, size)
        self.counters.global_read_bytes += size * offset.size
        return _take(self.memory.views, offset, size, code)

    def load_shared(self, address: Array, code: str, parts: int, lanes: Array | None, at: int) -> Array:
        """ld.shared."""
        size = int(code[1]) * parts
        if lanes is not None and not lanes.size:
            return np.empty((0, parts), code)
        offset = self.in_shared(address, size, lanes, at, size)
        if self.batch.detector is not None:
            self.batch.detector.read(offset, size, self.threads(lanes), at)
        return _take(self.batch.shared_views, offset, size, code)

    def load_local(self, address: Array, code: str, parts: int, lanes: Array | None, at: int) -> Array:
        """ld.local."""
        size = int(code[1]) * parts
        if lanes is not None and not lanes.size:
            return np.empty((0, parts), code)
        return _take(self.batch.local_views, self.in_local(address, size, lanes, at, size), size, code)

    def load_generic(self, address: Array, code: str, parts: int, lanes: Array | None, at: int) -> Array:
        """ld without a state space: from wherever each address points."""
        active = self.active(lanes)
        out = np.empty((active.size, parts), code)
        for space, window, part in self.spaces(address, active):
            where = address - np.uint64(window)
            if space == "param":
                chosen = np.broadcast_to(where, self.n)[active[part]]
                for k in range(parts):
                    out[part, k] = self.load_param(chosen, k * int(code[1]), code, at)
                continue
            load = {"global": self.load_global, "shared": self.load_shared, "local": self.load_local}[space]
            out[part] = load(where, code, parts, active[part], at)
        return out

    def load_param(self, address: Array | int, extra: int, code: str, at: int) -> Array:
        """ld.param: one value at a fixed offset, or one for each thread."""
        size = int(code[1])
        where = np.asarray(address).astype("i8") + extra
        if (where % size).any():
            raise Misaligned(f"{self.batch.program.instructions[at]}: parameter offset is no multiple of {size}")
        if where.size and (where.min() < 0 or where.max() + size > self.batch.param_bytes):
            limit = self.batch.param_bytes
            raise OutOfBounds(f"{self.batch.program.instructions[at]}: outside the {limit} bytes of parameters")
        return np.asarray(self.batch.params.view(code).take(where // size))

    def store_global(self, address: Array, code: str, values: Sequence[Array], lanes: Array | None, at: int) -> None:
        """st.global."""
        if lanes is not None and not lanes.size:
            return
        size = int(code[1]) * len(values)
        offset, index = self.in_global(address, size, lanes, at, size)
        self.counters.global_written_bytes += size * offset.size
        self.counters.add_written(index, size, offset.size)
        self.batch.writes += 1
        _scatter(self.memory.views, offset, size, _rows(offset.size, code, values, lanes))

    def store_shared(self, address: Array, code: str, values: Sequence[Array], lanes: Array | None, at: int) -> None:
        """st.shared."""
        if lanes is not None and not lanes.size:
            return
        size = int(code[1]) * len(values)
        offset = self.in_shared(address, size, lanes, at, size)
        rows = _rows(offset.size, code, values, lanes)
        if self.batch.detector is not None:
            self.batch.detector.write(offset, size, self.threads(lanes), at, rows)
        self.batch.writes += 1
        _scatter(self.batch.shared_views, offset, size, rows)

    def store_local(self, address: Array, code: str, values: Sequence[Array], lanes: Array | None, at: int) -> None:
        """st.local."""
        if lanes is not None and not lanes.size:
            return
        size = int(code[1]) * len(values)
        offset = self.in_local(address, size, lanes, at, size)
        self.batch.writes += 1
        _scatter(self.batch.local_views, offset, size, _rows(offset.size, code, values, lanes))

    def store_generic(self, address: Array, code: str, values: Sequence[Array], lanes: Array | None, at: int) -> None:
        """st without a state space."""
        active = self.active(lanes)
        for space, window, part in self.spaces(address, active):
            store = {"global": self.store_global, "shared": self.store_shared, "local": self.store_local}.get(space)
            if store is None:
                self.fail(OutOfBounds, at, active, int(part[0]), "parameters cannot be written")
            store(address - np.uint64(window), code, values, active[part], at)

    def spaces(self, address: Array, active: Array) -> list[tuple[str, int, Array]]:
        """State spaces that generic addresses lie in: name, first address, positions in `active`."""
        where = np.broadcast_to(address, self.n)[active]
        number = np.zeros(active.size, "i1")
        for k, (_, window) in enumerate(_SPACES[1:], 1):
            number[where - np.uint64(window) < np.uint64(WINDOW_BYTES)] = k
        found = [(space, window, np.flatnonzero(number == k)) for k, (space, window) in enumerate(_SPACES)]
        return [item for item in found if item[2].size]


def _take(views: dict[int, Array], offset: Array, size: int, code: str) -> Array:
    shift = size.bit_length() - 1
    items = views[size].take(offset >> shift if shift else offset)
    return items.view(code).reshape(offset.size, -1)


def _rows(count: int, code: str, values: Sequence[Array], lanes: Array | None) -> Array:
    """What the active threads store, [active threads, parts]."""
    rows = np.empty((count, len(values)), code)
    for k, value in enumerate(values):
        rows[:, k] = value if lanes is None or not value.ndim else value[lanes]
    return rows


def _scatter(views: dict[int, Array], offset: Array, size: int, rows: Array) -> None:
    views[size][offset >> (size.bit_length() - 1)] = rows.view(ITEM_TYPES[size]).reshape(-1)
