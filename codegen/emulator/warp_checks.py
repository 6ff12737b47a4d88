"""Refuse warp-wide instructions that only a part of a warp reaches, and stop at traps."""

from __future__ import annotations

from typing import Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .access import Access
from .errors import DivergentBarrier, Trap

Array: TypeAlias = "NDArray[Any]"


def check_whole_warps(access: Access, mask: Array | None, at: int) -> None:
    """Instructions marked .aligned need every lane of the warp."""
    if mask is None:
        return
    warps = mask.reshape(-1, 32)
    part = warps.any(1) & ~warps.all(1)
    if part.any():
        _diverged(access, int(part.argmax()), warps, at)


def check_members(access: Access, members: Array, mask: Array | None, at: int) -> None:
    """Every lane that a .sync instruction names must execute it together with the others."""
    active = np.ones(access.n, bool) if mask is None else mask
    warps = active.reshape(-1, 32)
    bits = np.packbits(warps, axis=1, bitorder="little").view("u4")
    # a lane that has exited, or never was, cannot take part and is not waited for
    gone = access.batch.exited(access.low, access.high)
    missing = np.broadcast_to(members, access.n).reshape(-1, 32) & ~bits & ~gone
    bad = (missing != 0) & warps
    if bad.any():
        _diverged(access, int(bad.any(1).argmax()), warps, at)


def _diverged(access: Access, warp: int, warps: Array, at: int) -> NoReturn:
    lanes = np.flatnonzero(warps[warp]).tolist()
    where = access.batch.describe_thread(access.low + 32 * warp + lanes[0])
    instruction = access.batch.program.instructions[at]
    raise DivergentBarrier(f"{instruction}\n  {where}: only lanes {lanes} of the warp execute it together")


def trap(access: Access, lanes: Array | None, at: int) -> None:
    """Stop if any thread is here."""
    if access.active(lanes).size:
        access.fail(Trap, at, lanes, 0, "the kernel executed trap")
