"""Hold a kernel ready to run: its basic blocks, what its names mean, and the code generated so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .blocks import Block, Item, TensorGroup, cut_blocks, schedule
from .classes import state_space
from .dataflow import assign_local_slots, names_read, names_written, operand_names, scan_registers
from .emitter import Lowered, Symbols
from .immediates import immediate_value, is_immediate
from .instructions import Instruction
from .lower import lower_block
from .types import SIZE
from .variables import Layout, Variable, lay_out

if TYPE_CHECKING:
    from .parse import Kernel

_OF_WARPGROUPS = ("mbarrier", "setmaxnreg", "wgmma")


class Program:
    """Made once per kernel. Blocks are lowered when they are first reached, in the variant that is needed."""

    def __init__(self, kernel: Kernel) -> None:
        body = kernel.body
        self.name = kernel.name
        self.instructions: Sequence[Instruction] = body.instructions
        self.blocks: list[Block] = cut_blocks(body.instructions, body.labels, body.tables)
        self.registers = body.registers
        self.by_warpgroup = any(i.base in _OF_WARPGROUPS for i in body.instructions)
        self.in_clusters = kernel.cluster != (1, 1, 1)
        self.uses_async_proxy = self.by_warpgroup or any("bulk" in i.modifiers for i in body.instructions)
        outside = kernel.module.variables
        used = {name for i in body.instructions for operand in i.operands for name in operand_names(operand)}
        self.shared: Layout = lay_out(
            [v for v in (*outside, *body.variables) if v.space == "shared" and (v in body.variables or v.name in used)]
        )
        self.local: Layout = lay_out([v for v in body.variables if v.space == "local"])
        self.global_variables: list[Variable] = [
            v for v in outside if v.space in ("global", "const") and v.name in used
        ]
        self._use = scan_registers([block.all_instructions for block in self.blocks], body.registers)
        self._local_registers: dict[int, set[str]] = {}
        for register, number in self._use.block_of.items():
            self._local_registers.setdefault(number, set()).add(register)
        self._params = {param.name: param.offset for param in kernel.params}
        self._constants = self._find_constants()
        self._global_addresses: dict[str, int] = {}
        self._items: dict[int, list[Item]] = {}
        self._slots: dict[int, dict[str, int]] = {}
        self._lowered: dict[tuple[int, bool], Lowered] = {}
        self.shared_granule = self._smallest_shared_access()

    def _find_constants(self) -> dict[str, int]:
        """Registers whose only definition is a mov of a number: shuffles get their masks and clamps this way."""
        constants: dict[str, int] = {}
        for instruction in self.instructions:
            if instruction.base != "mov" or instruction.guard is not None:
                continue
            target, value = instruction.operands[:2]
            if not isinstance(target, str) or not isinstance(value, str) or not is_immediate(value):
                continue
            if self._use.write_count.get(target) == 1 and instruction.type not in ("f32", "f64", "pred"):
                constants[target] = immediate_value(value, "s64") or 0
        return constants

    def _smallest_shared_access(self) -> int:
        """Bytes of the unit in which races are tracked: the smallest access to shared memory, at most 16."""
        sizes = [16]
        for instruction in self.instructions:
            modifiers = instruction.modifiers
            if instruction.base in ("ld", "ldu", "st", "atom", "red") and instruction.type in SIZE:
                parts = next((int(m[1:]) for m in ("v2", "v4", "v8") if m in modifiers), 1)
                if state_space(instruction) in ("shared", "generic"):
                    sizes.append(SIZE[instruction.type] * parts)
            elif instruction.base == "cp" and "bulk" not in modifiers and len(instruction.operands) > 2:
                sizes.append(immediate_value(str(instruction.operands[2]), "s64") or 4)
        return min(sizes)

    def place_globals(self, addresses: dict[str, int]) -> None:
        """Say where module variables lie; code that names them is generated anew when they moved."""
        if addresses != self._global_addresses:
            self._global_addresses = addresses
            self._lowered.clear()

    def lowered(self, block: int, masked: bool) -> Lowered:
        """The code of a block in one variant."""
        key = (block, masked)
        if key not in self._lowered:
            if block not in self._items:
                self._items[block] = schedule(self.blocks[block], self._use.read_count)
                self._slots[block] = self._local_slots(block)
            symbols = Symbols(
                registers=self.registers,
                constants=self._constants,
                shared=self.shared.offsets,
                local=self.local.offsets,
                params=self._params,
                globals=self._global_addresses,
                slots=self._slots[block],
                read=self._use.read_count.keys(),
            )
            self._lowered[key] = lower_block(self.blocks[block], self._items[block], symbols, masked, self.name)
        return self._lowered[key]

    def _local_slots(self, block: int) -> dict[str, int]:
        local = self._local_registers.get(block, set())
        mentions: list[tuple[Sequence[str], Sequence[str]]] = []
        for item in self._items[block]:
            mentions.append(_mentions(item))
        end = self.blocks[block].end
        if end is not None:
            mentions.append((names_read(end), names_written(end)))
        return assign_local_slots(mentions, local, self.registers)


def _mentions(item: Item) -> tuple[Sequence[str], Sequence[str]]:
    if not isinstance(item, TensorGroup):
        return names_read(item), names_written(item)
    reads = [name for chain in item.chains for name in (*chain.A, *chain.B, *chain.C)]
    return reads, [name for chain in item.chains for name in chain.D]
