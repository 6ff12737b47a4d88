"""Say which registers an instruction reads and writes, and choose the array slots that hold registers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .instructions import Address, Instruction, Operand, TensorAddress
from .types import SIZE

_NO_RESULT = frozenset(
    {
        *("st", "red", "cp", "stmatrix", "prefetch", "prefetchu", "membar", "fence", "nanosleep"),
        *("bra", "brx", "ret", "exit", "bar", "barrier", "trap", "brkpt"),
        *("setmaxnreg", "griddepcontrol"),
    }
)


def operand_names(operand: Operand) -> tuple[str, ...]:
    """Names in an operand: both of `d|p`, the base of an address, all of a vector."""
    if isinstance(operand, Address):
        return (operand.base,)
    if isinstance(operand, TensorAddress):
        return (operand.map.base, *operand.corner)
    if isinstance(operand, tuple):
        return operand
    if "|" in operand:
        return tuple([part.strip() for part in operand.split("|")])
    return (operand[1:],) if operand.startswith("!") else (operand,)


def has_result(instruction: Instruction) -> bool:
    """Whether operand 0 is written (`bar.red` and `barrier.red` write theirs)."""
    if instruction.base == "wgmma":
        return instruction.modifiers[:1] == ("mma_async",)
    if instruction.base == "mbarrier":
        return instruction.modifiers[:1] not in (("init",), ("inval",), ("expect_tx",), ("complete_tx",))
    return instruction.base not in _NO_RESULT or "red" in instruction.modifiers


def names_in_flight(instruction: Instruction) -> tuple[str, ...]:
    """Registers that the instruction reads or writes later, when its block may be over."""
    if instruction.base != "wgmma":
        return ()
    return tuple([name for operand in instruction.operands[:2] if isinstance(operand, tuple) for name in operand])


def names_written(instruction: Instruction) -> tuple[str, ...]:
    """Names that the instruction writes (`_` included)."""
    if not instruction.operands or not has_result(instruction):
        return ()
    return operand_names(instruction.operands[0])


def names_read(instruction: Instruction) -> list[str]:
    """Names that the instruction reads, its guard included; immediates stand among them."""
    names = [instruction.guard] if instruction.guard else []
    # the sums of wgmma are addends too
    adds = instruction.base == "wgmma"
    sources = instruction.operands[1:] if has_result(instruction) and not adds else instruction.operands
    for operand in sources:
        if type(operand) is str and "|" not in operand and operand[0] != "!":
            names.append(operand)
        else:
            names.extend(operand_names(operand))
    return names


@dataclass(frozen=True, slots=True)
class RegisterUse:
    """What a scan over the whole kernel learns: reads per register, and the block that keeps a register to itself."""

    read_count: dict[str, int]
    write_count: dict[str, int]
    block_of: dict[str, int]


def scan_registers(blocks: Iterable[Sequence[Instruction]], registers: dict[str, str]) -> RegisterUse:
    """Find registers that live within one block: each starts with an unguarded write and is met nowhere else.

    Such a register may share its array with others, and its value in lanes outside the active mask does not matter.
    """
    read_count: dict[str, int] = {}
    write_count: dict[str, int] = {}
    block_of: dict[str, int] = {}
    shared: set[str] = set()
    for number, instructions in enumerate(blocks):
        for instruction in instructions:
            shared.update(names_in_flight(instruction))
            for name in names_read(instruction):
                if name not in registers:
                    continue
                read_count[name] = read_count.get(name, 0) + 1
                if block_of.get(name) != number:
                    shared.add(name)
            for name in names_written(instruction):
                if name not in registers:
                    continue
                write_count[name] = write_count.get(name, 0) + 1
                if block_of.setdefault(name, number) != number or instruction.guard:
                    shared.add(name)
    for name in shared:
        block_of.pop(name, None)
    return RegisterUse(read_count, write_count, block_of)


def assign_local_slots(
    items: Sequence[tuple[Sequence[str], Sequence[str]]], local: set[str], registers: dict[str, str]
) -> dict[str, int]:
    """Linear scan over one block: `items` are (reads, writes) in the order of execution; gives a slot per register.

    A register is freed after its last mention, so an instruction's result never shares the array of its operand.
    """
    last: dict[str, int] = {}
    for position, (reads, writes) in enumerate(items):
        last.update(dict.fromkeys((name for name in (*reads, *writes) if name in local), position))
    ends: dict[int, list[str]] = {}
    for name, position in last.items():
        ends.setdefault(position, []).append(name)
    slot: dict[str, int] = {}
    free: dict[int, list[int]] = {1: [], 2: [], 4: [], 8: [], 16: []}
    top = dict.fromkeys(free, 0)
    for position, (_, writes) in enumerate(items):
        for name in writes:
            if name not in local or name in slot:
                continue
            width = SIZE[registers[name]]
            if free[width]:
                slot[name] = free[width].pop()
            else:
                slot[name] = top[width]
                top[width] += 1
        for name in ends.get(position, ()):
            free[SIZE[registers[name]]].append(slot[name])
    return slot
