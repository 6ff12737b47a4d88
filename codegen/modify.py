"""Write what score_mod does in a kernel: KernelSpec -> the lines of CUDA that the templates put in place."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from .score_mod import Code, Expression, Names, device_functions, emit, parse
from .score_mod.tree import Node, Number, Op, walk
from .spec.feature_shape import keeps_a_number, keeps_scores
from .spec.features import ScoreMod
from .spec.kernel import KernelSpec

ELEMENTS = {"fp32": "float", "fp16": "fp16", "bf16": "bf16"}  # what score_mod calls the dtypes of tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """What is added to the gradient of a table: derivative times dS, at an entry."""

    name: str
    place: str  # the entry's address
    derivative: str
    of_head: bool  # whether the entry is one for all pairs of a head: then they are summed first


@dataclass(frozen=True)
class Modification:
    """The score_mod of a kernel. In its text a pair is `query` and `key`, of `head` and `batch`; it has a `score`."""

    mod: ScoreMod
    backward: bool
    padded: bool

    @cached_property
    def expression(self) -> Expression:
        """What it computes."""
        return parse(self.mod.text)

    def names(self, prefix: str) -> Names:
        """What the text calls what the expression speaks of, and what its own names begin with."""
        return Names(
            score="score", b="batch", h="head", i="query", j="key", i_float="query_float", j_float="key_float",
            Nk="max_Nk" if self.padded else "Nk", prefix=prefix,
        )  # fmt: skip

    @cached_property
    def has_slope(self) -> bool:
        """Whether the gradient of a score has to be multiplied by something."""
        return self.backward and not self.expression.additive and not self.expression.slope.is_one

    @cached_property
    def keeps_scores(self) -> bool:
        """Whether scores are kept until the gradients of tables are computed."""
        return keeps_scores(self.mod)

    @cached_property
    def keeps_slopes(self) -> bool:
        """Whether slopes are computed with the scores and kept until they are used."""
        return self.backward and keeps_a_number(self.mod) and not self.keeps_scores

    @cached_property
    def wild(self) -> bool:
        """Whether a score, or a derivative, may be infinite or NaN where the pair is none: past the end, or masked."""
        return any(_wild(node) for node in walk(self.expression.tree))

    @cached_property
    def value(self) -> Code:
        """The lines where scores are made."""
        return emit(self.expression, self.names("mod"), slope=self.keeps_slopes)

    @cached_property
    def gradient(self) -> Code:
        """The lines where the gradients of scores are made."""
        return emit(
            self.expression, self.names("grad"), value=False, slope=self.has_slope and not self.keeps_slopes,
            gradients=[table.name for table in self.mod.grads],
        )  # fmt: skip

    @cached_property
    def sums(self) -> tuple[Sum, ...]:
        """What is added to the gradients of tables."""
        wanted = {table.name for table in self.mod.grads}
        entries = [entry for entry in self.expression.gradients if entry.tensor in wanted] if wanted else []
        return tuple(
            Sum(
                name=f"sum{n}", place=f"score_mod::place(grad_{code.tensor}, {', '.join(code.index)})",
                derivative=code.derivative, of_head=not any(x.depends_on("i", "j") for x in entry.index),
            )
            for n, (entry, code) in enumerate(zip(entries, self.gradient.gradients, strict=True))
        )  # fmt: skip

    @cached_property
    def functions(self) -> str:
        """The device functions that the lines call, and the types of the tables."""
        called = {*self.value.functions, *(self.gradient.functions if self.backward else ())}
        tables = ("offset",) if self.mod.tables else ()
        elements = sorted({ELEMENTS[table.dtype] for table in self.mod.tables})
        return device_functions([*called, *tables], elements)


def _wild(node: Node) -> bool:
    """Whether an operation, or its derivative, may make an infinity of a number."""
    if not isinstance(node, Op):
        return False
    by_literal = isinstance(node.args[-1], Number)
    return node.op in ("exp", "log", "sqrt", "**") or (node.op == "/" and not by_literal)


@lru_cache(maxsize=256)
def modification(spec: KernelSpec) -> Modification | None:
    """That of a kernel; None if it has none. Raises BadScoreMod."""
    mod = spec.features.score_mod
    if mod is None:
        return None
    backward = spec.kernel not in ("forward", "forward90")
    return Modification(mod=mod, backward=backward, padded=spec.features.lengths == "padded")
