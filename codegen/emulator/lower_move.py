"""Lower mov (plain, packing and unpacking) and cvta."""

from __future__ import annotations

from collections.abc import Callable

from .addresses import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, WINDOW_BYTES
from .emitter import Emitter
from .instructions import Instruction
from .types import SIZE

_WINDOWS = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAM_WINDOW, "global": 0, "const": 0}


def lower_mov(e: Emitter, i: Instruction) -> None:
    """mov; `mov.b32 d, {a, b}` packs, `mov.b32 {a, b}, d` unpacks."""
    e.flags(i, ())
    target, value = i.operands
    if isinstance(value, tuple):
        part = f"b{8 * SIZE[i.type] // len(value)}"
        lines = [f"v = {{d}}.view(u{SIZE[part]}).reshape(-1, {len(value)})"]
        lines += [f"v[:, {k}] = {e.source(item, part)}" for k, item in enumerate(value)]
        if len(set(value) & {str(target)}):
            e.emit(f"w = empty(n, u{SIZE[i.type]})")
            e.emit("\n".join(lines).format(d="w"))
            lines = ["copyto({d}, w)"]
        e.write(str(target), f"b{8 * SIZE[i.type]}", "\n".join(lines))
    elif isinstance(target, tuple):
        part = f"b{8 * SIZE[i.type] // len(target)}"
        e.emit(f"v = split({e.source(value, f'b{8 * SIZE[i.type]}')}, n, u{SIZE[part]}, {len(target)})")
        for k, item in enumerate(target):
            if item != "_":
                e.write(item, part, f"copyto({{d}}, v[:, {k}])")
    else:
        template = f"copyto({{d}}, {e.source(value, i.type)}, casting='unsafe')"
        e.write(str(target), i.type, template)


def lower_cvta(e: Emitter, i: Instruction) -> None:
    """cvta: to and from the generic address space."""
    flags = e.flags(i, ("to", "shared", "shared::cta", "local", "global", "const", "param"))
    window = _WINDOWS[flags[-1].split("::")[0]]
    value = e.source(i.operands[1], i.type)
    if not window:
        template = f"copyto({{d}}, {value})"
    else:
        function = "subtract" if flags[0] == "to" else "add"
        template = f"{function}({value}, {e.constant(window, i.type)}, {{d}})"
    e.write(str(i.operands[0]), i.type, template)


def lower_isspacep(e: Emitter, i: Instruction) -> None:
    """isspacep: whether a generic address lies in a state space."""
    space = i.modifiers[-1].split("::")[0]
    if space not in _WINDOWS:
        e.unknown(i, f"space .{space}")
    value = e.source(i.operands[1], "u64")
    if space in ("global", "const"):
        template = f"less({value}, {e.constant(SHARED_WINDOW, 'u64')}, {{d}})"
    else:
        low, bytes_ = e.constant(_WINDOWS[space], "u64"), e.constant(WINDOW_BYTES, "u64")
        template = f"less(subtract({value}, {low}), {bytes_}, {{d}})"
    e.write(str(i.operands[0]), "pred", template)


LOWER: dict[str, Callable[[Emitter, Instruction], None]] = {
    "mov": lower_mov,
    "cvta": lower_cvta,
    "isspacep": lower_isspacep,
}
