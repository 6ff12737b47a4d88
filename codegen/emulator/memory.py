"""Keep global memory: allocations with guard gaps between them, found by address."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from .errors import OutOfBounds

Array: TypeAlias = "NDArray[Any]"

BASE = 0x7_0000_0000
"""Device address of the first byte of the buffer."""

ALIGNMENT = 256
GUARD_BYTES = 4096
ITEM_TYPES = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16", 32: "V32"}
"""NumPy codes that move that many bytes as one item."""


class GlobalMemory:
    """Device memory that grows as needed; nothing is ever freed.

    >>> memory = GlobalMemory()
    >>> address = memory.upload(np.arange(3, dtype="f4"))
    >>> memory.read(address, (3,), "f4").tolist()
    [0.0, 1.0, 2.0]
    """

    def __init__(self) -> None:
        self._buffer: Array = np.zeros(1 << 20, "u1")
        self._top = GUARD_BYTES
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.views: dict[int, Array] = {}
        # module variables by module and name; the module is kept so that its id stays its own
        self.variables: dict[tuple[int, str], tuple[object, int]] = {}
        self._make_views()

    def _make_views(self) -> None:
        self.views = {size: self._buffer.view(code) for size, code in ITEM_TYPES.items()}

    def _allocate(self, size: int) -> int:
        start = self._top
        end = start + size
        self._top = -(-(end + GUARD_BYTES) // ALIGNMENT) * ALIGNMENT
        if self._top > self._buffer.size:
            larger = np.zeros(max(2 * self._buffer.size, 1 << self._top.bit_length()), "u1")
            larger[: self._buffer.size] = self._buffer
            self._buffer = larger
            self._make_views()
        self._starts.append(start)
        self._ends.append(end)
        return start

    def upload(self, array: ArrayLike) -> int:
        """Copy an array to the device; returns its address."""
        octets = np.ascontiguousarray(array).reshape(-1).view("u1")
        start = self._allocate(octets.size)
        self._buffer[start : start + octets.size] = octets
        return BASE + start

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> int:
        """Allocate without data: every byte is 0xFF, which is NaN in every floating type."""
        size = int(np.prod(shape, dtype="i8")) * np.dtype(dtype).itemsize
        start = self._allocate(size)
        self._buffer[start : start + size] = 0xFF
        return BASE + start

    def read(self, address: int, shape: int | tuple[int, ...], dtype: DTypeLike) -> Array:
        """Copy data back from the device."""
        size = int(np.prod(shape, dtype="i8")) * np.dtype(dtype).itemsize
        start = address - BASE
        index = self.index_of(start)
        if size and (index < 0 or start + size > self._ends[index]):
            raise OutOfBounds(f"reading {size} bytes at {address:#x}: {self.describe(address)}")
        return self._buffer[start : start + size].copy().view(dtype).reshape(shape)

    # ---- for the emulator

    @property
    def allocations(self) -> list[tuple[int, int]]:
        """First address and the address behind the last byte of each allocation."""
        return [(BASE + start, BASE + end) for start, end in zip(self._starts, self._ends, strict=True)]

    def index_of(self, offset: int) -> int:
        """Number of the allocation that contains an offset into the buffer, -1 if none does."""
        index = bisect_right(self._starts, offset) - 1
        return index if index >= 0 and offset < self._ends[index] else -1

    def end_of(self, index: int) -> int:
        """Offset behind the last byte of an allocation."""
        return self._ends[index]

    def find(self, offsets: Array, size: int) -> tuple[Array, Array]:
        """For many offsets: the number of the allocation, and whether `size` bytes from there lie in it."""
        if not self._starts:
            return np.full(offsets.shape, -1), np.zeros(offsets.shape, bool)
        index = np.searchsorted(np.array(self._starts), offsets, "right") - 1
        inside = (index >= 0) & (offsets + size <= np.array(self._ends)[index])
        return index, inside

    def describe(self, address: int) -> str:
        """Where an address lies relative to the nearest allocation, in words."""
        if not self._starts:
            return "there is no allocation"
        best, text = None, ""
        for start, end in self.allocations:
            distance = start - address if address < start else max(0, address - end + 1)
            if best is None or distance < best:
                best = distance
                where = f"{start - address} bytes before" if address < start else f"{address - start} bytes into"
                text = f"{where} the nearest allocation, {end - start} bytes at {start:#x}"
        return text
