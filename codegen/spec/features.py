"""Say what a kernel's text has beyond plain and causal attention; a feature that is off leaves no trace in it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..errors import BadProblem

if TYPE_CHECKING:
    from .kernel import KernelName

Anchor = Literal["bottom-right", "top-left"]
Lengths = Literal["uniform", "padded", "packed"]
TableDtype = Literal["fp32", "fp16", "bf16"]

FLAGS = ("left", "shifted", "top_left", "sinks", "dropout")  # features that are on or off

Window = tuple[int | None, int | None]  # keys seen to the left and to the right of the diagonal; None: all


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A named tensor that score_mod reads."""

    name: str
    dtype: TableDtype = "fp32"
    rank: int = 1
    grad: bool = False  # its gradient is asked for

    @property
    def key(self) -> str:
        """In a key: `slope.fp32`, with `.grad` if its gradient is asked for."""
        return f"{self.name}.{self.dtype}{'.grad' if self.grad else ''}"

    @property
    def option(self) -> str:
        """As the command line takes it: `slope:bf16:grad`."""
        return f"{self.name}:{self.dtype}{':grad' if self.grad else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreMod:
    """An expression that takes the place of a score, and the tensors that it reads."""

    text: str  # in the spelling of flashsmith.score_mod
    tables: tuple[Table, ...] = ()

    @classmethod
    def of(cls, text: str, fields: Callable[[str], Mapping[str, Any]] = lambda name: {}) -> ScoreMod:
        """A formula in its one spelling and its tables, of which `fields` says the rest by name. Raises BadScoreMod."""
        from ..score_mod import parse  # here, so that importing the package loads no NumPy

        formula = parse(text)
        tables = (Table(name=name, rank=rank, **fields(name)) for name, rank in formula.tensors.items())
        return cls(text=formula.text, tables=tuple(tables))

    @property
    def grads(self) -> tuple[Table, ...]:
        """The tensors whose gradients are asked for."""
        return tuple(table for table in self.tables if table.grad)


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What the text of a kernel depends on beside dtype, head dimensions and the causal mask.

    Query i stands at key i + Nk - Nq (`top_left`: at key i), and sees that key and those before it if the kernel is
    causal. `shifted`: it sees as many more as a launch argument says. `left`: it sees no more before it than another
    says.
    """

    left: bool = False
    shifted: bool = False
    top_left: bool = False
    lengths: Lengths = "uniform"
    score_mod: ScoreMod | None = None
    sinks: bool = False  # a logit for each head that takes part in its softmax and has no value
    dropout: bool = False

    @property
    def plain(self) -> bool:
        """Whether there is none."""
        return self == PLAIN

    @property
    def masked(self) -> bool:
        """Whether a bound of what a row sees is not that of a plain or causal kernel."""
        return self.left or self.shifted or self.top_left or self.lengths == "padded"

    @property
    def clipped(self) -> bool:
        """Whether the diagonal alone may show a row keys that there are not."""
        return self.shifted or self.top_left or self.lengths == "padded"

    @property
    def packed(self) -> bool:
        """Whether the sequences of the batch stand one after the other in [1, H, rows of all, d]."""
        return self.lengths == "packed"

    @property
    def words(self) -> tuple[str, ...]:
        """Each feature in words that name no file: ('left', 'dropout')."""
        said = [name.replace("_", "-") for name in FLAGS if getattr(self, name)]
        if self.lengths != "uniform":
            said.append(self.lengths)
        if self.score_mod:
            said.append(f"score_mod {self.score_mod.text!r}")
            said += [table.key for table in self.score_mod.tables]
        return tuple(said)

    @property
    def key(self) -> str:
        """Of a kernel's key, in letters that name a file: `_left_dropout_mod3f2a`. Empty if there is none."""
        said = replace(self, score_mod=None).words
        if self.score_mod:
            digest = hashlib.sha256(" ".join(self.words).encode()).hexdigest()
            said += (f"mod{digest[:8]}",)
        return "".join(f"_{word}" for word in said)

    def of(self, kernel: KernelName) -> Features:
        """Those that the text of `kernel` depends on."""
        if kernel in ("fused", "dkdv", "fused90", "dkdv90", "dkdv90_wide"):
            return replace(self, sinks=False)
        if kernel in ("forward", "dq", "partial", "forward90", "dq90"):
            mod = self.score_mod and replace(
                self.score_mod, tables=tuple(replace(table, grad=False) for table in self.score_mod.tables)
            )
            return replace(self, score_mod=mod, sinks=self.sinks and kernel not in ("dq", "dq90"))
        lengths: Lengths = "packed" if self.packed else "uniform"
        if kernel == "delta":
            return Features(lengths=lengths, sinks=self.sinks, dropout=self.dropout)
        if kernel in ("convert", "convert90"):
            return Features(lengths=lengths)
        return replace(self, sinks=False)  # combine: partial has refused what it would have to know


PLAIN = Features()


def check_window(window: Window) -> None:
    """Raise BadProblem unless each side of the window is None or a number of keys."""
    for side, keys in zip(("left", "right"), window, strict=True):
        if keys is not None and keys < 0:
            raise BadProblem(f"window: {keys} keys to the {side}; use 0 or more, or None for all of them.")


def check_anchor(anchor: str) -> None:
    """Raise BadProblem for an anchor that is not known."""
    if anchor not in get_args(Anchor):
        raise BadProblem(f"anchor {anchor!r} is not known; use one of {', '.join(get_args(Anchor))}.")


def check_lengths(lengths: str) -> None:
    """Raise BadProblem for lengths that are not known."""
    if lengths not in get_args(Lengths):
        raise BadProblem(f"lengths {lengths!r} is not known; use one of {', '.join(get_args(Lengths))}.")
