"""Launch a kernel: check the arguments, run its blocks in batches, report."""

from __future__ import annotations

import struct
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .batch import Batch
from .classes import CLASSES
from .counters import Counters
from .memory import GlobalMemory
from .parse import Kernel, Param
from .program import Program
from .races import RaceDetector
from .report import Report
from .schedule import Scheduler

Array = NDArray[Any]
Size: TypeAlias = "int | tuple[int, ...]"
Argument: TypeAlias = "int | float | bytes | np.generic"

MAX_THREADS = 1024
MAX_SHARED_BYTES = 227 * 1024
_GRID_LIMIT = (2**31 - 1, 65535, 65535)
_BATCH_THREADS = 8192  # enough to hide the cost of a NumPy call, few enough for registers to stay in the cache
_STEP_LIMIT = 50_000_000  # basic blocks executed; a kernel that spins for ever ends here


def launch(
    kernel: Kernel,
    grid: Size,
    block: Size,
    args: Sequence[Argument],
    memory: GlobalMemory,
    shared_bytes: int = 0,
    check_races: bool = False,
    count: bool = True,
) -> Report:
    """Run a kernel on every thread of a grid.

    `args` has one value for each parameter: a number, or the bytes of a struct. `shared_bytes` is dynamic shared memory.
    With `check_races` the report lists races between warps, and a read of shared bytes that nobody wrote raises
    `Uninitialised`. Without `count` shared-memory wavefronts are not counted.
    """
    started = time.perf_counter()
    grid_size, block_size = _triple(grid, "grid"), _triple(block, "block")
    program = kernel.program
    _check_size(kernel, grid_size, block_size, shared_bytes)
    params = pack_arguments(kernel, args)
    _upload_variables(program, memory)
    total_shared = program.shared.dynamic_offset + shared_bytes if shared_bytes else program.shared.static_bytes
    counters = Counters(len(memory.allocations))
    detector = RaceDetector(program.shared_granule) if check_races else None
    with np.errstate(all="ignore"):
        _run_batches(program, grid_size, block_size, total_shared, memory, params, counters, detector, count)
    return _report(program, memory, counters, detector, time.perf_counter() - started)


def _triple(size: Size, what: str) -> tuple[int, int, int]:
    values = (size,) if isinstance(size, int) else tuple(int(value) for value in size)
    if not 1 <= len(values) <= 3:
        raise ValueError(f"{what} has {len(values)} dimensions, not 1 to 3")
    x, y, z = (*values, 1, 1)[:3]
    return x, y, z


def _check_size(
    kernel: Kernel, grid: tuple[int, int, int], block: tuple[int, int, int], shared_bytes: int
) -> None:
    threads = block[0] * block[1] * block[2]
    for axis, size, limit in zip("xyz", grid, _GRID_LIMIT, strict=True):
        if not 1 <= size <= limit:
            raise ValueError(f"grid.{axis} is {size}; it must be 1 to {limit}")
    if min(block) < 1 or threads > MAX_THREADS or block[2] > 64:
        raise ValueError(f"block {block} has {threads} threads; it must have 1 to {MAX_THREADS}, at most 64 along z")
    if kernel.max_threads is not None and threads > kernel.max_threads:
        raise ValueError(f"block {block} has {threads} threads; {kernel.name} was compiled for {kernel.max_threads}")
    total = kernel.static_shared_bytes + shared_bytes
    if shared_bytes < 0 or total > MAX_SHARED_BYTES:
        raise ValueError(f"{total} bytes of shared memory asked; a block has at most {MAX_SHARED_BYTES}")


def pack_arguments(kernel: Kernel, args: Sequence[Argument]) -> bytes:
    """The parameter memory that the arguments fill."""
    if len(args) != len(kernel.params):
        raise ValueError(f"{kernel.name} takes {len(kernel.params)} arguments, {len(args)} given")
    size = max((param.offset + param.size for param in kernel.params), default=0)
    data = bytearray(size)
    for param, value in zip(kernel.params, args, strict=True):
        data[param.offset : param.offset + param.size] = _pack(param, value)
    return bytes(data)


