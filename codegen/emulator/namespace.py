"""Gather the functions that generated code may call."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import (
    async_copy,
    atomics,
    bits,
    bulk_copy,
    cluster_addresses,
    group_products,
    halves,
    matrices,
    mbarriers,
    ordering,
    register_shares,
    rounding,
    tensor,
    warp,
    warp_checks,
)

_UFUNCS = (
    *("add", "subtract", "multiply", "divide", "negative", "absolute", "minimum", "maximum", "fmin", "fmax"),
    *("bitwise_and", "bitwise_or", "bitwise_xor", "invert", "left_shift", "right_shift"),
    *("logical_and", "logical_or", "logical_xor", "logical_not"),
    *("less", "less_equal", "greater", "greater_equal", "equal", "not_equal"),
    *("exp2", "log2", "sin", "cos", "tanh", "sqrt", "rint", "trunc", "floor", "ceil", "copysign"),
    *("copyto", "putmask", "empty", "flatnonzero"),
)

NAMES: dict[str, Any] = {name: getattr(np, name) for name in _UFUNCS}
for _module in (
    *(async_copy, atomics, bits, bulk_copy, cluster_addresses, group_products, halves, matrices, mbarriers),
    *(ordering, register_shares, rounding, tensor, warp, warp_checks),
):
    NAMES.update({name: value for name, value in vars(_module).items() if callable(value) and not name.startswith("_")})
NAMES.update({code: code for code in ("u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8", "b1")})
NAMES["ONE"] = np.array(1, "f4")
