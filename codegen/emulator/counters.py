"""Count what a launch does: instructions, bytes, and the shared-memory wavefronts of the first block."""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"


class Counters:
    """Totals of one launch; windows add to them while they execute."""

    def __init__(self, allocations: int) -> None:
        self.block_warps: Counter[int] = Counter()  # executions of each basic block, counted in warps
        self.global_read_bytes = 0
        self.global_written_bytes = 0
        self.atomic_bytes = 0
        self.async_copied_bytes = 0
        self.barriers = 0
        self.unfinished_barriers = 0
        self.register_shares: dict[int, int] = {}
        self.wavefronts = 0
        self.wavefronts_ideal = 0
        self.written = [0] * allocations
        self._patterns: dict[tuple[int, bytes, bytes], tuple[int, int]] = {}

    def add_written(self, index: int | Array, size: int, count: int) -> None:
        """Account stores of `size` bytes to allocations."""
        if isinstance(index, int):
            self.written[index] += size * count
            return
        for number, times in zip(*np.unique(index, return_counts=True), strict=True):
            self.written[int(number)] += size * int(times)

    def add_wavefronts(self, addresses: Array, lanes: Array | None, size: int) -> None:
        """Account one shared access of threads `lanes` (from the start of a warp on), `size` bytes each.

        A wavefront moves up to 128 bytes, one word from each of 32 banks: accesses of 16 bytes go by quarters of a
        warp, 8 bytes by halves; within such a phase each bank serves one distinct word per wavefront. Patterns repeat
        from iteration to iteration up to a multiple of 128 bytes, so each distinct one is computed once.
        """
        relative = addresses - (int(addresses[0]) & ~127)
        key = (size, relative.tobytes(), b"" if lanes is None else lanes.tobytes())
        found = self._patterns.get(key)
        if found is None:
            threads = np.arange(addresses.size) if lanes is None else lanes
            found = self._patterns[key] = count_wavefronts(relative, threads, size)
        self.wavefronts += found[0]
        self.wavefronts_ideal += found[1]


def count_wavefronts(addresses: Array, lanes: Array, size: int) -> tuple[int, int]:
    """Wavefronts that an access needs, and what it would need without bank conflicts.

    >>> count_wavefronts(np.arange(32) * 4, np.arange(32), 4), count_wavefronts(np.arange(32) * 8, np.arange(32), 4)
    ((1, 1), (2, 1))
    """
    width = max(size, 4)
    banks = 128 // width
    phase = lanes.astype("i8") // min(banks, 32)
    words = np.unique(phase << 40 | addresses.astype("i8") // width)
    phases, slot = np.unique(words >> 40, return_inverse=True)
    load = np.bincount(slot * banks + words % banks, minlength=phases.size * banks).reshape(-1, banks)
    return int(load.max(1).sum()), phases.size
