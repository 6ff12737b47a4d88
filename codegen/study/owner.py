"""Say which process a trial belongs to, and whether that process is gone."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

Owner = dict[str, Any]  # as a storage keeps it: host, pid, and what makes both unmistakable


def this_process() -> Owner:
    """The process that calls."""
    pid = os.getpid()
    return {"host": platform.node(), "pid": pid, "born": _born(pid), "kernel": _kernel()}


def is_gone(owner: Owner) -> bool:
    """Whether the process has ended for certain; False for one of another machine or container: it cannot be seen."""
    return bool(owner["kernel"]) and owner["kernel"] == _kernel() and _born(owner["pid"]) != owner["born"]


@cache
def _kernel() -> str:
    """The running kernel and the process numbers that we see of it: two containers may share host name and numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _born(pid: int) -> int:
    """When the process started, in clock ticks since the machine did; -1 if there is none, or only its remains.

    Its number alone may be another process's by now. Source: proc(5), /proc/pid/stat: fields 3 (state) and 22.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in "ZX" else int(fields[19])
