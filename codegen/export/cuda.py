"""Write a Plan as CUDA: one file with the kernels and their launcher, and a header in C."""

from __future__ import annotations

import re
import struct

from ..errors import RenderError
from ..render import Source, render_template
from ..run import MAX_ROWS
from .plan import Field, Parameter, Plan

MARK = "// Made by flashsmith export: "  # what the first line of a file of ours begins with
MOST_PARTS = 4096  # that a launcher takes; beyond some hundreds blocks of parts have nothing to do


def cuda_files(plan: Plan) -> dict[str, str]:
    """The two files by name: NAME.cu and NAME.h. Raises RenderError."""
    names = "|".join([*(field.name for field in plan.fields), *plan.sizes, "scale"])

    def c(formula: str) -> str:
        """A formula of what the caller gives: each of its names is a member of `args`."""
        return re.sub(rf"(?<![\w.])({names})\b", r"args.\1", formula)

    def value(parameter: Parameter) -> str:
        """What a launch passes, in the type of the kernel's parameter; the kernel's own types are in scope."""
        kind, members = parameter.arg.type, [c(text) for text in parameter.values]
        if kind in ("View<const T>", "View<T>"):
            element, (data, *strides) = kind.removeprefix("View<").removesuffix(">"), members
            return f"{kind}{{static_cast<{element}*>({data}), {', '.join(strides)}}}"
        if kind == "Walk":
            return f"Walk{{{', '.join(members)}}}"
        if kind in ("int", "float"):
            return f"static_cast<{kind}>({members[0]})"
        return members[0]

    values: dict[str, object] = {
        "plan": plan, "mark": MARK, "longest": MAX_ROWS, "most_parts": MOST_PARTS,
        "c": c, "value": value, "bits": _bits, "number": _number, "type_of": _type,
        "texts": {launch.source.spec.kernel: _renamed(launch.source, plan.name) for launch in plan.launches},
        "filled": ", ".join(f"{f.name} is {_number(f.fill)}" for f in plan.fields if f.fill is not None),
    }  # fmt: skip
    return {
        f"{plan.name}.cu": render_template("export/launcher.cu.j2", plan.name, **values),
        f"{plan.name}.h": render_template("export/header.h.j2", plan.name, **values),
    }


def _renamed(source: Source, name: str) -> str:
    """The text of a kernel whose C name is one of its own: those of several passes can be linked together."""
    kernel = source.spec.kernel
    if source.text.count(f" {kernel}(") != 1:
        raise RenderError(f"{source.spec.key}: its text must name {kernel}( once, where it is defined.")
    return source.text.replace(f" {kernel}(", f" {name}_{kernel}(")


def _bits(value: float) -> str:
    """The bits of a float32, as C writes them."""
    return f"0x{int.from_bytes(struct.pack('<f', value), 'little'):08x}u"


def _number(value: float) -> str:
    return f"{value:g}"


def _type(field: Field) -> str:
    """The C type of a tensor."""
    return "flashsmith_output" if field.written else "flashsmith_input"
