"""Say which attention is asked for, and refuse what is not served."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import BadProblem

Dtype = Literal["bf16", "fp16"]
Pass = Literal["forward", "backward"]

MAX_D = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One attention: O = softmax(scale * Q K^T) V and its gradient.

    q [B, Hq, Nq, d], k and v [B, Hk, Nk, d]; query head h reads key/value head h // (Hq / Hk). With `causal`, key j is
    seen by query i iff j <= i + Nk - Nq (the mask's diagonal ends at the bottom right).

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

    def __post_init__(self) -> None:
        if self.dtype not in get_args(Dtype):
            raise BadProblem(f"dtype {self.dtype!r} is not served; use one of {', '.join(get_args(Dtype))}.")
        check_head_dim(self.d)
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
    def text(self) -> str:
        """The part that the kernels' text depends on, in words."""
        return f"{self.dtype} d={self.d}{' causal' if self.causal else ''}"

    def flops(self, which: Pass) -> float:
        """FLOPs credited to a pass: 4 B Hq Nq Nk d forward, 2.5 times that backward, half of it when causal.

        The convention of the FlashAttention-2 paper (section 4.1): the recomputation is never counted.
        """
        forward = 4.0 * self.B * self.Hq * self.Nq * self.keys * self.d * (0.5 if self.causal else 1.0)
        return forward if which == "forward" else 2.5 * forward


def check_head_dim(d: int) -> None:
    """Raise BadProblem unless d is a multiple of 8 from 8 to 256."""
    if not 8 <= d <= MAX_D or d % 8:
        near = min(max(8, -(-d // 8) * 8), MAX_D)
        raise BadProblem(
            f"d={d} is not served: the head dimension must be a multiple of 8 from 8 to {MAX_D}; pad to {near}."
        )
