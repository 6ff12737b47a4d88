"""Hold one instruction of a listing: guard, opcode, operands, schedule."""

import re
from typing import NamedTuple

from .control import Control

GUARD = re.compile(r"@(!?U?P\w+)\s+")
LABEL = re.compile(r"\.L_\w+")

LOCAL_MEMORY = frozenset({"LDL", "STL"})


class Instruction(NamedTuple):
    """One SASS instruction. `text` is opcode and operands without the guard."""

    address: int  # bytes from the start of the function
    guard: str  # "P0", "!P0", "UP2", "!PT" or "" when unconditional
    opcode: str  # with its suffixes: "HMMA.16816.F32.BF16"
    text: str
    control: Control

    @property
    def base(self) -> str:
        """The opcode without suffixes: "HMMA"."""
        return self.opcode.partition(".")[0]

    @property
    def targets(self) -> list[str]:
        """The labels a branch may go to: one, or the whole table of an indirect branch."""
        return LABEL.findall(self.text)

    @property
    def never_executes(self) -> bool:
        """ptxas pads with `@!PT LDS RZ, [RZ]` and the like: an issue slot and nothing else."""
        return self.guard in ("!PT", "!UPT")

    @property
    def spills(self) -> bool:
        """Local memory traffic that really happens: in a kernel without local arrays, a register spill or refill."""
        return self.base in LOCAL_MEMORY and not self.never_executes

    def __str__(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        return f"{guard}{self.text}"


def parse_instruction(address: int, text: str, control: Control) -> Instruction:
    """Split `@!P0 BRA `(.L_x_2)` into its parts."""
    guard = GUARD.match(text)
    body = text[guard.end() :] if guard else text
    return Instruction(address, guard.group(1) if guard else "", body.partition(" ")[0], body, control)
