"""Say which attention is asked for, and refuse what is not served."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from ..errors import BadProblem
from .features import Anchor, Features, Lengths, ScoreMod, Window, check_anchor, check_lengths, check_window

Dtype = Literal["bf16", "fp16", "fp32"]
ELEMENT_BYTES: dict[Dtype, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
Pass = Literal["forward", "backward"]

MAX_D = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One attention: O = softmax(scale * Q K^T) V and its gradient.

    q [B, Hq, Nq, d], k [B, Hk, Nk, d], v [B, Hk, Nk, dv]; query head h reads key/value head h // (Hq / Hk). Query i
    stands at key i + Nk - Nq (the diagonal ends at the bottom right), or at key i with the anchor "top-left". Of the
    keys before it and behind it, it sees as many as `window` says; `causal` is a window that ends at it.

    Raises BadProblem naming the field, the limit and the way out.

    >>> Problem(dtype="bf16", d=128, causal=True).text
    'bf16 d=128 causal'
    """

    dtype: Dtype
    d: int
    causal: bool = False
    B: int = 1
    Hq: int = 16
    Hk: int | None = None  # None: as many as Hq
    Nq: int = 8192
    Nk: int | None = None  # None: as long as Nq
    scale: float | None = None  # None: 1/sqrt(d)
    dv: int | None = None  # head dimension of v and O; None: d
    window: Window = (None, None)  # keys seen before and behind a query's own; None: all of them
    anchor: Anchor = "bottom-right"
    lengths: Lengths = "uniform"  # padded: each sequence has keys of its own number; packed: and queries, see Features
    score_mod: ScoreMod | None = None
    sinks: bool = False
    dropout: float = 0.0  # share of the weights P that are dropped

    def __post_init__(self) -> None:
        if self.dtype not in get_args(Dtype):
            raise BadProblem(f"dtype {self.dtype!r} is not served; use one of {', '.join(get_args(Dtype))}.")
        check_head_dim(self.d)
        check_head_dim(self.value_dim, "dv")
        if self.Hk is None:
            object.__setattr__(self, "Hk", self.Hq)
        if self.Nk is None:
            object.__setattr__(self, "Nk", self.Nq)
        for name in ("B", "Hq", "Hk", "Nq", "Nk"):
            if getattr(self, name) < 0:
                raise BadProblem(f"{name}={getattr(self, name)} is negative; lengths and counts are 0 or more.")
        if self.Hq and (self.kv_heads == 0 or self.Hq % self.kv_heads):
            raise BadProblem(
                f"{self.Hq} query heads over {self.kv_heads} key/value heads: Hq must be a multiple of Hk."
            )
        if self.scale is not None and not (math.isfinite(self.scale) and self.scale > 0):
            raise BadProblem(f"scale={self.scale}: must be positive and finite; leave it out for 1/sqrt(d).")
        if not 0 <= self.dropout < 1:
            raise BadProblem(f"dropout={self.dropout}: a share of the weights, 0 or more and less than 1.")
        self._settle_mask()

    def _settle_mask(self) -> None:
        """One spelling for each mask, so that one kernel serves it."""
        check_window(self.window)
        check_anchor(self.anchor)
        check_lengths(self.lengths)
        left, right = self.window
        if self.causal or right == 0:
            object.__setattr__(self, "causal", True)
            object.__setattr__(self, "window", (left, None))
        if self.dv == self.d:
            object.__setattr__(self, "dv", None)
        if self.bounds == (None, None) or (self.Nq == self.keys and self.lengths != "packed"):
            object.__setattr__(self, "anchor", "bottom-right")

    @property
    def kv_heads(self) -> int:
        """Key/value heads, Hk."""
        return self.Hq if self.Hk is None else self.Hk

    @property
    def keys(self) -> int:
        """Key/value length, Nk."""
        return self.Nq if self.Nk is None else self.Nk

    @property
    def softmax_scale(self) -> float:
        """The factor of Q K^T; 1/sqrt(d) unless given."""
        return self.scale if self.scale is not None else 1.0 / math.sqrt(self.d)

    @property
    def value_dim(self) -> int:
        """Head dimension of V and O, dv."""
        return self.d if self.dv is None else self.dv

    @property
    def bounds(self) -> Window:
        """Keys that a query sees before and behind its own: the window, which `causal` ends at 0."""
        return (self.window[0], 0 if self.causal else self.window[1])

    @property
    def ends(self) -> bool:
        """Whether the keys that a query sees end at a diagonal: causal, or a window's right side."""
        return self.bounds[1] is not None

    @property
    def features(self) -> Features:
        """What the kernels' text depends on beside dtype, head dimensions and the causal mask."""
        left, right = self.bounds
        return Features(
            left=left is not None, shifted=bool(right), top_left=self.anchor == "top-left", lengths=self.lengths,
            score_mod=self.score_mod, sinks=self.sinks, dropout=self.dropout > 0,
        )  # fmt: skip

    @property
    def text(self) -> str:
        """The part that the kernels' text depends on, in words."""
        dv = f" dv={self.dv}" if self.dv else ""
        words = "".join(f" {word}" for word in self.features.words)
        return f"{self.dtype} d={self.d}{dv}{' causal' if self.causal else ''}{words}"

    @property
    def options(self) -> str:
        """The same, as the command line takes it."""
        words = [f"--dtype {self.dtype} --d {self.d}", *(["--causal"] if self.causal else [])]
        words += [f"--dv {self.dv}"] if self.dv else []
        left, right = ("" if side is None else str(side) for side in self.window)
        words += [f"--window {left},{right}"] if left or right else []
        words += [f"--anchor {self.anchor}"] if self.anchor != "bottom-right" else []
        words += [f"--lengths {self.lengths}"] if self.lengths != "uniform" else []
        if self.score_mod:
            tables = ",".join(table.option for table in self.score_mod.tables)
            words += [f"--score-mod '{self.score_mod.text}'", *([f"--tables {tables}"] if tables else [])]
        words += ["--sinks"] if self.sinks else []
        words += [f"--dropout {self.dropout}"] if self.dropout else []
        return " ".join(words)

    @property
    def plain(self) -> Problem:
        """The same without features."""
        return replace(
            self, window=(None, None), anchor="bottom-right", lengths="uniform", score_mod=None, sinks=False,
            dropout=0.0, causal=self.ends,
        )  # fmt: skip

    def visible_pairs(self) -> int:
        """Pairs of a query and a key that it sees, of one head; all sequences as long as the longest.

        >>> Problem(dtype="bf16", d=64, causal=True, Nq=3, Nk=4).visible_pairs()
        9
        """
        left, right = self.bounds
        if left is None and right is None:
            return self.Nq * self.keys
        pairs, corner = 0, 0 if self.anchor == "top-left" else self.keys - self.Nq
        for at in range(corner, corner + self.Nq):
            first = 0 if left is None else max(0, at - left)
            last = self.keys - 1 if right is None else min(self.keys - 1, at + right)
            pairs += max(0, last - first + 1)
        return pairs

    def flops(self, which: Pass) -> float:
        """FLOPs credited to a pass: 4 B Hq Nq Nk d forward, 2.5 times that backward, half of it when causal.

        The convention of the FlashAttention-2 paper (section 4.1): the recomputation is never counted. Of a window, the
        pairs that are seen; with a dv of its own, each product by its own dimension.
        """
        if self.window == (None, None) and self.anchor == "bottom-right":
            pairs = self.Nq * self.keys * (0.5 if self.causal else 1.0)
        else:
            pairs = self.visible_pairs()
        columns = self.d + self.value_dim if which == "forward" else 3 * self.d + 2 * self.value_dim
        return 2.0 * self.B * self.Hq * pairs * columns


def check_head_dim(d: int, name: str = "d") -> None:
    """Raise BadProblem unless a head dimension is a multiple of 8 from 8 to 256."""
    if 8 <= d <= MAX_D and d % 8 == 0:
        return
    if d > MAX_D:
        raise BadProblem(
            f"{name}={d} is not served: the head dimension must be a multiple of 8 from 8 to {MAX_D}. Wider sums do "
            "not fit the registers of a thread; split the heads."
        )
    near = max(8, -(-d // 8) * 8)
    raise BadProblem(
        f"{name}={d} is not served: the head dimension must be a multiple of 8 from 8 to {MAX_D}; pad to {near}."
    )
