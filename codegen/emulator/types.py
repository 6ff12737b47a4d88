"""Map PTX types to bytes and to NumPy's type codes."""

from __future__ import annotations

SIZE = {
    "pred": 1, "b8": 1, "u8": 1, "s8": 1,
    "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2,
    "b32": 4, "u32": 4, "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4,
    "b64": 8, "u64": 8, "s64": 8, "f64": 8, "b128": 16,
}  # fmt: skip
"""Bytes of a value of each PTX type; a predicate is kept as one byte."""

CODE = {
    "pred": "b1", "b8": "u1", "u8": "u1", "s8": "i1",
    "b16": "u2", "u16": "u2", "s16": "i2", "f16": "u2", "bf16": "u2",
    "b32": "u4", "u32": "u4", "s32": "i4", "f32": "f4", "f16x2": "u4", "bf16x2": "u4",
    "b64": "u8", "u64": "u8", "s64": "i8", "f64": "f8",
}  # fmt: skip
"""NumPy code of the view in which an instruction of that type sees a register.

16-bit floats are seen as their bits: their arithmetic is done in float32 and rounded once (see convert.py).
"""

SIGNED = {1: "s8", 2: "s16", 4: "s32", 8: "s64"}
UNSIGNED = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}


def is_float(type_name: str) -> bool:
    """True for every floating type, packed ones included."""
    return type_name.startswith(("f", "bf"))


def is_signed(type_name: str) -> bool:
    """True for s8 .. s64."""
    return type_name.startswith("s")
