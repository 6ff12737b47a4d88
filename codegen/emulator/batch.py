"""Hold the state of the thread blocks that run together: registers, shared memory, program counters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .async_copy import CopyQueue
from .counters import Counters
from .emitter import Binding, Lowered
from .group_products import GroupProducts
from .group_tiles import WARPGROUP
from .mbarriers import Mbarriers
from .memory import ITEM_TYPES, GlobalMemory
from .namespace import NAMES
from .ordering import OrderDetector
from .program import Program
from .races import RaceDetector
from .special import special_register
from .transfers import Transfers
from .window import Window

Array: TypeAlias = "NDArray[Any]"

END = 1 << 30
"""Program counter of a thread that has exited."""

_ROWS = 64  # arrays of one width that are allocated at a time


@dataclass(frozen=True, slots=True)
class Plan:
    """What all batches of a launch have in common. `params` is the parameter memory."""

    program: Program
    block_size: tuple[int, int, int]
    grid: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    params: bytes
    memory: GlobalMemory
    counters: Counters
    detector: RaceDetector | OrderDetector | None
    count: bool
    late: bool


class Batch:
    """Thread blocks in lock-step, each padded to whole warps or warpgroups and cut into teams that do similar work.

    Threads lie team after team, and within a team block after block. Most kernels have one team, the whole block.
    Warp-specialised ones have a team for each warpgroup: a role is then a contiguous range and runs without masks.
    """

    def __init__(self, plan: Plan, blocks: int) -> None:
        self.program, self.memory, self.counters = plan.program, plan.memory, plan.counters
        self.detector, self.count, self.late = plan.detector, plan.count, plan.late
        self.order = plan.detector if isinstance(plan.detector, OrderDetector) else None
        self.block_size, self.grid, self.blocks = plan.block_size, plan.grid, blocks
        self.cluster, self.cluster_blocks = plan.cluster, math.prod(plan.cluster)  # those of one lie side by side
        self.params = np.frombuffer(plan.params + bytes(-len(plan.params) % 16), "u1")
        self.param_bytes = len(plan.params)
        threads_in_block = plan.block_size[0] * plan.block_size[1] * plan.block_size[2]
        unit = WARPGROUP if plan.program.by_warpgroup and threads_in_block > WARPGROUP else 32
        self.threads_per_block = -(-threads_in_block // unit) * unit
        self.warps_per_block = self.threads_per_block // 32
        self.threads = blocks * self.threads_per_block
        whole = plan.program.by_warpgroup and self.threads_per_block % WARPGROUP == 0
        self.teams = self.threads_per_block // WARPGROUP if whole else 1
        self.team_threads = self.threads_per_block // self.teams
        thread = np.arange(self.threads, dtype="i8")
        team = thread // (blocks * self.team_threads)
        # threads of which the others wait when one does: what they do next they may have to do together
        self.company = WARPGROUP if whole else 32
        self.block_of = thread // self.team_threads % blocks
        self.thread_in_block = (team * self.team_threads + thread % self.team_threads).astype("u4")
        self.warp_in_block = (self.thread_in_block[::32] >> np.uint32(5)).astype("i8")
        self.warp_in_cluster = self.block_of[::32] % self.cluster_blocks * self.warps_per_block + self.warp_in_block
        self._padding = self.thread_in_block >= threads_in_block
        self.block_ids = np.zeros((blocks, 3), "u4")
        self.pc = np.zeros(self.threads, "i4")
        self.writes = 0  # stores, atomics and copies so far: a loop that spins makes none
        self.barrier: list[tuple[Array, Array | None]] = []  # operands of the barrier or jump that ended a block
        self.counts_wavefronts = False  # of the first block of the launch
        self._make_memory(plan.shared_bytes)
        self.copies = CopyQueue(self)
        self.mbarriers = Mbarriers(self)
        self.transfers = Transfers(self)
        self.products = GroupProducts(self)
        self._special: dict[str, Array] = {}
        self._registers: dict[tuple[int, str | int], Array] = {}  # by bytes and Binding.key
        self._free_rows: dict[int, list[Array]] = {1: [], 2: [], 4: [], 8: []}
        self._windows: dict[tuple[int, int], Window] = {}
        self._functions: dict[tuple[int, bool, int, int], FunctionType] = {}

    def _make_memory(self, shared_bytes: int) -> None:
        """Shared memory for each block and local memory for each thread, one behind the other."""
        self.shared_bytes = shared_bytes
        self.shared_stride = max(16, -(-shared_bytes // 16) * 16)
        self.shared = _aligned(self.blocks * self.shared_stride)
        self.shared_views = _views(self.shared)
        self.shared_base = self.block_of * self.shared_stride
        local_stride = -(-self.program.local.static_bytes // 16) * 16
        self.local = _aligned(self.threads * local_stride)
        self.local_views = _views(self.local)
        self.local_base = np.arange(self.threads) * local_stride

    def start(self, block_ids: Array, first: bool) -> None:
        """Begin with new thread blocks: poisoned shared memory, all threads at the start."""
        self.block_ids = block_ids
        for name in self._special:
            if name.startswith(("%ctaid", "%clusterid")):
                self._special[name][:] = special_register(self, name)
        self.shared.fill(0xFF)
        self.local.fill(0xFF)
        self.pc.fill(0)
        self.pc[self._padding] = END
        self.copies.clear()
        self.mbarriers.start()
        self.transfers.start()
        self.products.start()
        self.counts_wavefronts = first and self.count
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

    def register(self, name: str) -> Array:
        """The array of a register of 32 bits that outlives its block."""
        return self._register(4, name)

    def _register(self, width: int, key: str | int) -> Array:
        whole = self._registers.get((width, key))
        if whole is None:
            whole = self._registers[width, key] = self._row(width)
        return whole

    def special(self, name: str) -> Array:
        """The array of a special register such as %tid.x."""
        if name not in self._special:
            self._special[name] = special_register(self, name)
        return self._special[name]

    def _view(self, binding: Binding, low: int, high: int) -> Array:
        key, width, code = binding
        if not width:
            array = self.special(str(key))[low:high]
            if code == "u8" or code == "i8":
                return array.astype(code)
            width = 4
        else:
            array = self._register(width, key)[low:high]
        if code == "b1":
            return array
        view: Array = array.view(code)
        step = width // int(code[1])
        return view if step == 1 else view[::step]

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
                names[python] = self._view(binding, low, high)
            window = self.window(low, high)
            names.update(W=window, n=high - low, B=self.barrier)
            found = self._functions[key] = FunctionType(lowered.code, names)
        return found

    @property
    def living(self) -> Array:
        """Which threads have not exited."""
        return self.pc < END

    def living_lanes(self) -> Array:
        """Threads of each warp that have not exited."""
        return self.living.reshape(-1, 32).sum(1)

    def living_threads(self, block: int) -> int:
        """Threads of a block that have not exited."""
        return int((self.of_block(self.pc, block) < END).sum())

    def of_block(self, values: Array, block: int) -> Array:
        """The part [teams, threads or warps of a team] that belongs to one block, of an array over all of the batch."""
        return values.reshape(self.teams, self.blocks, -1)[:, block]

    def whole_blocks(self, low: int, high: int) -> bool:
        """Whether a range of threads consists of whole blocks."""
        if self.teams > 1:
            return low == 0 and high == self.threads
        return low % self.threads_per_block == 0 and high % self.threads_per_block == 0

    def exited(self, low: int, high: int) -> Array:
        """For each warp of a range: a bit for each lane that has exited (or never was)."""
        gone = self.pc[low:high] >= END
        return np.packbits(gone.reshape(-1, 32), axis=1, bitorder="little").view("u4")

    def register_state(self, low: int, high: int) -> list[Array]:
        """A copy of all registers of a range of threads."""
        return [array[low:high].copy() for array in self._registers.values()]

    def same_registers(self, state: list[Array], low: int, high: int) -> bool:
        """Whether the registers still are what they were."""
        arrays = list(self._registers.values())
        return len(arrays) == len(state) and all(
            bool((array[low:high].view(f"u{array.dtype.itemsize}") == old.view(f"u{old.dtype.itemsize}")).all())
            for array, old in zip(arrays, state, strict=True)
        )

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


def _views(octets: Array) -> dict[int, Array]:
    return {size: octets.view(code) for size, code in ITEM_TYPES.items() if octets.size % size == 0}
