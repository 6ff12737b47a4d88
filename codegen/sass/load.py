"""Add up how long each pipe is busy with a list of steps: the static side of a time."""

from collections.abc import Sequence
from typing import NamedTuple

from .board import Board
from .occupancy import SUB_PARTITIONS
from .plan import REDUCE, STORE, Step
from .rates import MEMORY

SM_WIDE = frozenset({"shared", "l2"})  # one pipe for the SM; the others exist in each sub-partition
PIPE_NAMES = {
    "tensor": "tensor cores",
    "shared": "shared memory",
    "fma": "FP32 units",
    "alu": "integer units",
    "special": "special-function units",
    "issue": "issue slots",
    "l2": "L2 cache",
}


class Load(NamedTuple):
    """Cycles one warp keeps each pipe busy: `shared` and `l2` of the whole SM, the others of a sub-partition."""

    tensor: float
    shared: float
    fma: float
    alu: float
    special: float
    issue: float
    l2: float

    def on_sm(self, warps: float) -> dict[str, float]:
        """Busy cycles of each pipe of an SM when `warps` warps, spread over its sub-partitions, do this once."""
        return {
            name: cycles * (warps if name in SM_WIDE else warps / SUB_PARTITIONS)
            for name, cycles in self._asdict().items()
        }


def sum_load(steps: Sequence[Step], board: Board) -> Load:
    """The load of one warp that runs the steps once."""
    busy = [0.0] * MEMORY
    shared = l2 = 0.0
    for pipe, cycles, kind, held, _later, l2_bytes, *_ in steps:
        if pipe < MEMORY:
            busy[pipe] += cycles
        elif pipe == MEMORY:
            shared += held
            if kind != STORE:  # as in the simulation: nobody waits for stored data
                rate = board.path.reduction_bytes_per_clock if kind == REDUCE else board.l2_bytes_per_clock_sm
                l2 += l2_bytes / rate
    fma, alu, special, tensor = busy
    return Load(tensor, shared, fma, alu, special, float(len(steps)), l2)
