"""Hold what an export writes: one pass as formulas of the sizes, in words of C."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..render import Source
from ..spec.dtype import stored_as
from ..spec.kernel import ARG_BYTES, Arg
from ..spec.problem import Pass, Problem

SIZE_NOTES = {
    "B": "sequences", "Hq": "query heads", "Hk": "key/value heads; query head h reads head h / (Hq / Hk)",
    "Nq": "query rows of a head", "Nk": "keys of a head", "parts": "into which the keys that a block sees are cut",
    "left": "keys that a query sees before its own", "right": "and behind its own",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One tensor that the caller gives or is given: a View, or floats one after the other."""

    name: str
    note: str  # its shape, as the kernels' parameters say it
    view: bool
    shape: tuple[str, ...]
    fill: float | None  # of an output: its value where there is no row or no key
    optional: bool

    @property
    def written(self) -> bool:
        """Whether the pass writes it."""
        return self.fill is not None

    @property
    def elements(self) -> str:
        """How many it has, of a buffer of floats."""
        return " * ".join(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Temporary:
    """A buffer of the workspace; `bytes` a multiple of trace.ALIGN_TEMPORARY."""

    name: str
    note: str
    bytes: str
    zeroed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One kernel parameter, where it lies, and what a launch puts there: a value, or one for each member."""

    arg: Arg
    offset: int
    values: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Its size."""
        return ARG_BYTES[self.arg.type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One launch: its kernel, its blocks, its parameters in order."""

    source: Source
    blocks: str
    parameters: tuple[Parameter, ...]

    @property
    def grid_words(self) -> str:
        """The grid as the head of the kernel's text explains it."""
        found = re.search(r"^// grid +(.*), flat in x$", self.source.text, re.MULTILINE)
        return found.group(1) if found else self.blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One pass for people without Python: what they give, what it needs beside that, what is launched."""

    name: str  # prefix of all names in C
    problem: Problem
    which: Pass
    fields: tuple[Field, ...]
    sizes: tuple[str, ...]
    parts: int  # that serve the lengths that were asked for; 1: the forward is not cut into parts
    temporaries: tuple[Temporary, ...]
    launches: tuple[Launch, ...]
    limits: tuple[tuple[str, int], ...]  # what may not exceed which number

    @property
    def sm(self) -> int:
        """What its kernels are made for: compute capability times ten."""
        return self.launches[0].source.spec.sm

    @property
    def element_bytes(self) -> int:
        """Of the tensors that are Views."""
        return stored_as(self.problem.dtype).itemsize

    @property
    def what(self) -> str:
        """The pass in words."""
        return f"{self.which} of {self.problem.text}, for sm_{self.sm}"

    def size_note(self, name: str) -> str:
        """What a size counts."""
        served = f"; {self.asked[name]} is what this was made for" if name in self.asked else ""
        return SIZE_NOTES[name] + served

    @property
    def asked(self) -> dict[str, int]:
        """Numbers of a call that were chosen or asked for when this was made."""
        numbers = {"parts": self.parts, "left": self.problem.bounds[0], "right": self.problem.bounds[1]}
        return {name: n for name, n in numbers.items() if name in self.sizes and n is not None}
