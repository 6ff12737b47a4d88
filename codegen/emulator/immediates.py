"""Read the numbers that PTX instructions contain."""

from __future__ import annotations

import re
import struct

_INTEGER = re.compile(r"-?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
_FLOAT = re.compile(r"-?(0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|\d+\.\d*([eE][-+]?\d+)?)$")
_NAMED = {"true": 1, "false": 0, "WARP_SZ": 32}


def is_immediate(text: str) -> bool:
    """Whether the operand is an integer."""
    return text in _NAMED or _INTEGER.match(text) is not None


def _integer(text: str) -> int:
    text = text.rstrip("U")
    sign = -1 if text.startswith("-") else 1
    digits = text.lstrip("-")
    if len(digits) > 1 and digits[0] == "0" and digits[1] not in "xXbB":
        return sign * int(digits, 8)
    return sign * int(digits, 0)


def immediate_value(text: str, type_name: str) -> int | None:
    """The bits that a number has as a type, `None` if the text is no number.

    >>> hex(immediate_value("0f3F800000", "f32")), immediate_value("-1", "s32")
    ('0x3f800000', -1)
    """
    if text in _NAMED:
        return _NAMED[text]
    if _INTEGER.match(text):
        value = _integer(text)
        return _float_bits(float(value), type_name) if type_name in ("f32", "f64") else value
    if not _FLOAT.match(text):
        return None
    sign = text.startswith("-")
    text = text.lstrip("-")
    if text[1:2] in ("f", "F"):
        bits = int(text[2:], 16)
        if type_name == "f64":
            bits = _float_bits(struct.unpack("<f", struct.pack("<I", bits))[0], "f64")
    elif text[1:2] in ("d", "D"):
        bits = int(text[2:], 16)
        if type_name == "f32":
            bits = _float_bits(struct.unpack("<d", struct.pack("<Q", bits))[0], "f32")
    else:
        bits = _float_bits(float(text), type_name)
    return bits ^ (1 << (63 if type_name in ("f64", "b64") else 31)) if sign else bits


def _float_bits(value: float, type_name: str) -> int:
    if type_name in ("f64", "b64"):
        return int(struct.unpack("<Q", struct.pack("<d", value))[0])
    return int(struct.unpack("<I", struct.pack("<f", value))[0])
