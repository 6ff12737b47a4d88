"""Find wgmma instructions whose registers something else wrote since the last wgmma.fence, on any path.

Emulation cannot show such a fault: registers are in order here. So the text is checked, without running it.
"""

from __future__ import annotations

from .blocks import Block
from .dataflow import names_in_flight, names_written
from .parse import Kernel


def missing_wgmma_fences(kernel: Kernel) -> tuple[str, ...]:
    """The instructions at fault with the registers that a fence must precede; empty if all is well."""
    blocks = kernel.program.blocks
    watched = {name for block in blocks for instruction in block.instructions for name in names_in_flight(instruction)}
    if not watched:
        return ()
    at_start: list[set[str] | None] = [None] * len(blocks)
    at_start[0] = set(watched)
    found: dict[int, str] = {}
    work = [0]
    while work:
        number = work.pop()
        unfenced = _through(blocks[number], set(at_start[number] or ()), watched, found)
        for following in _successors(blocks, number):
            before = at_start[following]
            if before is None or not unfenced <= before:
                at_start[following] = unfenced | (before or set())
                work.append(following)
    return tuple(found[index] for index in sorted(found))


def _through(block: Block, unfenced: set[str], watched: set[str], found: dict[int, str]) -> set[str]:
    """Registers written since the last fence, behind the block; adds to `found` what goes wrong in it."""
    for instruction in block.all_instructions:
        if instruction.base != "wgmma":
            unfenced |= watched.intersection(names_written(instruction))
        elif instruction.modifiers[0] == "fence":
            if instruction.guard is None:  # else it may not happen
                unfenced = set()
        else:
            bare = sorted(unfenced.intersection(names_in_flight(instruction)))
            if bare:
                names = ", ".join(bare[:3]) + (f" and {len(bare) - 3} more" if len(bare) > 3 else "")
                found[instruction.index] = f"PTX line {instruction.line}: no wgmma.fence after the writes of {names}"
    return unfenced


def _successors(blocks: list[Block], number: int) -> list[int]:
    block = blocks[number]
    jumps = block.kind in ("branch", "table", "exit")
    guarded = block.end is not None and block.end.guard is not None
    following = list(block.targets)
    if (not jumps or guarded) and number + 1 < len(blocks):
        following.append(number + 1)
    return following
