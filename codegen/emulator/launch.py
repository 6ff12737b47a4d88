"""Launch a kernel: check the arguments, run its blocks in batches, report."""

from __future__ import annotations

import math
import struct
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .batch import Batch, Plan
from .classes import CLASSES
from .counters import Counters
from .memory import GlobalMemory
from .ordering import OrderDetector
from .parse import Kernel, Param
from .program import Program
from .races import RaceDetector
from .report import Report
from .schedule import Scheduler

Array: TypeAlias = "NDArray[Any]"
Size: TypeAlias = "int | tuple[int, ...]"
Argument: TypeAlias = "int | float | bytes | np.generic"

MAX_THREADS = 1024
MAX_SHARED_BYTES = 227 * 1024
MAX_CLUSTER = 8  # blocks that every part with clusters can run together
_GRID_LIMIT = (2**31 - 1, 65535, 65535)
_BATCH_THREADS = 8192  # enough to hide the cost of a NumPy call, few enough for registers to stay in the cache


def launch(
    kernel: Kernel,
    grid: Size,
    block: Size,
    args: Sequence[Argument],
    memory: GlobalMemory,
    shared_bytes: int = 0,
    check_races: bool = False,
    count: bool = True,
    late: bool = True,
) -> Report:
    """Run a kernel on every thread of a grid.

    `args` has one value for each parameter: a number, or the bytes of a struct. `shared_bytes` is the dynamic part.
    With `check_races` the report lists races between warps and what they set going, and a read of shared bytes that
    nobody wrote raises `Uninitialised`. Without `count` shared-memory wavefronts are not counted. What is asynchronous
    happens at the last moment that the waits of the kernel allow, without `late` at the first.
    """
    started = time.perf_counter()
    grid_size, block_size = _triple(grid, "grid"), _triple(block, "block")
    program = kernel.program
    _check_size(kernel, grid_size, block_size, shared_bytes)
    _check_cluster(kernel, grid_size)
    params = pack_arguments(kernel, args)
    _place_variables(kernel, memory)
    plan = Plan(
        program=program,
        block_size=block_size,
        grid=grid_size,
        cluster=kernel.cluster,
        shared_bytes=program.shared.dynamic_offset + shared_bytes if shared_bytes else program.shared.static_bytes,
        params=params,
        memory=memory,
        counters=Counters(len(memory.allocations)),
        detector=_detector(program) if check_races else None,
        count=count,
        late=late,
    )
    with np.errstate(all="ignore"):  # lanes that are not active compute garbage
        _run_batches(plan)
    return _report(plan, time.perf_counter() - started)


def _detector(program: Program) -> RaceDetector | OrderDetector:
    kind = OrderDetector if program.uses_async_proxy or program.in_clusters else RaceDetector
    return kind(program.shared_granule)


def _triple(size: Size, what: str) -> tuple[int, int, int]:
    values = (size,) if isinstance(size, int) else tuple(int(value) for value in size)
    if not 1 <= len(values) <= 3:
        raise ValueError(f"{what} has {len(values)} dimensions, not 1 to 3")
    x, y, z = (*values, 1, 1)[:3]
    return x, y, z


def _check_size(kernel: Kernel, grid: tuple[int, int, int], block: tuple[int, int, int], shared_bytes: int) -> None:
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


def _check_cluster(kernel: Kernel, grid: tuple[int, int, int]) -> None:
    if not 1 <= math.prod(kernel.cluster) <= MAX_CLUSTER:
        raise ValueError(f"{kernel.name} has clusters of {kernel.cluster}; they must be of 1 to {MAX_CLUSTER} blocks")
    for axis, size, part in zip("xyz", grid, kernel.cluster, strict=True):
        if size % part:
            raise ValueError(f"grid.{axis} is {size}; {kernel.name} needs a multiple of its clusters of {part}")


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
    if isinstance(value, np.generic) and value.dtype.itemsize == param.size and _same_kind(param, value):
        return bytes(value.tobytes())
    number = value.item() if isinstance(value, np.generic) else value
    if param.type in ("f32", "f64") and isinstance(number, int | float):
        return struct.pack("<d", number) if param.type == "f64" else bytes(np.float32(number).tobytes())
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


def _same_kind(param: Param, value: np.generic) -> bool:
    return param.type.startswith("b") or param.type.startswith("f") == (value.dtype.kind == "f")


def _place_variables(kernel: Kernel, memory: GlobalMemory) -> None:
    """Give module variables that the kernel names a place in global memory; they keep it from launch to launch."""
    addresses = {}
    for variable in kernel.program.global_variables:
        key = (id(kernel.module), variable.name)
        if key not in memory.variables:
            data = (variable.data or b"").ljust(variable.size, b"\0")
            memory.variables[key] = (kernel.module, memory.upload(np.frombuffer(data, "u1")))
        addresses[variable.name] = memory.variables[key][1]
    kernel.program.place_globals(addresses)


def _run_batches(plan: Plan) -> None:
    x, y, z = plan.block_size
    total = math.prod(plan.grid)
    cluster = math.prod(plan.cluster)
    size = max(1, min(total, _BATCH_THREADS // (-(-(x * y * z) // 32) * 32)) // cluster) * cluster
    batch = None
    for start in range(0, total, size):
        # x varies slowest: blocks of one x mostly do the same work (tiles of a causal mask), so the blocks of a batch
        # that are still busy stay next to each other and run without masks
        ids = _block_ids(plan, np.arange(start, min(start + size, total)))
        if batch is None or batch.blocks != len(ids):
            batch = Batch(plan, len(ids))
        batch.start(ids, start == 0)
        Scheduler(batch).run()


def _block_ids(plan: Plan, number: Array) -> Array:
    """The indices of blocks: cluster by cluster, and in a cluster in the order of their rank."""
    (cx, cy, cz), (_, gy, gz) = plan.cluster, plan.grid
    cluster, rank = np.divmod(number, cx * cy * cz)
    gy, gz = gy // cy, gz // cz
    first = np.stack([cluster // (gy * gz) * cx, cluster // gz % gy * cy, cluster % gz * cz], 1)
    return (first + np.stack([rank % cx, rank // cx % cy, rank // (cx * cy)], 1)).astype("u4")


def _report(plan: Plan, seconds: float) -> Report:
    counters, blocks = plan.counters, plan.program.blocks
    classes: Counter[str] = Counter()
    flops = 0
    for block, warps in counters.block_warps.items():
        for name, times in blocks[block].classes.items():
            classes[name] += times * warps
        flops += blocks[block].tensor_flops * warps
    allocations = plan.memory.allocations
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
        unfinished_barriers=counters.unfinished_barriers,
        register_shares=counters.register_shares,
        races=tuple(plan.detector.log.races) if plan.detector else (),
        race_count=plan.detector.log.count if plan.detector else 0,
        seconds=seconds,
        _written=tuple((start, end, n) for (start, end), n in zip(allocations, counters.written, strict=True)),
    )
