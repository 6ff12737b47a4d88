"""Keep one GPU for one search at a time, and notice who else uses it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from filelock import FileLock, Timeout

from .. import paths
from ..errors import UsageError

IDLE_BYTES = 1 << 30  # that an idle device may have in use: a context or two of a display


@contextmanager
def device_lock(identity: str) -> Iterator[None]:
    """Hold the device against other searches of this user; the system frees it on kill.

    Raises UsageError at once if another search holds it: two searches would time each other's kernels.
    """
    folder = paths.cache_dir() / "locks"
    folder.mkdir(mode=0o700, exist_ok=True)
    lock = FileLock(folder / f"gpu-{identity.replace(':', '-')}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UsageError(
            f"another search measures on this GPU ({identity}); wait for it, or choose a GPU with CUDA_VISIBLE_DEVICES."
        ) from error
    try:
        yield
    finally:
        lock.release()


def device_identity(index: int) -> str:
    """The device's PCI address: the same whatever CUDA_VISIBLE_DEVICES says."""
    from cupy.cuda import runtime

    return str(runtime.deviceGetPCIBusId(index))


def neighbours(index: int) -> str:
    """Who else uses the device, in words; "" if nobody is seen. Asked before this process has a context there.

    NVML knows the processes where pynvml is installed; else only memory in use tells.
    """
    identity = device_identity(index)
    others = _processes(identity)
    if others is not None:
        return f"{len(others)} other processes ({', '.join(map(str, sorted(others)))})" if others else ""
    return memory_in_use(*_memory(index))


def memory_in_use(free_bytes: int, total_bytes: int) -> str:
    """What memory says: "" for an idle device."""
    used = total_bytes - free_bytes
    return f"somebody who holds {used / 2**30:.1f} GiB of its memory" if used > IDLE_BYTES else ""


def _memory(index: int) -> tuple[int, int]:
    from cupy.cuda import runtime

    runtime.setDevice(index)
    free, total = runtime.memGetInfo()
    return int(free), int(total)


def _processes(identity: str) -> set[int] | None:
    """Process ids with a compute context on the device, without ours; None where NVML cannot be asked."""
    try:
        nvml = import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        try:
            device = nvml.nvmlDeviceGetHandleByPciBusId(identity.encode())
            running = nvml.nvmlDeviceGetComputeRunningProcesses(device)
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return None
    return {int(process.pid) for process in running} - {os.getpid()}
