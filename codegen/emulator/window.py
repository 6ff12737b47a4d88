"""Execute memory instructions for a contiguous range of threads, with every address checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from .addresses import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, WINDOW_BYTES
from .atomics import apply_atomic, apply_reduction
from .errors import DivergentBarrier, Misaligned, OutOfBounds, Trap
from .memory import BASE, ITEM_TYPES
from .tensor import collect_rows, distribute_rows

if TYPE_CHECKING:
    from .batch import Batch

Array = NDArray[Any]


class Window:
    """Threads low .. high of a batch. Generated code calls it as `W`; `lanes` are indices of the active threads of the
    window, None if all are active; `at` is the index of the instruction, for messages and checks."""

    def __init__(self, batch: Batch, low: int, high: int) -> None:
        self.batch, self.low, self.high, self.n = batch, low, high, high - low
        self.memory, self.counters = batch.memory, batch.counters
        self.shared_base = batch.shared_base[low:high]
        self.local_base = batch.local_base[low:high]
        self.barrier: list[tuple[Array, Array | None]] = []
        self._all = np.arange(self.n)

    # ---- addresses

    def _picked(self, address: Array, lanes: Array | None) -> Array:
        """Addresses of the active lanes as int64."""
        if address.ndim == 0:
            address = np.broadcast_to(address, self.n)
        if lanes is not None:
            address = address[lanes]
        return address.astype("i8")

    def _global(self, address: Array, size: int, lanes: Array | None, at: int, align: int = 0) -> tuple[Array, Any]:
        """Checked offsets into the global buffer, and the allocation (one number if it is the same for all)."""
        offset = self._picked(address, lanes)
        offset -= BASE
        low, high = int(offset.min()), int(offset.max())
        if int(np.bitwise_or.reduce(offset)) & ((align or size) - 1):
            bad = int(np.flatnonzero(offset & ((align or size) - 1))[0])
            self._fail(Misaligned, at, lanes, bad, int(offset[bad]) + BASE, f"is no multiple of {align or size}")
        index = self.memory.index_of(low)
        if index >= 0 and high + size <= self.memory.end_of(index):
            return offset, index
        indices, inside = self.memory.find(offset, size)
        if not inside.all():
            bad = int(np.flatnonzero(~inside)[0])
            where = int(offset[bad]) + BASE
            self._fail(OutOfBounds, at, lanes, bad, where, f"({size} bytes) is {self.memory.describe(where)}")
        return offset, indices

    def _bounded(
        self, address: Array, size: int, lanes: Array | None, at: int, limit: int, space: str, align: int = 0
    ) -> Array:
        """Checked addresses in shared or local memory, relative to its start."""
        offset = self._picked(address, lanes)
        if int(offset.max()) + size > limit or int(offset.min()) < 0:
            bad = int(np.flatnonzero((offset < 0) | (offset + size > limit))[0])
            text = f"({size} bytes) is outside the {limit} bytes of {space} memory"
            self._fail(OutOfBounds, at, lanes, bad, int(offset[bad]), text)
        if int(np.bitwise_or.reduce(offset)) & ((align or size) - 1):
            bad = int(np.flatnonzero(offset & ((align or size) - 1))[0])
            self._fail(Misaligned, at, lanes, bad, int(offset[bad]), f"is no multiple of {align or size}")
        return offset

    def _shared(self, address: Array, size: int, lanes: Array | None, at: int, write: bool, align: int = 0) -> Array:
        """Checked offsets into the shared memory of the batch."""
        offset = self._bounded(address, size, lanes, at, self.batch.shared_bytes, "shared", align)
        active = self._all if lanes is None else lanes
        if self.low < self.batch.first_block_threads:
            first = active < self.batch.first_block_threads - self.low
            self.counters.add_wavefronts(offset[first], active[first] + self.low, size)
        offset += self.shared_base if lanes is None else self.shared_base[lanes]
        if self.batch.detector is not None:
            self.batch.detector.access(offset, size, active + self.low, at, write)
        return offset

    def _fail(self, error: type[Exception], at: int, lanes: Array | None, bad: int, address: int, text: str) -> NoReturn:
        thread = self.low + (bad if lanes is None else int(lanes[bad]))
        instruction = self.batch.program.instructions[at]
        raise error(f"{instruction}\n  {self.batch.describe_thread(thread)}: address {address:#x} {text}")

    # ---- loads and stores

    def load_global(self, address: Array, code: str, parts: int, lanes: Array | None, at: int) -> Array:
        """Values [lanes, parts]."""
        size = _bytes(code) * parts
        if lanes is not None and not lanes.size:
            return np.empty((0, parts), code)
        offset, _ = self._global(address, size, lanes, at)
        self.counters.global_read_bytes += size * offset.size
        return _take(self.memory.views, offset, size, code)

    def load_shared(self, address: Array, code: str, parts: int, lanes: Array | None, at: int) -> Array:
        """Values [lanes, parts]."""
        size = _bytes(code) * parts
        if lanes is not None and not lanes.size:
            return np.empty((0, parts), code)
        return _take(self.batch.shared_views, self._shared(address, size, lanes, at, False), size, code)

    def load_local(self, address: Array, code: str, parts: int, lanes: Array | None, at: int) -> Array:
        """Values [lanes, parts]."""
        size = _bytes(code) * parts
        if lanes is not None and not lanes.size:
            return np.empty((0, parts), code)
        return _take(self.batch.local_views, self._local(address, size, lanes, at), size, code)

    def _local(self, address: Array, size: int, lanes: Array | None, at: int) -> Array:
        limit = self.batch.program.local.static_bytes
        offset = self._bounded(address, size, lanes, at, limit, "local")
        return offset + (self.local_base if lanes is None else self.local_base[lanes])

    def load_generic(self, address: Array, code: str, parts: int, lanes: Array | None, at: int) -> Array:
        """Values [lanes, parts] from wherever each address points."""
        active = self._all if lanes is None else lanes
        out = np.empty((active.size, parts), code)
        for space, window, part in self._spaces(address, active):
            if space == "param":
                size = _bytes(code)
                for k in range(parts):
                    out[part, k] = self.load_param(address[active[part]] - np.uint64(window), k * size, code, at)
                continue
            load = {"global": self.load_global, "shared": self.load_shared, "local": self.load_local}[space]
            out[part] = load(address - np.uint64(window), code, parts, active[part], at)
        return out

    def _spaces(self, address: Array, active: Array) -> list[tuple[str, int, Array]]:
        """Active lanes (as positions) by the state space that their generic address lies in."""
        where = np.broadcast_to(address, self.n)[active]
        number = np.zeros(active.size, "i1")
        spaces = (("global", 0), ("shared", SHARED_WINDOW), ("local", LOCAL_WINDOW), ("param", PARAM_WINDOW))
        for k, (_, window) in enumerate(spaces[1:], 1):
            number[where - np.uint64(window) < np.uint64(WINDOW_BYTES)] = k
        return [
            (space, window, np.flatnonzero(number == k))
            for k, (space, window) in enumerate(spaces)
            if (number == k).any()
        ]

    def load_param(self, address: Array | int, extra: int, code: str, at: int) -> Array:
        """Parameters at a fixed offset (one value) or at one offset for each thread."""
        size = _bytes(code)
        where = np.asarray(address).astype("i8") + extra
        if (where % size).any():
            raise Misaligned(f"{self.batch.program.instructions[at]}: parameter offset is no multiple of {size}")
        if where.min() < 0 or where.max() + size > self.batch.param_bytes:
            limit = self.batch.param_bytes
            raise OutOfBounds(f"{self.batch.program.instructions[at]}: outside the {limit} bytes of parameters")
        return np.asarray(self.batch.params.view(code).take(where // size))

    def store_global(self, address: Array, code: str, values: Sequence[Array], lanes: Array | None, at: int) -> None:
        """Store one vector for each lane."""
        if lanes is not None and not lanes.size:
            return
        size = _bytes(code) * len(values)
        offset, index = self._global(address, size, lanes, at)
        self.counters.global_written_bytes += size * offset.size
        self.counters.add_written(index, size, offset.size)
        _scatter(self.memory.views, offset, size, code, values, lanes)

    def store_shared(self, address: Array, code: str, values: Sequence[Array], lanes: Array | None, at: int) -> None:
        """Store one vector for each lane."""
        if lanes is not None and not lanes.size:
            return
        size = _bytes(code) * len(values)
        offset = self._shared(address, size, lanes, at, True)
        _scatter(self.batch.shared_views, offset, size, code, values, lanes)

    def store_local(self, address: Array, code: str, values: Sequence[Array], lanes: Array | None, at: int) -> None:
        """Store one vector for each lane."""
        if lanes is not None and not lanes.size:
            return
        size = _bytes(code) * len(values)
        _scatter(self.batch.local_views, self._local(address, size, lanes, at), size, code, values, lanes)

    def store_generic(self, address: Array, code: str, values: Sequence[Array], lanes: Array | None, at: int) -> None:
        """Store to wherever each address points."""
        active = self._all if lanes is None else lanes
        for space, window, part in self._spaces(address, active):
            store = {"global": self.store_global, "shared": self.store_shared, "local": self.store_local}.get(space)
            if store is None:
                self._fail(OutOfBounds, at, active, int(part[0]), 0, "parameters cannot be written")
            store(address - np.uint64(window), code, values, active[part], at)

    # ---- atomics

    def reduce(
        self, space: str, address: Array, operation: str, kind: str, values: Sequence[Array], compare: Array | None,
        lanes: Array | None, at: int,
    ) -> None:  # fmt: skip
        """red, and atom whose result nobody reads."""
        for views, offset, part in self._atomic_targets(space, address, kind, len(values), lanes, at):
            apply_reduction(views, offset, operation, kind, self._chosen(values, part), self._chosen([compare], part)[0])

    def atomic(
        self, space: str, address: Array, operation: str, kind: str, values: Sequence[Array], compare: Array | None,
        lanes: Array | None, at: int,
    ) -> Array:  # fmt: skip
        """atom: the old values [lanes, parts]."""
        active = self._all if lanes is None else lanes
        code = kind if kind in _CODES else ("u4" if kind.endswith("x2") else "u2")
        old = np.zeros((self.n, len(values)), code)
        for views, offset, part in self._atomic_targets(space, address, kind, len(values), lanes, at):
            chosen = self._chosen(values, part)
            old[part] = apply_atomic(views, offset, operation, kind, chosen, self._chosen([compare], part)[0])
        return old[active]

    def _chosen(self, values: Sequence[Array | None], lanes: Array) -> list[Any]:
        return [value if value is None else np.broadcast_to(value, self.n)[lanes] for value in values]

    def _atomic_targets(
        self, space: str, address: Array, kind: str, parts: int, lanes: Array | None, at: int
    ) -> list[tuple[dict[int, Array], Array, Array]]:
        """(views, offsets, lanes) for each state space that is hit."""
        active = self._all if lanes is None else lanes
        if not active.size:
            return []
        one = _bytes(kind) if kind in _CODES else (4 if kind.endswith("x2") else 2)
        targets = []
        pieces = [(space, 0, np.arange(active.size))] if space != "generic" else self._spaces(address, active)
        for name, window, part in pieces:
            where, chosen = address - address.dtype.type(window), active[part]
            if name == "shared":
                targets.append((self.batch.shared_views, self._shared_atomic(where, one * parts, chosen, at), chosen))
            elif name == "global":
                offset, index = self._global(where, one * parts, chosen, at)
                self.counters.add_written(index, one * parts, offset.size)
                self.counters.global_written_bytes += one * parts * offset.size
                self.counters.atomic_bytes += one * parts * offset.size
                targets.append((self.memory.views, offset, chosen))
            else:
                self._fail(OutOfBounds, at, active, int(part[0]), 0, f"atomics do not reach {name} memory")
        return targets

    def _shared_atomic(self, address: Array, size: int, lanes: Array, at: int) -> Array:
        """Atomics do not race with each other, so they only count as reads for the race detector."""
        return self._shared(address, size, lanes, at, False)

    # ---- matrices

    def load_matrices(
        self, address: Array, targets: Sequence[Array], transposed: bool, mask: Array | None, at: int
    ) -> None:
        """ldmatrix: lanes 8m .. 8m+7 of each warp give the rows of matrix m."""
        self.check_whole_warps(mask, at)
        count = len(targets)
        lanes = self._row_lanes(count, mask)
        offset = self._shared(address, 16, lanes, at, False)
        rows = self.batch.shared_views[16].take(offset >> 4)
        if mask is None:
            distribute_rows(rows.reshape(-1, count, 8), targets, transposed)
            return
        all_rows = np.zeros((self.n // 32, count, 8), "c16")
        all_rows[mask.reshape(-1, 32)[:, 0]] = rows.reshape(-1, count, 8)
        distribute_rows(all_rows, targets, transposed)

    def store_matrices(
        self, address: Array, sources: Sequence[Array], transposed: bool, mask: Array | None, at: int
    ) -> None:
        """stmatrix."""
        self.check_whole_warps(mask, at)
        lanes = self._row_lanes(len(sources), mask)
        offset = self._shared(address, 16, lanes, at, True)
        rows = collect_rows(sources, self.n, transposed)
        if mask is not None:
            rows = rows[mask.reshape(-1, 32)[:, 0]]
        self.batch.shared_views[16][offset >> 4] = rows.reshape(-1)

    def _row_lanes(self, matrices: int, mask: Array | None) -> Array | None:
        if mask is None and matrices == 4:
            return None
        lanes = self._all.reshape(-1, 32)
        if mask is not None:
            lanes = lanes[mask.reshape(-1, 32)[:, 0]]
        return lanes[:, : 8 * matrices].reshape(-1)

    # ---- checks of warp-wide instructions

    def check_whole_warps(self, mask: Array | None, at: int) -> None:
        """Instructions marked .aligned need every lane of the warp."""
        if mask is None:
            return
        warps = mask.reshape(-1, 32)
        part = warps.any(1) & ~warps.all(1)
        if part.any():
            self._diverged(int(part.argmax()), warps, at)

    def check_members(self, members: Array, mask: Array | None, at: int) -> None:
        """Every lane that a .sync instruction names must execute it with the others."""
        active = np.ones(self.n, bool) if mask is None else mask
        bits = np.packbits(active.reshape(-1, 32), axis=1, bitorder="little").view("u4")
        # a lane beyond the end of the block or one that has exited cannot take part and is not waited for
        gone = self.batch.exited(self.low, self.high)
        missing = np.broadcast_to(members, self.n).reshape(-1, 32) & ~bits & ~gone
        bad = (missing != 0) & active.reshape(-1, 32)
        if bad.any():
            self._diverged(int(bad.any(1).argmax()), active.reshape(-1, 32), at)

    def _diverged(self, warp: int, warps: Array, at: int) -> NoReturn:
        lanes = np.flatnonzero(warps[warp]).tolist()
        where = self.batch.describe_thread(self.low + 32 * warp + lanes[0])
        instruction = self.batch.program.instructions[at]
        raise DivergentBarrier(f"{instruction}\n  {where}: only lanes {lanes} of the warp execute it together")

    def trap(self, lanes: Array | None, at: int) -> None:
        """Stop if any lane is here."""
        active = self._all if lanes is None else lanes
        if active.size:
            where = self.batch.describe_thread(self.low + int(active[0]))
            raise Trap(f"{self.batch.program.instructions[at]}\n  {where}")

    # ---- asynchronous copies

    def copy_async(
        self, target: Array, source: Array, size: int, filled: Array | None, lanes: Array | None, at: int
    ) -> None:
        """cp.async: checked and counted now, done at the wait that covers it."""
        if lanes is not None and not lanes.size:
            return
        active = self._all if lanes is None else lanes
        to = self._shared(target, size, lanes, at, True)
        amount = None if filled is None else np.broadcast_to(filled, self.n)[active]
        if amount is not None and (amount >= size).all():
            amount = None
        if amount is None:
            offset, _ = self._global(source, size, lanes, at)
        else:
            offset = self._partial_source(source, size, amount, active, at)
        self.counters.async_copied_bytes += size * active.size
        self.batch.copies.add(active + self.low, to, offset, size, amount, at)

    def _partial_source(self, source: Array, size: int, amount: Array, active: Array, at: int) -> Array:
        """Offsets of copies that read `amount` bytes and fill the rest with zeros; what is not read is not checked."""
        offset = np.zeros(active.size, "i8")
        for count in np.unique(amount):
            part = np.flatnonzero(amount == count)
            if count > size:
                self._fail(OutOfBounds, at, active, int(part[0]), int(count), f"bytes asked of a copy of {size}")
            if count:
                offset[part], _ = self._global(source, int(count), active[part], at, align=size)
        return offset

    def commit(self, mask: Array | None) -> None:
        """cp.async.commit_group."""
        self.batch.copies.commit(self.low, self.high, mask)

    def wait(self, pending: int, mask: Array | None, at: int) -> None:
        """cp.async.wait_group."""
        self.batch.copies.wait(self.low, self.high, pending, mask, at)


_CODES = frozenset(("u1", "i1", "u2", "i2", "u4", "i4", "f4", "u8", "i8", "f8"))


def _bytes(code: str) -> int:
    return int(code[1])


def _take(views: dict[int, Array], offset: Array, size: int, code: str) -> Array:
    shift = size.bit_length() - 1
    items = views[size].take(offset >> shift if shift else offset)
    return items.view(code).reshape(offset.size, -1)


def _scatter(
    views: dict[int, Array], offset: Array, size: int, code: str, values: Sequence[Array], lanes: Array | None
) -> None:
    where = offset >> (size.bit_length() - 1)
    if len(values) == 1:
        value = values[0]
        views[size][where] = value if lanes is None or not value.ndim else value[lanes]
        return
    rows = np.empty((offset.size, len(values)), code)
    for k, value in enumerate(values):
        rows[:, k] = value if lanes is None or not value.ndim else value[lanes]
    views[size][where] = rows.view(ITEM_TYPES[size]).reshape(-1)
