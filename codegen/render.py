"""Render a KernelSpec into CUDA source text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, TemplateError

from .errors import RenderError
from .modify import modification
from .spec import (
    backward_shape,
    feature_shape,
    limits,
    order,
    warpgroup_key_shape,
    warpgroup_shape,
    warpgroup_wide_shape,
)
from .spec.kernel import KernelName, KernelSpec
from .spec.limits import smem_bytes

TEMPLATES: dict[KernelName, str] = {
    "forward": "forward.cu.j2",
    "partial": "forward.cu.j2",
    "combine": "combine.cu.j2",
    "delta": "delta.cu.j2",
    "fused": "key_block.cu.j2",
    "convert": "convert.cu.j2",
    "dkdv": "key_block.cu.j2",
    "dq": "query_block.cu.j2",
    "forward90": "forward90.cu.j2",
    "fused90": "key_block90.cu.j2",
    "convert90": "convert90.cu.j2",
    "dkdv90": "key_block90.cu.j2",
    "dkdv90_wide": "key_block90_wide.cu.j2",
    "dq90": "query_block90.cu.j2",
}


@dataclass(frozen=True, slots=True)
class Source:
    """CUDA text of one kernel, and what it was rendered from."""

    spec: KernelSpec
    text: str

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory that a launch must ask for."""
        return smem_bytes(self.spec)


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("flashsmith.templates", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # the output is C++
    )


def render(spec: KernelSpec) -> Source:
    """The CUDA text of `spec`: the same bytes for the same spec, on any machine. Raises RenderError."""
    name = TEMPLATES[spec.kernel]
    text = render_template(
        name, spec.key, spec=spec, tile=spec.tile, limits=limits, shape=backward_shape, order=order,
        feature_shape=feature_shape, warpgroups=warpgroup_shape,
        key_warpgroups=warpgroup_key_shape, wide_warpgroups=warpgroup_wide_shape, mod=modification(spec),
    )  # fmt: skip
    return Source(spec, text)


def render_template(name: str, key: str, **values: object) -> str:
    """The text of a template that is given `values` and its own name. Raises RenderError, which names `key`."""
    try:
        return _environment().get_template(name).render(template=name, **values)
    except TemplateError as error:
        raise RenderError(f"{name} for {key}: {error}") from error
