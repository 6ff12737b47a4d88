"""Lower cvt: between integers, between floats, and the packed forms that attention kernels use."""

from __future__ import annotations

from collections.abc import Callable

from .emitter import Emitter
from .instructions import Instruction
from .types import CODE, SIGNED, SIZE, UNSIGNED, is_float, is_signed

_ROUND_INTEGER = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
_HALVES = ("f16", "bf16")


def lower_cvt(e: Emitter, i: Instruction) -> None:
    """cvt in all forms but .sat, .relu, .satfinite and the 8-bit floats; .rna, to tf32 alone, is that alone."""
    if i.modifiers == ("rna", "tf32", "f32"):
        e.write(str(i.operands[0]), "b32", f"to_tf32({e.source(i.operands[1], 'f32')}, {{d}})")
        return
    rounding = ("rn", "rz", "rm", "rp", *_ROUND_INTEGER, "ftz")
    flags = list(e.flags(i, rounding, types=2))
    to, source = i.modifiers[-2:]
    ftz = "ftz" in flags
    mode = next((flag for flag in flags if flag != "ftz"), "")
    if to in ("f16x2", "bf16x2"):
        _packed(e, i, to, source, mode)
    elif is_float(to) and is_float(source):
        _float_to_float(e, i, to, source, mode, ftz)
    elif is_float(to):
        _integer_to_float(e, i, to, source, mode)
    elif is_float(source):
        _float_to_integer(e, i, to, source, mode, ftz)
    else:
        _write_integer(e, i, to, f"copyto({{d}}, {e.source(i.operands[1], source)}, casting='unsafe')")


def _packed(e: Emitter, i: Instruction, to: str, source: str, mode: str) -> None:
    """cvt.rn.f16x2.f32 d, high, low."""
    if source != "f32" or mode not in ("rn", "rz") or len(i.operands) != 3:
        e.unknown(i, "this form")
    high, low = e.source(i.operands[1], "f32"), e.source(i.operands[2], "f32")
    function = ("pack_bf16" if to == "bf16x2" else "pack_f16") + ("" if mode == "rn" else "_rz")
    e.write(str(i.operands[0]), "b32", f"{function}({high}, {low}, {{d}})")


def _widened(e: Emitter, i: Instruction, source: str) -> str:
    value = e.source(i.operands[1], source)
    return f"widened_half({value}, {source == 'bf16'})" if source in _HALVES else value


def _float_to_float(e: Emitter, i: Instruction, to: str, source: str, mode: str, ftz: bool) -> None:
    value = _widened(e, i, source)
    if ftz and source == "f32":
        value = f"flushed({value})"
    after = "\nflush({d})" if ftz and to == "f32" else ""
    if mode in _ROUND_INTEGER:
        if to != source or to in _HALVES:
            e.unknown(i, "this form")
        template = f"{_ROUND_INTEGER[mode]}({value}, {{d}})"
    elif to in _HALVES:
        if mode not in ("rn", "rz"):
            e.unknown(i, f"rounding .{mode}")
        template = f"to_{to}{'_rz' if mode == 'rz' else ''}({value}, {{d}})"
    elif SIZE[to] >= SIZE[source]:
        template = f"copyto({{d}}, {value})"
    elif mode == "rn":
        template = f"copyto({{d}}, {value}, casting='same_kind')"
    else:
        template = f"round_f64_to_f32({value}, {{d}}, '{mode}')"
    e.write(str(i.operands[0]), to, template + after)


def _integer_to_float(e: Emitter, i: Instruction, to: str, source: str, mode: str) -> None:
    value = e.source(i.operands[1], source)
    if mode == "rn" and to in ("f32", "f64"):
        e.write(str(i.operands[0]), to, f"copyto({{d}}, {value}, casting='unsafe')")
    elif mode in ("rz", "rm", "rp") and to == "f32" and SIZE[source] <= 4:
        e.write(str(i.operands[0]), to, f"round_f64_to_f32({value}.astype(f8), {{d}}, '{mode}')")
    elif mode == "rn" and to == "f16":
        e.write(str(i.operands[0]), to, f"integer_to_f16({value}, {{d}})")
    else:
        e.unknown(i, "this form")


def _float_to_integer(e: Emitter, i: Instruction, to: str, source: str, mode: str, ftz: bool) -> None:
    if mode not in _ROUND_INTEGER:
        e.unknown(i, f"rounding .{mode}")
    value = _widened(e, i, source)
    if ftz and source == "f32":
        value = f"flushed({value})"
    low = -(1 << 8 * SIZE[to] - 1) if is_signed(to) else 0
    high = (1 << 8 * SIZE[to] - (1 if is_signed(to) else 0)) - 1
    _write_integer(e, i, to, f"float_to_integer({_ROUND_INTEGER[mode]}({value}), {low}, {high}, {{d}})")


def _write_integer(e: Emitter, i: Instruction, to: str, template: str) -> None:
    """Write an integer of type `to`; a wider register gets it extended."""
    name = str(i.operands[0])
    width = SIZE[e.symbols.registers.get(name, to)]
    if width <= SIZE[to]:
        e.write(name, to, template)
        return
    e.emit(f"v = empty(n, {CODE[to]})")
    e.emit(template.format(d="v"))
    e.write(name, (SIGNED if is_signed(to) else UNSIGNED)[width], "copyto({d}, v)")


LOWER: dict[str, Callable[[Emitter, Instruction], None]] = {"cvt": lower_cvt}
