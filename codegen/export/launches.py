"""Write a Plan as machine code: a cubin for each kernel, and a description of their launches in JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from ..compile import Binary
from ..render import Source
from ..run import MAX_ROWS
from .plan import Launch, Parameter, Plan

MADE_BY = "flashsmith export"
FILE = "launch.json"
READING = {
    "formulas": "C with 64-bit whole numbers: / rounds down, ceil_div(n, s) rounds up; those with `scale` are double, "
    "rounded to a float once",
    "View<const T>": "struct of 8-byte members: device address, strides of batch, head and row in elements",
    "View<T>": "the same, written",
    "Walk": "struct of two 8-byte whole numbers: bytes",
    "strides": "columns are contiguous and every row starts on 16 bytes",
    "parameters": "lie at their offsets in the buffer that a launch passes, natural alignment",
    "dynamic_smem_bytes": "above 48 KB a kernel must be allowed to have them: "
    "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES",
}


def cubin_files(plan: Plan, compiled: Callable[[Source], Binary]) -> dict[str, bytes]:
    """KERNEL.cubin of each kernel, and launch.json. Raises CompileError."""
    cubins = {launch.source.spec.kernel: compiled(launch.source).cubin for launch in plan.launches}
    described = json.dumps(description(plan, {kernel: _sha256(cubin) for kernel, cubin in cubins.items()}), indent=1)
    return {**{f"{kernel}.cubin": cubin for kernel, cubin in cubins.items()}, FILE: f"{described}\n".encode()}


def description(plan: Plan, sha256: dict[str, str]) -> dict[str, Any]:
    """What launch.json says. `sha256` of each kernel's cubin."""
    fills = {field.name: f"{field.fill:g}" for field in plan.fields if field.fill is not None}
    return {
        "made_by": MADE_BY,
        "name": plan.name,
        "pass": plan.which,
        "problem": plan.problem.text,
        "dtype": plan.problem.dtype,
        "sm": plan.sm,
        "reading": READING,
        "sizes": {size: plan.size_note(size) for size in plan.sizes},
        "scale": {"note": "of Q K^T", "default": plan.problem.softmax_scale},
        "tensors": [
            {
                "name": field.name, "note": field.note, "element": plan.problem.dtype if field.view else "fp32",
                "shape": list(field.shape), "written": field.written, "may_be_null": field.optional,
            }
            for field in plan.fields
        ],
        "workspace": [
            {"name": buffer.name, "note": buffer.note, "bytes": buffer.bytes, "set_to_zero_first": buffer.zeroed}
            for buffer in plan.temporaries
        ],
        "limits": [
            {"formula": formula, "at_most": most}
            for formula, most in (*((size, MAX_ROWS) for size in plan.sizes), *plan.limits)
        ],
        "where_B_Hq_Nq_or_Nk_is_0": {"launch": "nothing", "set": fills},
        "launches": [_launch(launch, sha256[launch.source.spec.kernel]) for launch in plan.launches],
    }  # fmt: skip


def _launch(launch: Launch, sha256: str) -> dict[str, Any]:
    spec = launch.source.spec
    return {
        "entry": spec.kernel,
        "key": spec.key,
        "cubin": f"{spec.kernel}.cubin",
        "sha256": sha256,
        "sm": spec.sm,
        "threads": spec.threads,
        "dynamic_smem_bytes": launch.source.smem_bytes,
        "grid": {"x": launch.blocks, "words": launch.grid_words},
        "parameters": [_parameter(parameter) for parameter in launch.parameters],
    }


def _parameter(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.arg.name, "type": parameter.arg.type, "offset": parameter.offset, "bytes": parameter.bytes,
        "values": list(parameter.values), "note": parameter.arg.note,
    }  # fmt: skip


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
