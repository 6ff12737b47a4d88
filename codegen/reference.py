"""Compute attention and its gradient in float64, written for reading.

Every array is [B, H, N, d] or, per row, [B, H, N]. The formulas are those of the FlashAttention paper (Dao et al.,
2022, section 2 and appendix B): S = scale Q K^T, P = softmax(S), O = P V; dV = P^T dO, dP = dO V^T,
dS = P o (dP - delta), dQ = scale dS K, dK = scale dS^T Q, with delta = rowsum(dO o O).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """O, the statistics of its rows, and the gradients."""

    O: F64
    m: F64  # max of the scaled scores; -inf for a row that sees no key
    l: F64  # sum of exp(S - m); 0 for a row that sees no key
    dQ: F64
    dK: F64
    dV: F64

    @property
    def lse(self) -> F64:
        """m + ln l, natural log; -inf for a row that sees no key."""
        with np.errstate(divide="ignore"):
            return np.asarray(self.m + np.log(self.l))


def visible(Nq: int, Nk: int, causal: bool) -> NDArray[np.bool_]:
    """[Nq, Nk]: whether query i sees key j; causal means j <= i + Nk - Nq."""
    i, j = np.arange(Nq)[:, None], np.arange(Nk)[None, :]
    return j <= i + Nk - Nq if causal else np.ones((Nq, Nk), bool)


def attention(q: F64, k: F64, v: F64, dO: F64, *, scale: float, causal: bool) -> Result:
    """Attention and its gradient in float64. q, dO [B, Hq, Nq, d]; k, v [B, Hk, Nk, d]; Hq a multiple of Hk."""
    group = q.shape[1] // k.shape[1]
    K, V = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    mask = visible(q.shape[2], k.shape[2], causal)

    S = np.where(mask, scale * (q @ K.swapaxes(-1, -2)), -np.inf)
    m = S.max(axis=-1, initial=-np.inf)
    with np.errstate(invalid="ignore"):  # -inf - -inf where a row sees no key
        P = np.where(mask, np.exp(S - m[..., None]), 0.0)
    l = P.sum(axis=-1)
    P /= np.where(l == 0, 1, l)[..., None]
    O = P @ V

    delta = (dO * O).sum(axis=-1)
    dS = P * (dO @ V.swapaxes(-1, -2) - delta[..., None])
    return Result(
        O=O, m=m, l=l,
        dQ=scale * (dS @ K),
        dK=_sum_groups(scale * (dS.swapaxes(-1, -2) @ q), group),
        dV=_sum_groups(P.swapaxes(-1, -2) @ dO, group),
    )  # fmt: skip


def _sum_groups(gradient: F64, group: int) -> F64:
    """[B, Hq, N, d] -> [B, Hk, N, d]: query heads that share a key/value head add their gradients."""
    B, Hq, N, d = gradient.shape
    return gradient.reshape(B, Hq // group, group, N, d).sum(axis=2)
