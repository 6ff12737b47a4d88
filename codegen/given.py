"""Hold what features add to q, k and v, and say what it means for a score: seen or not, made into what, kept or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .philox import KEEP_ALL, kept
from .score_mod import Expression, evaluate, parse
from .spec.features import ScoreMod, Window

F64 = NDArray[np.float64]
Bool = NDArray[np.bool_]
Ints = NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Entries:
    """The entry of a table that each score reads, and the score's derivative by it; [B, Hq, Nq, Nk]."""

    table: str
    index: tuple[Ints, ...]
    derivative: F64


@dataclass(frozen=True, slots=True)
class Modified:
    """Scores that score_mod has made of others, [B, Hq, Nq, Nk], and its derivatives."""

    score: F64
    slope: F64 | float = 1.0  # by the score that it took
    entries: tuple[Entries, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What features add to q, k and v. A query of sequence b stands at key p = i + Nk - Nq, or at p = i."""

    window: Window = (None, None)  # it sees keys p - left to p + right; None: no bound
    top_left: bool = False
    k_lens: Ints | None = None  # [B]: keys of each sequence; those behind are not seen, and move no diagonal
    cu_q: Ints | None = None  # [B + 1]: where the rows of each sequence begin in q [1, Hq, all_q, d]
    cu_k: Ints | None = None  # and in k and v
    score_mod: ScoreMod | None = None
    tables: Mapping[str, F64] = field(default_factory=dict)  # that it reads
    sinks: F64 | None = None  # [Hq]
    rng: tuple[int, int] = (0, 0)  # seed and offset of dropout
    keep_below: int = KEEP_ALL  # of 2^16 random numbers, those that keep a weight

    @property
    def keep(self) -> float:
        """The share of the weights that dropout keeps."""
        return self.keep_below / KEEP_ALL

    def sequences(self) -> Iterator[tuple[int, slice, slice]]:
        """Number, rows and keys of each packed sequence."""
        if self.cu_q is None or self.cu_k is None:
            return
        for b in range(len(self.cu_q) - 1):
            yield b, slice(self.cu_q[b], self.cu_q[b + 1]), slice(self.cu_k[b], self.cu_k[b + 1])

    def seen(self, Nq: int, Nk: int, causal: bool) -> Bool:
        """[Nq, Nk], or [B, 1, Nq, Nk] if the sequences have keys of their own number: whether i sees j."""
        mask = visible(Nq, Nk, causal, self.window, self.top_left)
        if self.k_lens is None:
            return mask
        return mask & (np.arange(Nk) < np.asarray(self.k_lens)[:, None, None, None])

    def weights_kept(self, batch: Ints, Hq: int, Nq: int, Nk: int) -> F64 | float:
        """Z / keep, [B, Hq, Nq, Nk], of the sequences whose numbers are `batch`; 1 without dropout."""
        if self.keep_below == KEEP_ALL:
            return 1.0
        head = batch.reshape(-1, 1, 1, 1) * Hq + np.arange(Hq)[:, None, None]
        return kept(np.arange(Nq)[:, None], np.arange(Nk), head, *self.rng, self.keep_below) / self.keep

    @property
    def formula(self) -> Expression | None:
        """score_mod, parsed."""
        return parse(self.score_mod.text) if self.score_mod else None

    def modified(self, scores: F64, batch: Ints) -> Modified:
        """What score_mod makes of scores [B, Hq, Nq, Nk], and its derivatives."""
        formula, asked = self.formula, {table.name for table in self.score_mod.grads} if self.score_mod else set()
        if formula is None:
            return Modified(scores)
        places = places_of(batch, *scores.shape[1:])

        def value(of: Expression) -> F64:
            return np.asarray(evaluate(of, score=scores, **places, tensors=self.tables))

        entries = (
            Entries(
                each.tensor,
                tuple(
                    value(index).astype(np.int64).clip(0, size - 1)
                    for index, size in zip(each.index, self.tables[each.tensor].shape, strict=True)
                ),
                value(each.derivative),
            )
            for each in formula.gradients
            if each.tensor in asked
        )
        return Modified(value(formula), value(formula.slope), tuple(entries))

    def table_gradients(self, mod: Modified, dS: F64, seen: Bool, *, sizes: bool = False) -> dict[str, F64]:
        """What each entry changes the scores by, times the gradients of those scores, summed over all that read it.

        With `sizes` the first without its sign.
        """
        asked = self.score_mod.grads if self.score_mod else ()
        gradients = {table.name: np.zeros_like(self.tables[table.name]) for table in asked}
        for entries in mod.entries:
            derivative = np.abs(entries.derivative) if sizes else entries.derivative
            np.add.at(gradients[entries.table], entries.index, times(dS, derivative, seen))
        return gradients


def places_of(batch: Ints, Hq: int, Nq: int, Nk: int) -> dict[str, Any]:
    """What score_mod knows of each score [B, Hq, Nq, Nk]: its sequence, head, row and key, and how many there are."""
    return {
        "b": np.reshape(batch, (-1, 1, 1, 1)), "h": np.arange(Hq)[:, None, None], "i": np.arange(Nq)[:, None],
        "j": np.arange(Nk), "Nq": Nq, "Nk": Nk,
    }  # fmt: skip


PLAIN = Given()


def visible(Nq: int, Nk: int, causal: bool, window: Window = (None, None), top_left: bool = False) -> Bool:
    """[Nq, Nk]: whether query i, which stands at key p = i + Nk - Nq, sees key j; causal means none behind its own."""
    i, j = np.arange(Nq)[:, None], np.arange(Nk)[None, :]
    p = i if top_left else i + Nk - Nq
    left, right = (window[0], 0) if causal else window
    first = 0 if left is None else p - left
    last = Nk if right is None else p + right
    return np.broadcast_to((first <= j) & (j <= last), (Nq, Nk))


def times(dS: F64, derivative: F64 | float, seen: Bool) -> F64:
    """Their product; 0 where a key is not seen, whatever the derivative is there."""
    with np.errstate(invalid="ignore"):
        return np.where(seen, dS * derivative, 0.0)
