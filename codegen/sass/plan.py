"""Turn instructions into steps with a pipe, cycles, bytes and scoreboards: all that the simulation needs."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from .board import Board
from .instruction import Instruction
from .occupancy import LANES, SUB_PARTITIONS
from .rates import (
    CONTROL,
    GLOBAL_MEMORY,
    MEMORY,
    SPECIAL,
    TENSOR_CORE,
    VARIABLE_READS,
    pipe_cycles,
    pipe_of,
    pipe_rates,
)
from .tensor import tensor_flops

# What a step does besides holding a pipe.
PLAIN, LOAD, STORE, COPY, READ, REDUCE, BARRIER, COMMIT = range(8)

KINDS = {
    **dict.fromkeys(("LDSM", "LDS", "SHFL", "MOVM", "LDL"), LOAD),
    **dict.fromkeys(("STS", "STSM", "STL", "STG", "ST"), STORE),
    **dict.fromkeys(("LDG", "LD"), READ),
    **dict.fromkeys(("RED", "REDG", "ATOM", "ATOMG", "ATOMS"), REDUCE),
    "LDGSTS": COPY,
    "BAR": BARRIER,
    "LDGDEPBAR": COMMIT,
}
# Cycles by which a shared load of more wavefronts returns later, each: LDS 24/24/26 for 32/64/128 bits, LDSM.x4 +6 [L].
LATER_PER_WAVEFRONT = {"LDSM": 1.5, "LDS": 0.5}
AWAIT_GROUPS = re.compile(r"SB(\d),\s*(0x[0-9a-f]+|\d+)")


class Cost(NamedTuple):
    """What one warp instruction takes, wherever it stands."""

    pipe: int  # of its sub-partition
    busy: float  # cycles it holds that pipe
    kind: int = PLAIN
    held: float = 0.0  # cycles it holds the shared-memory pipe of the SM
    later: float = 0.0  # cycles of latency beyond the usual of its kind
    l2_bytes: int = 0


# A Cost, stall cycles, write and read scoreboard; then what the *next* step waits for: its scoreboards, and if it is a
# DEPBAR.LE its scoreboard and the copy groups that may be outstanding. A plain tuple: it is unpacked at each issue.
Step = tuple[int, float, int, float, float, int, int, int, int, tuple[int, ...], tuple[int, int] | None]


def plan_steps(instructions: Sequence[Instruction], board: Board) -> list[Step]:
    """The steps of instructions that a warp runs again and again (after the last comes the first)."""
    costs: dict[tuple[str, bool], Cost] = {}
    steps: list[Step] = []
    for i, following in zip(instructions, [*instructions[1:], *instructions[:1]], strict=True):
        key = (i.opcode, i.never_executes)
        if key not in costs:
            costs[key] = instruction_cost(i, board)
        control = i.control
        wait = (following.control.waits, awaited_groups(following))
        steps.append((*costs[key], max(1, control.stall), control.write, control.read, *wait))
    return steps


def instruction_cost(instruction: Instruction, board: Board) -> Cost:
    """Look an instruction up in the tables of `rates.py`; UnknownOpcode if they lack it."""
    base, opcode = instruction.base, instruction.opcode
    pipe = pipe_of(base)
    if instruction.never_executes or (pipe == CONTROL and base not in KINDS and base not in VARIABLE_READS):
        return Cost(CONTROL, 1)
    path = board.path
    if pipe == MEMORY:
        lane_bytes = bytes_of_a_lane(opcode)
        wavefronts = lane_bytes // 4  # passes of 128 bytes
        held = max(wavefronts * path.wavefront_cycles, path.request_cycles)
        if KINDS[base] == COPY:
            held += wavefronts * path.fill_share
        later = path.local_latency if base == "LDL" else wavefronts * LATER_PER_WAVEFRONT.get(base, 0.0)
        return Cost(MEMORY, 1, KINDS[base], held, later, LANES * lane_bytes if base in GLOBAL_MEMORY else 0)
    if pipe == CONTROL:
        kind = PLAIN if opcode.startswith("BAR.ARV") else KINDS.get(base, PLAIN)  # arriving does not wait
        return Cost(CONTROL, 1, kind, later=path.register_latency * (base in VARIABLE_READS))
    if pipe == TENSOR_CORE:
        return Cost(TENSOR_CORE, tensor_cycles(opcode, board), later=path.tensor_latency)
    later = path.special_latency if pipe == SPECIAL else 0.0
    return Cost(pipe, pipe_cycles(base, board.pipes or pipe_rates(board.sm)), later=later)


def tensor_cycles(opcode: str, board: Board) -> float:
    """Cycles a warp's tensor instruction holds the tensor core of its sub-partition.

    8-bit types run at twice the 16-bit rate, TF32 at half.
    """
    at_16_bit = SUB_PARTITIONS * tensor_flops(opcode) / board.tensor_flops_per_clock_sm
    base, *suffixes = opcode.split(".")
    if base != "HMMA":
        return at_16_bit / 2
    return at_16_bit * 2 if "TF32" in suffixes else at_16_bit


def awaited_groups(instruction: Instruction) -> tuple[int, int] | None:
    """(scoreboard, groups that may be outstanding) of `DEPBAR.LE SB0, 0x1`, which is cp.async.wait_group 1."""
    if instruction.base != "DEPBAR" or instruction.never_executes:
        return None
    found = AWAIT_GROUPS.search(instruction.text)
    return (int(found.group(1)), int(found.group(2), 0)) if found else None


def bytes_of_a_lane(opcode: str) -> int:
    """Bytes each lane moves; narrow accesses still take a whole wavefront."""
    base, *suffixes = opcode.split(".")
    if base in ("LDSM", "STSM"):  # .4 is four 8x8 matrices of 16-bit elements
        return {"4": 16, "2": 8}.get(suffixes[-1], 4)
    if "128" in suffixes or "F32x4" in suffixes:
        return 16
    if "256" in suffixes:
        return 32
    return 8 if "64" in suffixes or "F32x2" in suffixes else 4