def _pack(param: Param, value: Argument) -> bytes:
    if isinstance(value, bytes | bytearray):
        raw = bytes(value)
        if len(raw) != param.size:
            raise ValueError(f"parameter {param.name} has {param.size} bytes, {len(raw)} given")
        return raw
    if isinstance(value, np.generic) and value.dtype.itemsize == param.size and param.type.startswith(("b", "f")):
        return value.tobytes()
    number = value.item() if isinstance(value, np.generic) else value
    if param.type in ("f32", "f64"):
        return struct.pack("<f" if param.type == "f32" else "<d", float(np.float32(number)) if param.type == "f32" else number)
    if param.type.startswith("b") and isinstance(number, float) and param.size in (4, 8):
        return struct.pack("<f" if param.size == 4 else "<d", number)
    if not isinstance(number, int) or param.size > 8:
        raise ValueError(f"parameter {param.name} of type .{param.type} ({param.size} bytes) cannot hold {value!r}")
    bits = 8 * param.size
    low = 0 if param.type.startswith("u") else -(1 << bits - 1)
    high = (1 << bits - 1) - 1 if param.type.startswith("s") else (1 << bits) - 1
    # compilers declare signed integers as .u32 too: a negative number of that width is what the caller means
    if param.type.startswith("u"):
        low = -(1 << bits - 1)
    if not low <= number <= high:
        raise ValueError(f"parameter {param.name} of type .{param.type} cannot hold {number}: it takes {low} to {high}")
    return (number & ((1 << bits) - 1)).to_bytes(param.size, "little")


def _upload_variables(program: Program, memory: GlobalMemory) -> None:
    """Give the module's variables that the kernel names a place in global memory."""
    addresses = {}
    for variable in program.global_variables:
        data = (variable.data or b"").ljust(variable.size, b"\0")
        addresses[variable.name] = memory.upload(np.frombuffer(data, "u1"))
    program.place_globals(addresses)


def _run_batches(
    program: Program, grid: tuple[int, int, int], block: tuple[int, int, int], shared_bytes: int,
    memory: GlobalMemory, params: bytes, counters: Counters, detector: RaceDetector | None, count: bool,
) -> None:  # fmt: skip
    threads = -(-(block[0] * block[1] * block[2]) // 32) * 32
    total = grid[0] * grid[1] * grid[2]
    size = max(1, min(total, _BATCH_THREADS // threads))
    batch = None
    for start in range(0, total, size):
        # x varies slowest: blocks of one x mostly do the same work (tiles of a causal mask), so the blocks of a batch
        # that are still busy stay next to each other and run without masks
        number = np.arange(start, min(start + size, total))
        ids = np.stack([number // (grid[1] * grid[2]), number // grid[2] % grid[1], number % grid[2]], 1).astype("u4")
        if batch is None or batch.blocks != len(ids):
            batch = Batch(
                program, len(ids), block, grid, shared_bytes, memory, params, counters, detector, count
            )
        batch.start(ids, start == 0)
        Scheduler(batch, _STEP_LIMIT).run()


def _report(
    program: Program, memory: GlobalMemory, counters: Counters, detector: RaceDetector | None, seconds: float
) -> Report:
    classes: Counter[str] = Counter()
    flops = 0
    for block, warps in counters.block_warps.items():
        for name, times in program.blocks[block].classes.items():
            classes[name] += times * warps
        flops += program.blocks[block].tensor_flops * warps
    written = [(start, end, n) for (start, end), n in zip(memory.allocations, counters.written, strict=True)]
    return Report(
        instructions={name: classes[name] for name in CLASSES if classes[name]},
        global_read_bytes=counters.global_read_bytes,
        global_written_bytes=counters.global_written_bytes,
        atomic_bytes=counters.atomic_bytes,
        async_copied_bytes=counters.async_copied_bytes,
        shared_wavefronts=counters.wavefronts,
        shared_wavefronts_ideal=counters.wavefronts_ideal,
        tensor_flops=flops,
        barriers=counters.barriers,
        races=tuple(detector.races) if detector else (),
        race_count=detector.count if detector else 0,
        seconds=seconds,
        _written=tuple(written),
    )
