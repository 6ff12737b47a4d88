"""Check every address that a range of threads uses, and say precisely what is wrong with a bad one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .addresses import OFFSET_MASK, RANK_SHIFT
from .errors import Misaligned, OutOfBounds
from .memory import BASE

if TYPE_CHECKING:
    from .batch import Batch

Array: TypeAlias = "NDArray[Any]"


class Access:
    """Threads low .. high of a batch, and where in memory they may go.

    `lanes` are indices of the active threads within the range, in rising order, None if all are active; there is
    always at least one. `at` is the index of the instruction, for messages and checks.
    """

    def __init__(self, batch: Batch, low: int, high: int) -> None:
        self.batch, self.low, self.high, self.n = batch, low, high, high - low
        self.memory, self.counters = batch.memory, batch.counters
        self.all = np.arange(self.n)
        first = batch.block_of[low:high] == 0
        self._in_first_block = first if first.any() else None
        self._shared_base = batch.shared_base[low:high]
        self._local_base = batch.local_base[low:high]

    def active(self, lanes: Array | None) -> Array:
        """Indices of the active threads."""
        return self.all if lanes is None else lanes

    def _picked(self, address: Array, lanes: Array | None) -> Array:
        """Addresses of the active threads as int64."""
        if address.ndim == 0:
            address = np.broadcast_to(address, self.n)
        if lanes is not None:
            address = address[lanes]
        return address.astype("i8")

    def in_global(
        self, address: Array, size: int, lanes: Array | None, at: int, align: int
    ) -> tuple[Array, int | Array]:
        """Offsets into the global buffer, and the number of the allocation (one if it is the same for all)."""
        offset = self._picked(address, lanes)
        offset -= BASE
        low, high = int(offset.min()), int(offset.max())
        if int(np.bitwise_or.reduce(offset)) & (align - 1):
            self._misaligned(offset, BASE, lanes, at, align)
        index = self.memory.index_of(low)
        if index >= 0 and high + size <= self.memory.end_of(index):
            return offset, index
        indices, inside = self.memory.find(offset, size)
        if not inside.all():
            bad = int(np.flatnonzero(~inside)[0])
            where = int(offset[bad]) + BASE
            text = f"address {where:#x} ({size} bytes) is {self.memory.describe(where)}"
            self.fail(OutOfBounds, at, lanes, bad, text)
        return offset, indices

    def in_shared(self, address: Array, size: int, lanes: Array | None, at: int, align: int) -> Array:
        """Offsets into the shared memory of the batch, counted. The caller shows them to the race detector."""
        offset = self.in_shared_uncounted(address, size, lanes, at, align)
        batch = self.batch
        if batch.counts_wavefronts and self._in_first_block is not None:
            first = self._in_first_block if lanes is None else self._in_first_block[lanes]
            chosen = offset[first]
            if chosen.size:
                self.counters.add_wavefronts(chosen, None if lanes is None else lanes[first], size)
        return offset

    def in_shared_uncounted(self, address: Array, size: int, lanes: Array | None, at: int, align: int) -> Array:
        """Offsets into the shared memory of the batch, for what is no load or store of a thread."""
        offset = self._bounded(address, size, lanes, at, self.batch.shared_bytes, "shared", align)
        offset += self._shared_base if lanes is None else self._shared_base[lanes]
        return offset

    def in_cluster(self, address: Array, size: int, lanes: Array | None, at: int, align: int) -> Array:
        """Offsets of addresses that may be those of another block of the cluster, for what is no load or store."""
        if self.batch.cluster_blocks == 1:
            return self.in_shared_uncounted(address, size, lanes, at, align)
        limit = self.batch.shared_bytes
        offset = self._bounded(address & address.dtype.type(OFFSET_MASK), size, lanes, at, limit, "shared", align)
        return offset + self.blocks_named(address, lanes) * self.batch.shared_stride

    def blocks_named(self, address: Array, lanes: Array | None) -> Array:
        """The block that the address of each active thread names: its own unless the address has a rank."""
        own: Array = self.batch.block_of[self.threads(lanes)]
        rank = self._picked(address, lanes) >> RANK_SHIFT
        return np.where(rank > 0, own - own % self.batch.cluster_blocks + rank - 1, own)

    def threads(self, lanes: Array | None) -> Array:
        """Numbers of the active threads in the batch."""
        return self.active(lanes) + self.low

    def in_local(self, address: Array, size: int, lanes: Array | None, at: int, align: int) -> Array:
        """Offsets into the local memory of the batch."""
        limit = self.batch.program.local.static_bytes
        offset = self._bounded(address, size, lanes, at, limit, "local", align)
        return offset + (self._local_base if lanes is None else self._local_base[lanes])

    def _bounded(
        self, address: Array, size: int, lanes: Array | None, at: int, limit: int, space: str, align: int
    ) -> Array:
        offset = self._picked(address, lanes)
        if int(offset.view("u8").max()) + size > limit:  # a negative address is a huge one when seen unsigned
            bad = int(np.flatnonzero(offset.view("u8") > limit - size if limit >= size else offset == offset)[0])
            text = f"address {int(offset[bad]):#x} ({size} bytes) is outside the {limit} bytes of {space} memory"
            self.fail(OutOfBounds, at, lanes, bad, text)
        if int(np.bitwise_or.reduce(offset)) & (align - 1):
            self._misaligned(offset, 0, lanes, at, align)
        return offset

    def _misaligned(self, offset: Array, base: int, lanes: Array | None, at: int, align: int) -> NoReturn:
        bad = int(np.flatnonzero(offset & (align - 1))[0])
        self.fail(Misaligned, at, lanes, bad, f"address {int(offset[bad]) + base:#x} is no multiple of {align}")

    def fail(self, error: type[Exception], at: int, lanes: Array | None, bad: int, text: str) -> NoReturn:
        """Raise an error of the active thread number `bad`."""
        thread = self.low + int(self.active(lanes)[bad])
        raise error(f"{self.batch.program.instructions[at]}\n  {self.batch.describe_thread(thread)}: {text}")
