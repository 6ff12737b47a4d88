"""Read the variables that PTX declares and lay them out in shared or local memory."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from .errors import PtxError
from .types import SIZE, is_float

_VARIABLE = re.compile(
    r"\.(shared|local|global|const)\s+(?:\.attribute\([^)]*\)\s+)?(?:\.align\s+(\d+)\s+)?\.(\w+)\s+"
    r"([\w$]+)\s*((?:\[\d*\])*)\s*(?:=\s*(.*))?$",
    re.S,
)


@dataclass(frozen=True, slots=True)
class Variable:
    """A named piece of memory; `size` 0 stands for dynamic shared memory."""

    space: str
    name: str
    align: int
    size: int
    data: bytes | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """Where variables lie, as byte offsets, and the bytes that are fixed by the text."""

    offsets: dict[str, int]
    static_bytes: int
    dynamic_offset: int


def read_variable(text: str) -> Variable:
    """Read `.extern .shared .align 16 .b8 smem[]` and its like."""
    found = _VARIABLE.search(text)
    if found is None or found.group(3) not in SIZE:
        raise PtxError(f"cannot read the variable {text!r}")
    element = SIZE[found.group(3)]
    count = 1
    for dimension in re.findall(r"\[(\d*)\]", found.group(5)):
        count *= int(dimension or 0)
    data = _initial_bytes(found.group(6), found.group(3)) if found.group(6) else None
    if data is not None and count == 0:
        count = len(data) // element
    return Variable(found.group(1), found.group(4), int(found.group(2) or element), count * element, data)


def _initial_bytes(text: str, type_name: str) -> bytes | None:
    values = [value.strip() for value in text.strip().strip("{}").replace("{", "").replace("}", "").split(",")]
    data = b""
    for value in values:
        if re.fullmatch(r"0[fFdD][0-9a-fA-F]+", value):
            data += bytes.fromhex(value[2:])[::-1]
        elif re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", value):
            size = SIZE[type_name]
            data += (int(value.rstrip("U"), 0) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        elif is_float(type_name):
            data += struct.pack("<f" if type_name == "f32" else "<d", float(value))
        else:
            return None  # an address of another variable: reading it is an error where it happens
    return data


def lay_out(variables: Iterable[Variable]) -> Layout:
    """Place static variables in the order of the text; dynamic shared memory starts aligned behind all of them."""
    offsets: dict[str, int] = {}
    end, dynamic_align = 0, 1
    dynamic: list[str] = []
    for variable in variables:
        if variable.size == 0:
            dynamic.append(variable.name)
            dynamic_align = max(dynamic_align, variable.align)
            continue
        end = -(-end // variable.align) * variable.align
        offsets[variable.name] = end
        end += variable.size
    dynamic_offset = -(-end // dynamic_align) * dynamic_align
    offsets.update(dict.fromkeys(dynamic, dynamic_offset))
    return Layout(offsets, end, dynamic_offset)
