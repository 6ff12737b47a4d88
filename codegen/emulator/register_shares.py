"""Record how many registers a warpgroup asks for, so that a test can check that the shares of a block fit."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .access import Access
from .errors import EmulatorError
from .warp_checks import check_whole_warps

Array: TypeAlias = "NDArray[Any]"


def set_register_share(access: Access, count: int, mask: Array | None, at: int) -> None:
    """setmaxnreg: noted for the warpgroups that are active. Nobody waits here for registers that others give up."""
    check_whole_warps(access, mask, at)
    if count % 8 or not 24 <= count <= 256:
        instruction = access.batch.program.instructions[at]
        raise EmulatorError(f"{instruction}: {count} registers; it must be a multiple of 8 from 24 to 256")
    threads = access.threads(None if mask is None else np.flatnonzero(mask))
    for warpgroup in np.unique(access.batch.warp_in_block[threads >> 5] >> 2).tolist():
        access.counters.register_shares[warpgroup] = count
