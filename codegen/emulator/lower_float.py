"""Lower floating-point arithmetic: each result is rounded once, `.ftz` flushes operands and results."""

from __future__ import annotations

from collections.abc import Callable

from .emitter import Emitter
from .instructions import Instruction

HALVES = ("f16", "bf16", "f16x2", "bf16x2")
_TWO = {"add": "add", "sub": "subtract", "mul": "multiply"}
_SPECIAL = {
    "ex2": "exp2({a}, {d})",
    "lg2": "log2({a}, {d})",
    "sin": "sin({a}, {d})",
    "cos": "cos({a}, {d})",
    "tanh": "tanh({a}, {d})",
    "sqrt": "sqrt({a}, {d})",
    "rcp": "divide(ONE, {a}, {d})",
    "rsqrt": "reciprocal_root({a}, {d})",
}


def _source(e: Emitter, operand: object, type_name: str, ftz: bool) -> str:
    value = e.source(str(operand), type_name)
    return f"flushed({value})" if ftz else value


def lower_two(e: Emitter, i: Instruction) -> None:
    """add, sub, mul, fma and mad of any floating type."""
    t = i.type
    flags = e.flags(i, ("rn", "ftz") if t != "f64" else ("rn",))
    if t in HALVES:
        _lower_half(e, i, i.base)
        return
    ftz = "ftz" in flags
    name, *operands = i.operands
    values = [_source(e, operand, t, ftz) for operand in operands]
    if i.base in ("fma", "mad"):
        template = f"fma_{t}({', '.join(values)}, {{d}})"
    else:
        template = f"{_TWO[i.base]}({', '.join(values)}, {{d}})"
    e.write(str(name), t, template + ("\nflush({d})" if ftz else ""))


def lower_minmax(e: Emitter, i: Instruction) -> None:
    """min and max: without .NaN the operand that is a number wins."""
    t = i.type
    flags = e.flags(i, ("ftz", "NaN") if t != "f64" else ())
    if t in HALVES:
        _lower_half(e, i, f"{'' if 'NaN' in flags else 'number_'}{i.base}")
        return
    function = f"{i.base}imum" if "NaN" in flags else f"f{i.base}"
    name, first, *others = i.operands
    value = e.source(first, t)
    lines = []
    for operand in others:  # three operands are allowed since sm_100
        lines.append(f"{function}({value}, {e.source(operand, t)}, out={{d}})")
        value = "{d}"
    # flushing is monotonic, so flushing the result is the same as flushing the operands
    if "ftz" in flags:
        lines.append("flush({d})")
    if len(lines) > 1:
        code = "f4" if t == "f32" else "f8"
        e.emit(f"v = empty(n, {code})")
        e.emit("\n".join(lines).format(d="v"))
        lines = ["copyto({d}, v)"]
    e.write(str(name), t, "\n".join(lines))


def lower_one(e: Emitter, i: Instruction) -> None:
    """neg and abs."""
    t = i.type
    flags = e.flags(i, ("ftz",) if t != "f64" else ())
    if t in HALVES:
        bits = {"f16": 0x8000, "bf16": 0x8000}.get(t, 0x80008000)
        width = "b16" if bits == 0x8000 else "b32"
        operation = "bitwise_xor" if i.base == "neg" else "bitwise_and"
        mask = e.constant(bits if i.base == "neg" else ~bits, width)
        e.write(str(i.operands[0]), width, f"{operation}({e.source(i.operands[1], width)}, {mask}, {{d}})")
        return
    function = "negative" if i.base == "neg" else "absolute"
    template = f"{function}({e.source(i.operands[1], t)}, {{d}})"
    e.write(str(i.operands[0]), t, template + ("\nflush({d})" if "ftz" in flags else ""))


def lower_special(e: Emitter, i: Instruction) -> None:
    """ex2, lg2, rcp, rsqrt, sqrt, sin, cos, tanh: computed to full float32 accuracy even where PTX says .approx."""
    t = i.type
    flags = e.flags(i, ("approx", "rn", "ftz") if t != "f64" else ("rn",))
    if t in HALVES:
        if i.base not in ("ex2", "tanh"):
            e.unknown(i, f"type .{t}")
        _lower_half(e, i, "exp2" if i.base == "ex2" else "tanh")
        return
    ftz = "ftz" in flags
    # 2^x of a subnormal x is 1 with or without the flush
    a = _source(e, i.operands[1], t, ftz and i.base != "ex2")
    template = _SPECIAL[i.base].format(a=a, d="{d}") + ("\nflush({d})" if ftz else "")
    if i.base == "ex2" and ftz:
        template = f"exp2_flushed({a}, {{d}})"
    e.write(str(i.operands[0]), t, template)


def lower_divide(e: Emitter, i: Instruction) -> None:
    """div: .rn, .full and .approx all round correctly here."""
    t = i.type
    flags = e.flags(i, ("approx", "full", "rn", "ftz") if t == "f32" else ("rn",))
    ftz = "ftz" in flags
    name, a, b = i.operands
    template = f"divide({_source(e, a, t, ftz)}, {_source(e, b, t, ftz)}, {{d}})"
    e.write(str(name), t, template + ("\nflush({d})" if ftz else ""))


def lower_copysign(e: Emitter, i: Instruction) -> None:
    """copysign d, a, b: the sign of a, the value of b."""
    e.flags(i, ())
    name, a, b = i.operands
    e.write(str(name), i.type, f"copysign({e.source(b, i.type)}, {e.source(a, i.type)}, {{d}})")


def _lower_half(e: Emitter, i: Instruction, operation: str) -> None:
    """16-bit floats, one or two in a register: widened, computed and rounded once by `half_<operation>`."""
    flags = i.modifiers
    brain = i.type.startswith("bf")
    width = "b32" if i.type.endswith("x2") else "b16"
    values = ", ".join(e.source(operand, width) for operand in i.operands[1:])
    template = f"half_{operation}({{d}}, {brain}, {values})"
    if "ftz" in flags and not brain:
        template = f"half_flushed(half_{operation}, {{d}}, {values})"
    e.write(str(i.operands[0]), width, template)


LOWER: dict[str, Callable[[Emitter, Instruction], None]] = {
    **dict.fromkeys(("add", "sub", "mul", "fma", "mad"), lower_two),
    **dict.fromkeys(("min", "max"), lower_minmax),
    **dict.fromkeys(("neg", "abs"), lower_one),
    **dict.fromkeys(_SPECIAL, lower_special),
    "div": lower_divide,
    "copysign": lower_copysign,
}
