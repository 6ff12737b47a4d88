"""Parse PTX text into a module of kernels: parameters, variables, registers and instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .errors import PtxError
from .instructions import Instruction, read_instruction
from .statements import Statement, declared_names, split_statements, strip_comments
from .types import SIZE
from .variables import Variable, read_variable

if TYPE_CHECKING:
    from .program import Program

_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(\((.*?)\))?([^{;]*)\{", re.S)
_SIZES = r"(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?"  # along x, y and z
_PARAM = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(.*?)([\w$]+)\s*(?:\[(\d+)\])?\s*$", re.S)


@dataclass(frozen=True, slots=True)
class Param:
    """One `.param` of a kernel; a struct passed by value has type `b8` and its size in bytes."""

    name: str
    type: str
    offset: int
    size: int
    align: int


@dataclass(slots=True)
class Kernel:
    """One `.entry`. It is lowered when it is launched, block by block; the code stays cached in it."""

    name: str
    params: tuple[Param, ...]
    max_threads: int | None
    cluster: tuple[int, int, int]
    """Blocks of a cluster along each axis, as `__cluster_dims__` says; (1, 1, 1) without."""
    module: Module
    body: Body
    _program: Program | None = None

    @property
    def program(self) -> Program:
        """The kernel as basic blocks, with the code generated so far."""
        if self._program is None:
            from .program import Program

            self._program = Program(self)
        return self._program

    @property
    def static_shared_bytes(self) -> int:
        """Bytes of shared memory that the text declares; dynamic shared memory starts behind them."""
        return self.program.shared.static_bytes

    def lowered(self, block: int, masked: bool = False) -> str:
        """The Python source generated for a basic block, for reading: `print(kernel.lowered(0))`."""
        return self.program.lowered(block, masked).source


@dataclass(slots=True)
class Body:
    """Registers with their types, labels as positions in the list of instructions, and variables of one kernel."""

    registers: dict[str, str] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of brx.idx
    instructions: list[Instruction] = field(default_factory=list)
    variables: list[Variable] = field(default_factory=list)


@dataclass(slots=True)
class Module:
    """A PTX file: its target (`sm_80`), its kernels by name, and the variables outside of them."""

    target: str
    kernels: dict[str, Kernel]
    variables: list[Variable]


def parse(ptx_text: str) -> Module:
    """Read a PTX module.

    >>> text = ".version 8.0\\n.target sm_80\\n.address_size 64\\n.visible .entry nothing(.param .u32 n) { ret; }"
    >>> parse(text).kernels["nothing"].params[0].type
    'u32'
    """
    text = strip_comments(ptx_text)
    section = text.find("\n.section")  # debug information follows
    if section >= 0:
        text = text[:section]
    target = re.search(r"\.target\s+(\w+)", text)
    if target is None:
        raise PtxError("the text has no .target directive; is it PTX?")
    module = Module(target.group(1), {}, [])
    outside, end = [], 0
    for found in _ENTRY.finditer(text):
        if found.start() < end:
            continue
        outside.append(text[end : found.start()])
        end = _matching_brace(text, found.end())
        module.kernels[found.group(1)] = Kernel(
            name=found.group(1),
            params=_read_params(found.group(3) or ""),
            max_threads=_max_threads(found.group(4)),
            cluster=_cluster(found.group(4)),
            module=module,
            body=_read_body(split_statements(text[found.end() : end - 1], text.count("\n", 0, found.end()) + 1)),
        )
    outside.append(text[end:])
    for part in outside:
        module.variables += _module_variables(part)
    if not module.kernels and ".func" not in text:
        raise PtxError("the text has no .entry")
    return module


def _matching_brace(text: str, position: int) -> int:
    depth = 1
    for found in re.compile(r"[{}]").finditer(text, position):
        depth += 1 if found.group(0) == "{" else -1
        if depth == 0:
            return found.end()
    raise PtxError("the body of a kernel is never closed")


def _read_params(text: str) -> tuple[Param, ...]:
    params: list[Param] = []
    offset = 0
    for item in text.split(","):
        if not item.strip():
            continue
        found = _PARAM.search(" ".join(item.split()))
        if found is None or found.group(2) not in SIZE:
            raise PtxError(f"cannot read the parameter {item.strip()!r}")
        type_name = found.group(2)
        size = SIZE[type_name] * int(found.group(5) or 1)
        align = int(found.group(1) or SIZE[type_name])
        if not found.group(5):  # for a pointer, .align speaks of what it points to
            align = SIZE[type_name]
        offset = -(-offset // align) * align
        params.append(Param(found.group(4), type_name, offset, size, align))
        offset += size
    return tuple(params)


def _max_threads(directives: str) -> int | None:
    found = re.search(rf"\.(?:maxntid|reqntid)\s+{_SIZES}", directives)
    if found is None:
        return None
    x, y, z = (int(group or 1) for group in found.groups())
    return x * y * z


def _cluster(directives: str) -> tuple[int, int, int]:
    found = re.search(rf"\.reqnctapercluster\s+{_SIZES}", directives)
    if found is None and ".explicitcluster" in directives:
        raise PtxError("a cluster whose size comes with the launch is not implemented; use __cluster_dims__")
    x, y, z = (int(group or 1) for group in found.groups()) if found else (1, 1, 1)
    return x, y, z


def _module_variables(text: str) -> list[Variable]:
    """Shared, global and constant variables declared outside of kernels."""
    variables = []
    for found in re.finditer(r"^[^\n;{}]*?\.(?:shared|global|const)\b[^;]*;", text, re.M):
        variables.append(read_variable(" ".join(found.group(0)[:-1].split())))
    return variables


def _read_body(statements: list[Statement]) -> Body:
    body = Body()
    for statement in statements:
        text = statement.text
        if statement.kind == "label":
            body.labels[text] = len(body.instructions)
        elif text.startswith("."):
            _read_directive(body, statement)
        else:
            body.instructions.append(read_instruction(text, statement.line, len(body.instructions)))
    return body


def _read_directive(body: Body, statement: Statement) -> None:
    text = " ".join(statement.text.split())
    word = text.split(None, 1)[0]
    if word == ".reg":
        type_name, names = declared_names(text)
        if type_name not in SIZE:
            raise PtxError(f"PTX line {statement.line}: unknown register type .{type_name}")
        body.registers.update(dict.fromkeys(names, type_name))
    elif word in (".shared", ".local", ".extern"):
        body.variables.append(read_variable(text))
    elif word == ".branchtargets":
        name = next(label for label, position in reversed(body.labels.items()) if position == len(body.instructions))
        body.tables[name] = tuple(item.strip() for item in text.split(None, 1)[1].split(","))
    elif word not in (".pragma", ".loc", ".file", ".noreturn"):
        raise PtxError(f"PTX line {statement.line}: cannot read the directive {text!r}")
