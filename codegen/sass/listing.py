"""Disassemble a cubin with NVIDIA's nvdisasm and hold it as functions of instructions."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

from .control import decode_control
from .elf import read_sm, resource_usage
from .errors import BadCubin, DisassemblerMissing
from .flow import Graph, build_graph
from .instruction import Instruction, parse_instruction
from .path import LoopSummary, Trace, summarise_loops, trace_function, trace_twin

WHEEL_PATHS = "nvidia/*/bin/nvdisasm*"  # nvidia/cu13/bin, nvidia/cuda_nvdisasm/bin: the folder's name changes with CUDA
SECTION = re.compile(r"^\.text\.([^\n:]+):\n", re.M)
# Either a label, or an instruction: address, text, and its two 64-bit words on this line and the next.
LINE = re.compile(
    r"^(?P<label>\.L_\w+):|^\s+/\*(?P<address>[0-9a-f]+)\*/\s+(?P<text>.*?)\s*;\s+/\* 0x[0-9a-f]+ \*/\n"
    r"\s+/\* 0x(?P<high>[0-9a-f]+) \*/",
    re.M,
)
TARGET = re.compile(r"^\s*\.target\s+sm_\d+(a?)", re.M)
REMARK = re.compile(r"\s*\(\*(?!\"BRANCH_TARGETS).*?\*\)")  # (*"SpillRefill"*) and the like stand inside the text


@dataclass(frozen=True, eq=False)  # compared by identity: two listings of 5000 instructions are not compared by value
class Function:
    """One kernel: its instructions and what it takes from the multiprocessor."""

    name: str
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]  # label -> index of the instruction it stands before
    registers: int
    static_smem_bytes: int
    stack_bytes: int

    @property
    def spill_instructions(self) -> int:
        """Loads and stores of local memory (LDL, STL) anywhere in the function."""
        return sum(i.spills for i in self.instructions)

    @cached_property
    def graph(self) -> Graph:
        """Basic blocks and loops."""
        return build_graph(self.instructions, self.labels)

    @cached_property
    def loops(self) -> tuple[LoopSummary, ...]:
        """Every loop with its address range, tensor instructions and spills, in the order of the listing."""
        return summarise_loops(self.instructions, self.graph)

    @cached_property
    def trace(self) -> Trace:
        """Prologue, one iteration of the main loop, epilogue: rare blocks (masks, rescue code) counted as executed."""
        return trace_function(self.instructions, self.graph)

    @cached_property
    def short_trace(self) -> Trace:
        """The same without rare blocks: those behind a branch, without tensor work or global memory traffic."""
        return trace_function(self.instructions, self.graph, rare=False)

    @cached_property
    def twin(self) -> tuple[Instruction, ...]:
        """An iteration of the loop that has the main one's products and more besides, for masked tiles; or ()."""
        return trace_twin(self.instructions, self.graph)

    def __str__(self) -> str:
        head = (
            f"{self.name}: {len(self.instructions)} instructions, {self.registers} registers, "
            f"{self.static_smem_bytes} B static shared memory, {self.stack_bytes} B stack, "
            f"{self.spill_instructions} spill instructions"
        )
        names: dict[int, list[str]] = {}
        for label, index in self.labels.items():
            names.setdefault(index, []).append(label)
        lines = [head]
        for index, instruction in enumerate(self.instructions):
            lines += [f"{label}:" for label in names.get(index, ())]
            lines.append(f"  {instruction.address:05x}  {instruction.control}  {instruction}")
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class Listing:
    """A disassembled cubin; `print(listing)` shows address, schedule and text of each instruction."""

    sm: int
    functions: dict[str, Function]
    cubin: bytes = field(repr=False)
    variant: str = ""  # "a": instructions of this very sm, which no other runs

    @property
    def target(self) -> str:
        """What it is built for: "sm_80", "sm_90a"."""
        return f"sm_{self.sm}{self.variant}"

    def __str__(self) -> str:
        return "\n\n".join([self.target, *map(str, self.functions.values())]) + "\n"


def disassemble(cubin: bytes) -> Listing:
    """Instructions, schedule and resources of every kernel of a cubin (0.2 s of CPU, nearly all of it nvdisasm)."""
    usage = resource_usage(cubin)
    text = run_nvdisasm(cubin, "-hex", "-ndf")
    if "BRX" in text:  # the tables of indirect branches need the dataflow analysis that -ndf leaves out to save 0.06 s
        text = run_nvdisasm(cubin, "-hex")
    pieces = SECTION.split(text)[1:]
    functions = {}
    for name, body in zip(pieces[::2], pieces[1::2], strict=True):
        instructions, labels = _parse(body)
        functions[name] = Function(name, instructions, labels, *usage[name])
    if not functions:
        raise BadCubin(f"nvdisasm found no kernel in a cubin of {len(cubin)} bytes")
    target = TARGET.search(text)
    return Listing(read_sm(cubin), functions, cubin, target.group(1) if target else "")


def run_nvdisasm(cubin: bytes, *options: str) -> str:
    """The text nvdisasm prints for the code sections of a cubin."""
    descriptor, path = tempfile.mkstemp(suffix=".cubin")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(cubin)
        command = [find_nvdisasm(), "-c", *options, path]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        os.unlink(path)
    if done.returncode:
        raise BadCubin(f"nvdisasm refused a cubin of {len(cubin)} bytes: {done.stderr.strip() or done.returncode}")
    return done.stdout


@lru_cache
def find_nvdisasm() -> str:
    """nvdisasm from NVIDIA's wheel, whatever CUDA major it is for, or else from the PATH."""
    for root in map(Path, sys.path):
        newest_last = sorted(root.glob(WHEEL_PATHS))
        if newest_last:
            return str(newest_last[-1])
    found = shutil.which("nvdisasm")
    if found is None:
        raise DisassemblerMissing(
            "nvdisasm is needed to read machine code, and neither the wheel nvidia-cuda-nvdisasm nor a CUDA toolkit on "
            "the PATH has it; pip install nvidia-cuda-nvdisasm"
        )
    return found


def _parse(section: str) -> tuple[tuple[Instruction, ...], dict[str, int]]:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for match in LINE.finditer(section):
        label, address, text, high = match.groups()
        if label:
            labels[label] = len(instructions)
            continue
        text = REMARK.sub("", text) if "(*" in text else text
        instructions.append(parse_instruction(int(address, 16), text, decode_control(int(high, 16))))
    return tuple(instructions), labels
