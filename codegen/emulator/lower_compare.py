"""Lower comparisons and selections."""

from __future__ import annotations

from collections.abc import Callable

from .emitter import Emitter
from .instructions import Instruction
from .lower_float import HALVES
from .types import SIZE, is_float

_COMPARE = {
    "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal", "eq": "equal", "ne": "not_equal",
    "lo": "less", "ls": "less_equal", "hi": "greater", "hs": "greater_equal",
}  # fmt: skip
_OPPOSITE = {"ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}


def _comparison(e: Emitter, i: Instruction, relation: str, type_name: str, ftz: bool) -> str:
    """Expression of booleans. Ordered relations are false for NaN, unordered ones (`ltu`) true."""
    a, b = (e.source(operand, type_name) for operand in i.operands[1:3])
    if type_name in HALVES:
        a, b = f"widened_half({a}, {type_name == 'bf16'})", f"widened_half({b}, {type_name == 'bf16'})"
    elif ftz:
        a, b = f"flushed({a})", f"flushed({b})"
    if relation == "num":
        return f"logical_not(unordered({a}, {b}))"
    if relation == "nan":
        return f"unordered({a}, {b})"
    if relation in _OPPOSITE:
        return f"logical_not({_COMPARE[_OPPOSITE[relation]]}({a}, {b}))"
    if relation == "equ":
        return f"logical_or(equal({a}, {b}), unordered({a}, {b}))"
    if relation == "neu":
        return f"not_equal({a}, {b})"
    if relation == "ne" and is_float(type_name):
        return f"logical_and(not_equal({a}, {b}), logical_not(unordered({a}, {b})))"
    if relation not in _COMPARE:
        e.unknown(i, f"relation .{relation}")
    return f"{_COMPARE[relation]}({a}, {b})"


def lower_setp(e: Emitter, i: Instruction) -> None:
    """setp, with a second result `p|q` and with a boolean operation on a third operand."""
    flags = list(e.flags(i, {*_COMPARE, *_OPPOSITE, "equ", "neu", "num", "nan", "and", "or", "xor", "ftz"}))
    if i.type in ("f16x2", "bf16x2"):
        e.unknown(i, f"type .{i.type}")
    relation = flags.pop(0)
    ftz = "ftz" in flags
    combine = next((flag for flag in flags if flag in ("and", "or", "xor")), None)
    results = [name.strip() for name in str(i.operands[0]).split("|")]
    simple = _COMPARE.get(relation) if not is_float(i.type) or relation != "ne" else None
    if simple and len(results) == 1 and not combine and not ftz and i.type not in HALVES:
        a, b = (e.source(operand, i.type) for operand in i.operands[1:3])
        e.write(results[0], "pred", f"{simple}({a}, {b}, {{d}})")
        return
    e.emit(f"c = {_comparison(e, i, relation, i.type, ftz)}")
    third = e.source(i.operands[3], "pred") if combine else ""
    if len(results) > 1:
        other = f"logical_{combine}(logical_not(c), {third})" if combine else "logical_not(c)"
        e.emit(f"c2 = {other}")
    e.write(results[0], "pred", f"copyto({{d}}, logical_{combine}(c, {third}))" if combine else "copyto({d}, c)")
    if len(results) > 1:
        e.write(results[1], "pred", "copyto({d}, c2)")


def lower_set(e: Emitter, i: Instruction) -> None:
    """set: all ones (or 1.0) where the comparison holds."""
    flags = list(e.flags(i, {*_COMPARE, *_OPPOSITE, "equ", "neu", "num", "nan", "ftz"}, types=2))
    result, compared = i.modifiers[-2:]
    if result not in ("u32", "s32", "f32"):
        e.unknown(i, f"result .{result}")
    e.emit(f"c = {_comparison(e, i, flags[0], compared, 'ftz' in flags)}")
    e.write(str(i.operands[0]), result, "copyto({d}, c)" if result == "f32" else "negative(c.astype({d}.dtype), {d})")


def lower_selp(e: Emitter, i: Instruction) -> None:
    """selp: a if the predicate holds, else b."""
    e.flags(i, ())
    name, a, b, p = i.operands
    bits = f"b{8 * SIZE[i.type]}"
    a_bits, b_bits = _bits(e, a, i.type), _bits(e, b, i.type)
    e.write(str(name), bits, f"select({e.source(p, 'pred')}, {a_bits}, {b_bits}, {{d}})")


def _bits(e: Emitter, operand: object, type_name: str) -> str:
    text = str(operand)
    if text in e.symbols.registers or text.startswith("%"):
        return e.source(text, f"b{8 * SIZE[type_name]}")
    value = e.source(text, type_name)  # a number: first as its type, then as bits
    bits = int(e.constants[value].view(f"u{SIZE[type_name]}"))
    return e.constant(bits, f"b{8 * SIZE[type_name]}")


def lower_slct(e: Emitter, i: Instruction) -> None:
    """slct: a if c >= 0, else b."""
    flags = e.flags(i, ("ftz",), types=2)
    result, compared = i.modifiers[-2:]
    name, a, b, c = i.operands
    bits = f"b{8 * SIZE[result]}"
    value = e.source(c, compared)
    condition = f"greater_equal({f'flushed({value})' if 'ftz' in flags else value}, 0)"
    e.write(str(name), bits, f"select({condition}, {_bits(e, a, result)}, {_bits(e, b, result)}, {{d}})")


LOWER: dict[str, Callable[[Emitter, Instruction], None]] = {
    "setp": lower_setp,
    "set": lower_set,
    "selp": lower_selp,
    "slct": lower_slct,
}
