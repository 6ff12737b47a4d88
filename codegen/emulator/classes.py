"""Sort instructions into the classes that a launch report counts."""

from __future__ import annotations

from .instructions import Instruction
from .types import is_float

_BY_BASE = {
    "mma": "tensor", "ldmatrix": "shared_load", "stmatrix": "shared_store", "movmatrix": "shuffle",
    "ex2": "special", "lg2": "special", "rcp": "special", "rsqrt": "special", "sqrt": "special", "sin": "special",
    "cos": "special", "tanh": "special", "cvt": "convert", "cvta": "move", "mov": "move", "mapa": "move",
    "atom": "atomic", "red": "atomic", "shfl": "shuffle", "vote": "shuffle", "activemask": "shuffle", "bar": "barrier",
    "barrier": "barrier", "bra": "control", "brx": "control", "ret": "control", "exit": "control", "trap": "control",
    "membar": "control", "fence": "control", "prefetch": "control", "prefetchu": "control", "nanosleep": "control",
    "mbarrier": "barrier", "elect": "shuffle", "setmaxnreg": "control", "griddepcontrol": "control", "cp": "async_copy",
    "isspacep": "integer",
}  # fmt: skip

CLASSES = (
    "tensor", "float", "integer", "special", "convert", "move", "shared_load", "shared_store", "global_load",
    "global_store", "local_load", "local_store", "param_load", "async_copy", "atomic", "shuffle", "barrier", "control",
)  # fmt: skip
"""All classes, in the order of a report."""


def instruction_class(instruction: Instruction) -> str:
    """The class of one instruction: `add.f32` is "float", `ld.shared.v4.b32` is "shared_load"."""
    base = instruction.base
    if base in ("ld", "ldu", "st"):
        space = state_space(instruction)
        kind = "store" if base == "st" else "load"
        if space == "param":
            return "param_load"
        return f"{'global' if space in ('const', 'generic') else space}_{kind}"
    if base == "wgmma":
        return "tensor" if instruction.modifiers[0] == "mma_async" else "control"
    if base in _BY_BASE:
        return _BY_BASE[base]
    if base == "div" and is_float(instruction.type):
        return "special"
    return "float" if is_float(instruction.type) else "integer"


def state_space(instruction: Instruction) -> str:
    """Where a memory instruction goes: global, shared, local, param, const, or generic if it does not say."""
    for modifier in instruction.modifiers:
        space = modifier.split("::")[0]
        if space in ("global", "shared", "local", "param", "const"):
            return space
    return "generic"
