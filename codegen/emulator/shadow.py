"""Remember, for each granule of shared memory, who wrote it last and when each warp last read it."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"

FOREVER = np.iinfo("i4").max
"""The time of a read that is still going on: nothing is ordered after it."""


class Shadow:
    """Times are clocks of those who access: a warp of the block, or (writes only) the traffic of an mbarrier.

    `clocks[row]` is what somebody knows of the clocks of all of these; an access is ordered before his if he knows its
    time. Time 0 stands for no access.
    """

    def __init__(self, granules: int, warps: int) -> None:
        self.writer = np.zeros(granules, "i2")
        self.written = np.zeros(granules, "i4")
        self.written_at = np.zeros(granules, "i4")  # number of the instruction
        self.copied = np.zeros(granules, bool)  # the write was a cp.async
        self.atomic = np.zeros(granules, bool)
        self.read = np.zeros((granules, warps), "i4")
        self.read_at = np.zeros((granules, warps), "i4")

    def unordered_writes(self, where: Array, clocks: Array, row: Array) -> Array:
        """Positions in `where` whose last write is not ordered before somebody."""
        return np.flatnonzero(self.written[where] > clocks[row, self.writer[where]])

    def unordered_reads(self, where: Array, clocks: Array, row: Array) -> tuple[Array, Array]:
        """Positions in `where` that a warp has read (the second array: which) without being ordered before somebody."""
        late = self.read[where] > clocks[row, : self.read.shape[1]]
        index = np.flatnonzero(late.any(1))
        return index, late[index].argmax(1)

    def note_write(self, where: Array, writer: Array | int, time: Array | int, at: int) -> None:
        """A write replaces what was known of a granule."""
        self.writer[where] = writer
        self.written[where] = time
        self.written_at[where] = at
        self.copied[where] = False
        self.atomic[where] = False
        self.read[where] = 0

    def note_read(self, where: Array, warp: Array, time: Array, at: int) -> None:
        """Warps of the block read; a read that still goes on stays the last."""
        self.read[where, warp] = np.maximum(self.read[where, warp], time)
        self.read_at[where, warp] = at
