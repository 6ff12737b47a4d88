"""Read what a warpgroup does one after the other: ordinary work, products it issues, and where it waits for them.

Of a Hopper kernel whose warpgroups feed the tensor cores asynchronously (wgmma). An HGMMA is only issued: it runs on
its own until a `WARPGROUP.DEPBAR` waits for its group. `warpgroup_time.py` makes a time of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .board import Board
from .instruction import Instruction
from .load import Load, sum_load
from .occupancy import SUB_PARTITIONS
from .plan import BARRIER, LOAD, Cost, instruction_cost, plan_steps
from .rates import ASYNCHRONOUS_OPCODES, CONTROL, MEMORY
from .tensor import WARPGROUP_TENSOR, shared_operand_bytes, tensor_flops

COMMITS = "gsb0"  # on the last HGMMA of a group
ISSUED = 10.0  # cycles after which an asynchronous instruction has read its registers [?]
TO_SHARED = 6.0  # cycles from the issue of a memory instruction to the shared pipe [?], as in issue.py


class Stretch(NamedTuple):
    """What a warp executes up to where it waits for a product, or issues one with none in flight."""

    load: Load  # of one warp
    alone: float  # cycles it takes the four warps of a warpgroup by themselves, one on each sub-partition
    beside: float  # tensor FLOPs of this warp's that are in flight meanwhile
    waits: bool  # whether it ends with a wait for a product


class Course(NamedTuple):
    """A list of instructions as a warpgroup goes through it."""

    stretches: tuple[Stretch, ...]
    tensor_flops: float  # of one warp
    operand_bytes: float  # that the products of the warpgroup read from shared memory
    turns: bool  # whether warpgroups take turns: one arrives at the barrier at which another waits

    @property
    def load(self) -> Load:
        """Of one warp, all stretches together."""
        return Load(*(sum(cycles) for cycles in zip(*(s.load for s in self.stretches), strict=True)))


def read_course(instructions: Sequence[Instruction], board: Board) -> Course:
    """Cut a straight list of instructions into stretches."""
    stretches: list[Stretch] = []
    groups: list[float] = []  # tensor FLOPs of each product in flight
    stretch: list[Instruction] = []
    issuing = 0.0

    def end(waits: bool) -> None:
        if stretch:
            stretches.append(
                Stretch(
                    load=_load(stretch, board),
                    alone=alone_cycles(stretch, board),
                    beside=sum(groups) + issuing,
                    waits=waits,
                )
            )
            stretch.clear()

    for i in instructions:
        if i.base in WARPGROUP_TENSOR:
            if not groups and not issuing:
                end(waits=False)
            issuing += tensor_flops(i.opcode)
            if COMMITS in i.text:
                groups.append(issuing)
                issuing = 0.0
        stretch.append(i)
        left = products_left(i)
        if left is not None and len(groups) > left:
            end(waits=True)
            del groups[: len(groups) - left]
    end(waits=False)
    products = [i for i in instructions if i.base in WARPGROUP_TENSOR]
    return Course(
        tuple(stretches),
        tensor_flops=float(sum(tensor_flops(i.opcode) for i in products)),
        operand_bytes=float(sum(shared_operand_bytes(i.opcode, i.text) for i in products)),
        turns=any(i.opcode.startswith("BAR.ARV") for i in instructions),
    )


def products_left(instruction: Instruction) -> int | None:
    """Products that may be in flight past `WARPGROUP.DEPBAR.LE gsb0, 0x1`; None of another instruction."""
    if instruction.base != "WARPGROUP" or "DEPBAR" not in instruction.opcode:
        return None
    return int(instruction.text.rpartition(",")[2], 0)


def alone_cycles(instructions: Sequence[Instruction], board: Board) -> float:
    """Cycles in which the four warps of a warpgroup go through a list: stall counts, own pipes, own scoreboards.

    What another warpgroup is waited for is not in it, nor is a product; a barrier costs its own cycles.
    """
    path = board.path
    now = shared_free = 0.0
    ready = [0.0] * 6  # scoreboards
    free = [0.0] * MEMORY  # pipes of a sub-partition
    for i in instructions:
        now = max(now, *(ready[k] for k in i.control.waits), 0.0)
        cost = _cost(i, board)
        if cost.pipe < MEMORY:
            now = max(now, free[cost.pipe])
            free[cost.pipe] = done = now + cost.busy
            read = done
        elif cost.pipe == MEMORY:
            start = max(now + TO_SHARED, shared_free)
            shared_free = done = start + cost.held * SUB_PARTITIONS
            done += path.shared_latency if cost.kind == LOAD else 0.0
            read = start + TO_SHARED
        else:
            done = read = now + cost.busy
        done += cost.later
        for scoreboard, at in ((i.control.write, done), (i.control.read, read)):
            if scoreboard < 6:
                ready[scoreboard] = max(ready[scoreboard], at)
        now += max(1, i.control.stall) + (path.barrier_cycles if cost.kind == BARRIER else 0.0)
    return now


def _cost(instruction: Instruction, board: Board) -> Cost:
    """As in the simulation of other kernels; an asynchronous instruction takes an issue slot."""
    if instruction.base in ASYNCHRONOUS_OPCODES:
        # A first look at an mbarrier finds its phase complete: copies run ahead.
        return Cost(CONTROL, ISSUED, later=board.path.register_latency * (instruction.base == "SYNCS"))
    return instruction_cost(instruction, board)


def _load(instructions: Sequence[Instruction], board: Board) -> Load:
    """What a warp issues itself; an asynchronous instruction takes an issue slot."""
    own = [i for i in instructions if i.base not in ASYNCHRONOUS_OPCODES]
    return sum_load(plan_steps(own, board), board)._replace(issue=float(len(instructions)))
