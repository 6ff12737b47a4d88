"""Make one tile of scores, and say which tiles there are: sizes, mask, score_mod and dropout of the tiled loop.

Query heads that share a key/value head lie as further rows of its tile, so that one product serves the whole group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, cast

import torch
from torch import Tensor

from ..philox import key_block, row_block, words_at
from ..score_mod import Expression, evaluate, parse
from .added import Added

INF = float("inf")


@dataclass(frozen=True, slots=True)
class Call:
    """Attention of sequences that have as many rows and as many keys each."""

    first: int  # number of the first sequence
    B: int
    Hq: int
    Hk: int
    Nq: int
    Nk: int
    scale: float
    left: int | None  # keys that a query sees before its own; None: all
    right: int | None  # and behind its own
    shift: int  # the key of query 0 itself
    k_lens: Tensor | None  # [B, 1, 1, 1]
    most: int  # keys of the longest sequence,
    least: int  # and of the shortest
    added: Added
    formula: Expression | None  # score_mod
    wide: torch.dtype  # of scores and sums

    @classmethod
    def of(cls, q: Tensor, k: Tensor, scale: float, causal: bool, added: Added, first: int = 0) -> Call:
        """From q [B, Hq, Nq, d] and k [B, Hk, Nk, d]."""
        (B, Hq, Nq, _), Hk, Nk = q.shape, k.shape[1], k.shape[2]
        left, right = added.window
        most = least = Nk
        if added.k_lens is not None and B:
            shortest, longest = added.k_lens.aminmax()
            most, least = min(Nk, int(longest)), int(shortest)
        return cls(
            first=first, B=B, Hq=Hq, Hk=Hk, Nq=Nq, Nk=Nk, scale=scale, left=left, right=0 if causal else right,
            shift=0 if added.top_left else Nk - Nq,
            k_lens=None if added.k_lens is None else added.k_lens[:, None, None, None], most=most, least=least,
            added=added, formula=parse(added.score_mod.text) if added.score_mod else None, wide=wide_dtype(q.dtype),
        )  # fmt: skip

    @property
    def empty(self) -> bool:
        """No query rows at all, or no heads."""
        return 0 in (self.B, self.Hq, self.Nq)

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.Hq // self.Hk

    # ---- which tiles there are

    def keys_seen(self, row: int) -> tuple[int, int]:
        """The first key that query `row` sees, and the one behind the last; empty if the second is not larger."""
        own = row + self.shift
        first = 0 if self.left is None else max(0, own - self.left)
        return first, self.most if self.right is None else min(self.most, own + self.right + 1)

    def rows_that_see(self, first: int, last: int) -> tuple[int, int]:
        """The first query row that sees a key of `first` to `last`, and the one behind the last row that does."""
        begin = 0 if self.right is None else max(0, first - self.right - self.shift)
        if first >= self.most:
            return begin, begin
        return begin, self.Nq if self.left is None else min(self.Nq, last + self.left - self.shift + 1)

    # ---- tiles of tensors

    def tile(self, x: Tensor, start: int, rows: int) -> Tensor:
        """Rows of x [B, H, N, c] (H = Hq or Hk) as [B, Hk, H/Hk * rows, c] in the wide dtype."""
        part = x[:, :, start : start + rows]
        return part.to(self.wide).reshape(self.B, self.Hk, x.shape[1] // self.Hk * part.shape[2], x.shape[3])

    def tile_of_heads(self, x: Tensor) -> Tensor:
        """[B * Hq, rows, c] -> [B, Hk, Hq/Hk * rows, c], as `tile`."""
        return x.reshape(self.B, self.Hk, self.group * x.shape[1], x.shape[2])

    def heads(self, tile: Tensor) -> Tensor:
        """The inverse of `tile` for query rows: [B, Hk, Hq/Hk * rows, c] -> [B, Hq, rows, c]."""
        return tile.reshape(self.B, self.Hq, tile.shape[2] // self.group, tile.shape[3])

    def scores(self, i: int, rows: int, j: int, keys: int, device: torch.device) -> ScoreTile:
        """The tile of scores that begins at row i and key j."""
        return ScoreTile(self, range(i, i + rows), range(j, j + keys), device)


@dataclass(frozen=True)
class ScoreTile:
    """What is done to a tile of scores [B, Hk, Hq/Hk * rows, keys], and to its weights and gradients."""

    call: Call
    rows: range
    keys: range
    device: torch.device

    @cached_property
    def place(self) -> dict[str, Any]:
        """Sequence, query head, row and key of each score, which broadcast, and how many rows and keys there are."""
        call, device = self.call, self.device
        head = torch.arange(call.Hq, device=device).reshape(call.Hk, call.group)
        return {
            "b": torch.arange(call.first, call.first + call.B, device=device)[:, None, None, None],
            "h": head.repeat_interleave(len(self.rows), 1)[:, :, None],
            "i": torch.arange(self.rows.start, self.rows.stop, device=device).repeat(call.group)[:, None],
            "j": torch.arange(self.keys.start, self.keys.stop, device=device),
            "Nq": call.Nq, "Nk": call.Nk,
        }  # fmt: skip

    def value(self, expression: Expression, taken: Tensor) -> Tensor:
        """An expression of score_mod's for each score that it takes."""
        return cast(Tensor, evaluate(expression, score=taken, **self.place, tensors=self.call.added.tables))

    def modified(self, taken: Tensor) -> Tensor:
        """S: what score_mod makes of scale Q K^T; -inf where a row does not see a key."""
        formula = self.call.formula
        S = taken if formula is None else self.value(formula, taken)
        return S if self.seen_by_all else S.masked_fill(self.hidden, -INF)

    @property
    def seen_by_all(self) -> bool:
        """Whether every row of every sequence sees every key."""
        first, _ = self.call.keys_seen(self.rows[-1])
        _, end = self.call.keys_seen(self.rows[0])
        return first <= self.keys.start and self.keys.stop <= min(end, self.call.least)

    @property
    def hidden(self) -> Tensor:
        """Whether a row does not see a key."""
        call, key = self.call, self.place["j"]
        own = self.place["i"] + call.shift
        past = [] if call.left is None else [key < own - call.left]
        past += [] if call.right is None else [key > own + call.right]
        past += [] if call.k_lens is None else [key >= call.k_lens]
        return reduce(torch.logical_or, past)

    def dropped(self, P: Tensor) -> Tensor:
        """P, or as many of any gradient of it, times Z / keep: 0 where dropout drops a weight."""
        added = self.call.added
        if added.rng is None:
            return P
        return torch.where(self.kept, P / added.keep, 0)

    @cached_property
    def kept(self) -> Tensor:
        """Z, see philox: whether a weight is kept. Random words are drawn once for the 8 weights that share them."""
        call, (seed, offset) = self.call, cast(Tensor, self.call.added.rng)
        i, j = (torch.arange(r.start, r.stop, device=self.device) for r in (self.rows, self.keys))
        x, y = row_block(i), key_block(j)
        first_x, first_y = self.rows.start // 16 * 8, self.keys.start // 32 * 8
        xs = torch.arange(first_x, int(row_block(self.rows[-1] | 15)) + 1, device=self.device)
        ys = torch.arange(first_y, int(key_block(self.keys[-1] | 31)) + 1, device=self.device)
        head = torch.arange(call.first * call.Hq, (call.first + call.B) * call.Hq, device=self.device)
        words = torch.stack(words_at(xs[:, None], ys, head[:, None, None], seed, offset), dim=1)
        word = words[:, j // 8 % 4, (x - first_x)[:, None], y - first_y]
        bits = word >> 16 * (i // 8 % 2)[:, None] & 0xFFFF
        return call.tile_of_heads(bits < call.added.keep_below)

    def gradient_of_taken(self, dS: Tensor, P: Tensor, taken: Tensor) -> Tensor:
        """The gradient of scale Q K^T, which score_mod takes, from that of what it makes."""
        formula = self.call.formula
        if formula is None or formula.additive:
            return dS
        return _where_seen(dS * self.value(formula.slope, taken), P)

    def add_table_gradients(self, gradients: Mapping[str, Tensor], dS: Tensor, P: Tensor, taken: Tensor) -> None:
        """What an entry changes the scores by, times their gradients, is added to the gradient of the entry."""
        if not gradients or self.call.formula is None:
            return
        whole = dS.new_zeros((), dtype=torch.float64).expand(dS.shape)  # in which an index is exact
        for each in self.call.formula.gradients:
            if each.tensor not in gradients:
                continue
            gradient = gradients[each.tensor]
            index = tuple(
                self.value(at, whole).long().clamp(0, size - 1)
                for at, size in zip(each.index, gradient.shape, strict=True)
            )
            change = _where_seen(dS * self.value(each.derivative, taken), P)
            gradient.index_put_(index, change.to(gradient.dtype), accumulate=True)


def _where_seen(change: Tensor, P: Tensor) -> Tensor:
    """0 where a weight is 0: a derivative need not be finite where a key is not seen."""
    return torch.where(P == 0, 0, change)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, m, l and sums for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32
