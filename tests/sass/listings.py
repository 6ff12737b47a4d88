"""Make instructions by hand, so that a test knows the answer."""

from collections.abc import Sequence

from flashsmith.sass import Control, Instruction
from flashsmith.sass.control import NO_BARRIER
from flashsmith.sass.instruction import parse_instruction

HMMA = "HMMA.16816.F32.BF16 R4, R8, R12, R4"
LDSM_X4 = "LDSM.16.M88.4 R4, [R2]"


def make(
    text: str, stall: int = 1, write: int = NO_BARRIER, read: int = NO_BARRIER, waits: tuple[int, ...] = ()
) -> Instruction:
    """One instruction with its schedule."""
    return parse_instruction(0, text, Control(stall, False, write, read, waits, 0))


def listed(lines: Sequence[str]) -> tuple[tuple[Instruction, ...], dict[str, int]]:
    """Instructions and labels from lines such as ".L_x_1:" and "@!P0 BRA `(.L_x_1)"."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in lines:
        if line.endswith(":"):
            labels[line[:-1]] = len(instructions)
        else:
            instructions.append(parse_instruction(16 * len(instructions), line, Control(1, False, 7, 7, (), 0)))
    return tuple(instructions), labels
