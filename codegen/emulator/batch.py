"""Hold the state of the thread blocks that run together: registers, shared memory, program counters."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .async_copy import CopyQueue
from .counters import Counters
from .emitter import Binding, Lowered
from .memory import ITEM_TYPES, GlobalMemory
from .namespace import NAMES
from .program import Program
from .races import RaceDetector
from .window import Window

Array = NDArray[Any]

END = 1 << 30
"""Program counter of a thread that has exited."""

_ROWS = 64  # arrays of one width that are allocated at a time


class Batch:
    """Thread blocks in lock-step. Threads lie block after block, each block padded to whole warps."""

    def __init__(
        self,
        program: Program,
        blocks: int,
        block_size: tuple[int, int, int],
        grid: tuple[int, int, int],
        shared_bytes: int,
        memory: GlobalMemory,
        params: bytes,
        counters: Counters,
        detector: RaceDetector | None,
        count: bool,
    ) -> None:
        self.program, self.blocks, self.memory, self.counters = program, blocks, memory, counters
        self.block_size, self.grid = block_size, grid
        self.block_threads = block_size[0] * block_size[1] * block_size[2]
        self.warps_per_block = -(-self.block_threads // 32)
        self.threads_per_block = 32 * self.warps_per_block
        self.threads = blocks * self.threads_per_block
        self.shared_bytes = shared_bytes
        self.shared_stride = max(16, -(-shared_bytes // 16) * 16)
        self.local_stride = -(-program.local.static_bytes // 16) * 16
        self.shared = _aligned(blocks * self.shared_stride)
        self.shared_views = {size: self.shared.view(code) for size, code in _items(self.shared)}
        self.local = _aligned(self.threads * self.local_stride)
        self.local_views = {size: self.local.view(code) for size, code in _items(self.local)}
        self.params = np.frombuffer(params + bytes(-len(params) % 16), "u1")
        self.param_bytes = len(params)
        thread = np.arange(self.threads, dtype="i8")
        self.block_of = thread // self.threads_per_block
        self.shared_base = self.block_of * self.shared_stride
        self.local_base = thread * self.local_stride
        self.thread_in_block = (thread % self.threads_per_block).astype("u4")
        self.warp_in_block = self.thread_in_block >> np.uint32(5)
        self.padding = self.thread_in_block >= self.block_threads
        self.pc = np.zeros(self.threads, "i4")
        self.copies = CopyQueue(self)
        self.detector = detector
        self.count = count
        self.first_block_threads = 0
        self.block_ids = np.zeros((blocks, 3), "u4")
        self._special: dict[str, Array] = {}
        self._registers: dict[tuple[int, str | int], Array] = {}
        self._free_rows: dict[int, list[Array]] = {1: [], 2: [], 4: [], 8: [], 16: []}
        self._windows: dict[tuple[int, int], Window] = {}
        self._functions: dict[tuple[int, bool, int, int], FunctionType] = {}

    def start(self, block_ids: Array, first: bool) -> None:
        """Begin with new thread blocks: poisoned shared memory, all threads at the start."""
        self.block_ids = block_ids
        for axis, name in enumerate("xyz"):
            if f"%ctaid.{name}" in self._special:
                self._special[f"%ctaid.{name}"][:] = block_ids[self.block_of, axis]
        self.shared.fill(0xFF)
        self.local.fill(0xFF)
        self.pc.fill(0)
        self.pc[self.padding] = END
        self.copies.clear()
        self.first_block_threads = self.threads_per_block if first and self.count else 0
        if self.detector is not None:
            self.detector.start(self)

    # ---- registers and code

    def _row(self, width: int) -> Array:
        if not self._free_rows[width]:
            size = -(-self.threads * width // 64) * 64
            octets = _aligned(_ROWS * size).reshape(_ROWS, size)
            self._free_rows[width] = list(octets[:, : self.threads * width])
        row = self._free_rows[width].pop()
        return row.view(bool) if width == 1 else row.view(ITEM_TYPES[width])

    def register(self, name: str, slots: dict[str, int]) -> Array:
        """The array of a register; registers that live within one block share arrays by slot."""
        width = self.program.width(name)
        key: tuple[int, str | int] = (width, slots.get(name, name))
        if key not in self._registers:
            self._registers[key] = self._row(width)
        return self._registers[key]

    def special(self, name: str) -> Array:
        """The array of a special register such as %tid.x."""
        if name not in self._special:
            self._special[name] = self._make_special(name)
        return self._special[name]

    def _make_special(self, name: str) -> Array:
        x, y, _ = self.block_size
        thread = self.thread_in_block
        lane = thread & np.uint32(31)
        one = np.uint32(1)
        full = np.full(self.threads, 0, "u4")
        base, _, axis = name.partition(".")
        index = "xyz".find(axis) if axis else -1
        if base == "%tid" and index >= 0:
            return (thread % x, thread // x % y, thread // (x * y))[index].astype("u4")
        if base == "%ctaid" and index >= 0:
            return self.block_ids[self.block_of, index].astype("u4")
        if base in ("%ntid", "%nctaid") and index >= 0:
            return full + np.uint32((self.block_size if base == "%ntid" else self.grid)[index])
        values: dict[str, Array] = {
            "%laneid": lane,
            "%warpid": self.warp_in_block,
            "%nwarpid": full + np.uint32(self.warps_per_block),
            "%lanemask_eq": one << lane,
            "%lanemask_lt": (one << lane) - one,
            "%lanemask_le": (one << lane) | ((one << lane) - one),
            "%lanemask_gt": ~((one << lane) | ((one << lane) - one)),
            "%lanemask_ge": ~((one << lane) - one),
            "%dynamic_smem_size": full + np.uint32(self.shared_bytes - self.program.shared.dynamic_offset),
            "%total_smem_size": full + np.uint32(self.shared_bytes),
            "%gridid": np.zeros(self.threads, "u8"),
        }
        if name not in values:
            from .errors import UnknownInstruction

            raise UnknownInstruction(f"the special register {name} is not implemented")
        return values[name]

    def _view(self, binding: Binding, slots: dict[str, int], low: int, high: int) -> Array:
        name, code, narrow = binding
        if name in self.program.registers:
            array = self.register(name, slots)[low:high]
        else:
            array = self.special(name)[low:high]
        if code == "b1":
            return array
        width = array.dtype.itemsize
        if width < int(code[1]):
            return array.astype(code)
        return array.view(code)[:: width // int(code[1])] if narrow or width > int(code[1]) else array.view(code)

    def window(self, low: int, high: int) -> Window:
        """The executor of memory instructions for threads low .. high."""
        key = (low, high)
        if key not in self._windows:
            self._windows[key] = Window(self, low, high)
        return self._windows[key]

    def function(self, block: int, masked: bool, low: int, high: int) -> FunctionType:
        """The code of a block, bound to the registers of a range of threads."""
        key = (block, masked, low, high)
        found = self._functions.get(key)
        if found is None:
            if len(self._functions) > 2000:  # ranges of threads that come and go must not fill the memory
                self._functions.clear()
            lowered: Lowered = self.program.lowered(block, masked)
            names: dict[str, Any] = dict(NAMES)
            names.update(lowered.constants)
            for python, binding in lowered.bindings.items():
                names[python] = self._view(binding, lowered.slots, low, high)
            window = self.window(low, high)
            names.update(W=window, n=high - low, B=window.barrier)
            found = self._functions[key] = FunctionType(lowered.code, names)
        return found

    def living_lanes(self) -> Array:
        """Threads of each warp that have not exited."""
        return (self.pc < END).reshape(-1, 32).sum(1)

    def living_threads(self, block: int) -> int:
        """Threads of a block that have not exited."""
        start = block * self.threads_per_block
        return int((self.pc[start : start + self.threads_per_block] < END).sum())

    def exited(self, low: int, high: int) -> Array:
        """For each warp of a range: a bit for each lane that has exited (or never was)."""
        gone = self.pc[low:high] >= END
        return np.packbits(gone.reshape(-1, 32), axis=1, bitorder="little").view("u4")

    def describe_thread(self, thread: int) -> str:
        """Block and thread indices, for messages."""
        x, y, z = (int(v) for v in self.block_ids[self.block_of[thread]])
        t = int(self.thread_in_block[thread])
        bx, by, _ = self.block_size
        return f"block ({x}, {y}, {z}), thread ({t % bx}, {t // bx % by}, {t // (bx * by)})"


def _aligned(size: int) -> Array:
    """Zeroed bytes that start at a cache line: vector loads across lines cost double."""
    octets = np.zeros(size + 64, "u1")
    start = -octets.ctypes.data % 64
    return octets[start : start + size]


def _items(octets: Array) -> list[tuple[int, str]]:
    return [(size, code) for size, code in ITEM_TYPES.items() if octets.size % size == 0]
