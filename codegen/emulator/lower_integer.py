"""Lower integer and bit instructions to NumPy calls."""

from __future__ import annotations

from collections.abc import Callable

from .emitter import Emitter
from .instructions import Instruction
from .types import SIZE, is_signed

_TWO = {"add": "add", "sub": "subtract", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"}
_LOGICAL = {"and": "logical_and", "or": "logical_or", "xor": "logical_xor"}
_WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
_CODE = {"u16": "u2", "s16": "i2", "u32": "u4", "s32": "i4", "u64": "u8", "s64": "i8"}


def lower_two(e: Emitter, i: Instruction) -> None:
    """add, sub, and, or, xor of integers, bits and predicates."""
    e.flags(i, ())
    d, a, b = i.operands
    if i.type == "pred":
        e.write(str(d), "pred", f"{_LOGICAL[i.base]}({e.source(a, 'pred')}, {e.source(b, 'pred')}, {{d}})")
        return
    e.write(str(d), i.type, f"{_TWO[i.base]}({e.source(a, i.type)}, {e.source(b, i.type)}, {{d}})")


def lower_minmax(e: Emitter, i: Instruction) -> None:
    """min and max of integers."""
    e.flags(i, ())
    d, a, b = i.operands
    e.write(str(d), i.type, f"{i.base}imum({e.source(a, i.type)}, {e.source(b, i.type)}, out={{d}})")


def lower_one(e: Emitter, i: Instruction) -> None:
    """not, neg, abs, cnot."""
    e.flags(i, ())
    t = i.type
    a = e.source(i.operands[1], t)
    if i.base == "not":
        template = f"logical_not({a}, {{d}})" if t == "pred" else f"invert({a}, {{d}})"
    elif i.base == "cnot":
        template = f"copyto({{d}}, equal({a}, 0))"
    else:
        template = f"{'negative' if i.base == 'neg' else 'absolute'}({a}, {{d}})"
    e.write(str(i.operands[0]), t, template)


def lower_mul(e: Emitter, i: Instruction) -> None:
    """mul and mad: .lo, .hi, .wide."""
    flags = e.flags(i, ("lo", "hi", "wide"))
    if len(flags) != 1:
        e.unknown(i, "the form without .lo, .hi or .wide")
    t, name = i.type, str(i.operands[0])
    a, b = e.source(i.operands[1], t), e.source(i.operands[2], t)
    result = _WIDE[t] if "wide" in flags else t
    c = e.source(i.operands[3], result) if i.base == "mad" else None
    if "wide" in flags:
        # the output type alone would not do: NumPy multiplies in the type of its inputs
        template = f"multiply({a}, {b}, {{d}}, dtype={_CODE[result]})"
    elif "hi" in flags:
        template = f"multiply_high({a}, {b}, {{d}})"
    else:
        template = f"multiply({a}, {b}, {{d}})"
    if c is None:
        e.write(name, result, template)
        return
    e.emit(f"v = empty(n, {_CODE[result]})")
    e.emit(template.format(d="v"))
    e.write(name, result, f"add(v, {c}, {{d}})")


def lower_divide(e: Emitter, i: Instruction) -> None:
    """div and rem of integers."""
    e.flags(i, ())
    d, a, b = i.operands
    function = "divide_integers" if i.base == "div" else "remainder_integers"
    e.write(str(d), i.type, f"{function}({e.source(a, i.type)}, {e.source(b, i.type)}, {{d}})")


def lower_shift(e: Emitter, i: Instruction) -> None:
    """shl and shr; amounts beyond the width are clamped, as PTX says."""
    e.flags(i, ())
    t, bits = i.type, 8 * SIZE[i.type]
    a = e.source(i.operands[1], t)
    amount = e.known(i.operands[2])
    if amount is None:
        template = f"shift_{'left' if i.base == 'shl' else 'right'}({a}, {e.source(i.operands[2], 'u32')}, {{d}})"
    else:
        amount &= 0xFFFFFFFF
        if is_signed(t) and i.base == "shr":
            amount = min(amount, bits - 1)
        function = "left_shift" if i.base == "shl" else "right_shift"
        template = f"{function}({a}, {e.constant(amount, t)}, {{d}})" if amount < bits else "{d}.fill(0)"
    e.write(str(i.operands[0]), t, template)


def lower_bits(e: Emitter, i: Instruction) -> None:
    """popc, clz, brev, bfind."""
    flags = e.flags(i, ("shiftamt",) if i.base == "bfind" else ())
    result = i.type if i.base == "brev" else "u32"
    function = "find_leading_shift" if flags else {"bfind": "find_leading"}.get(i.base, i.base)
    e.write(str(i.operands[0]), result, f"{function}({e.source(i.operands[1], i.type)}, {{d}})")


def lower_field(e: Emitter, i: Instruction) -> None:
    """bfe and bfi."""
    e.flags(i, ())
    name, *values, position, length = i.operands
    arguments = ", ".join(e.source(value, i.type) for value in values)
    where = f"{e.source(position, 'u32')}, {e.source(length, 'u32')}"
    e.write(str(name), i.type, f"{i.base}({arguments}, {where}, {{d}})")


def lower_lop3(e: Emitter, i: Instruction) -> None:
    """lop3: any function of three bits, as a table of 8."""
    e.flags(i, ())
    name, a, b, c, table = i.operands
    known = e.known(table)
    if known is None:
        e.unknown(i, "a table that is no constant")
    values = ", ".join(e.source(value, "b32") for value in (a, b, c))
    e.write(str(name), "b32", f"lop3({values}, {known}, {{d}})")


def lower_funnel(e: Emitter, i: Instruction) -> None:
    """shf.l and shf.r, .wrap or .clamp."""
    flags = e.flags(i, ("l", "r", "wrap", "clamp"))
    name, a, b, c = i.operands
    values = f"{e.source(a, 'b32')}, {e.source(b, 'b32')}, {e.source(c, 'u32')}"
    e.write(str(name), "b32", f"funnel_shift({values}, {{d}}, {'l' in flags}, {'wrap' in flags})")


def lower_prmt(e: Emitter, i: Instruction) -> None:
    """prmt in its default mode: four bytes picked from eight."""
    e.flags(i, ())
    name, a, b, c = i.operands
    selector = e.known(c)
    values = f"{e.source(a, 'b32')}, {e.source(b, 'b32')}"
    if selector is not None:
        e.write(str(name), "b32", f"permute_bytes_known({values}, {selector & 0xFFFF}, {{d}})")
        return
    e.write(str(name), "b32", f"permute_bytes({values}, {e.source(c, 'b32')}, {{d}})")


LOWER: dict[str, Callable[[Emitter, Instruction], None]] = {
    **dict.fromkeys(("add", "sub", "and", "or", "xor"), lower_two),
    **dict.fromkeys(("min", "max"), lower_minmax),
    **dict.fromkeys(("not", "neg", "abs", "cnot"), lower_one),
    **dict.fromkeys(("mul", "mad"), lower_mul),
    **dict.fromkeys(("div", "rem"), lower_divide),
    **dict.fromkeys(("shl", "shr"), lower_shift),
    **dict.fromkeys(("popc", "clz", "brev", "bfind"), lower_bits),
    **dict.fromkeys(("bfe", "bfi"), lower_field),
    "lop3": lower_lop3,
    "shf": lower_funnel,
    "prmt": lower_prmt,
}
