"""Compute attention and its gradient in float64, written for reading.

Every array is [B, H, N, d] or, per row, [B, H, N]. The formulas are those of the FlashAttention paper (Dao et al.,
2022, section 2 and appendix B): S = scale Q K^T, P = softmax(S), O = P V; dV = P^T dO, dP = dO V^T,
dS = P o (dP - delta), dQ = scale dS K, dK = scale dS^T Q, with delta = rowsum(dO o O).

What may be added, see Given: score_mod takes the place of a score, and its slope multiplies dS; a sink is one more
score of each row that has no value; dropout multiplies P by Z / keep on its way to O, and dP on its way back (Z is 0 or
1), so that delta is still rowsum(dO o O). dlse, the gradient of lse = m + ln l, is added to dP - delta.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .given import F64, PLAIN, Given, Ints, Modified, times


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """O, the statistics of its rows, and the gradients."""

    O: F64
    m: F64  # max of the scores, the sink's among them; -inf for a row that sees no key and has no sink
    l: F64  # sum of exp(S - m), over the sink too; 0 for a row that sees no key and has no sink
    dQ: F64
    dK: F64
    dV: F64
    dsinks: F64 | None = None  # [Hq]
    dtables: Mapping[str, F64] = field(default_factory=dict)  # of the tables whose gradients are asked for
    sizes: Mapping[str, F64] = field(default_factory=dict)  # of dQ, dK and dtable_...: the same sums without signs

    @property
    def lse(self) -> F64:
        """m + ln l, natural log; -inf for a row that sees no key."""
        with np.errstate(divide="ignore"):
            return np.asarray(self.m + np.log(self.l))


def attention(
    q: F64, k: F64, v: F64, dO: F64, *, scale: float, causal: bool, given: Given = PLAIN, dlse: F64 | None = None
) -> Result:
    """Attention and its gradient in float64.

    q [B, Hq, Nq, d]; k [B, Hk, Nk, d]; v [B, Hk, Nk, dv]; dO [B, Hq, Nq, dv]; dlse [B, Hq, Nq]; Hq a multiple of Hk.
    Packed sequences lie one after the other: [1, H, rows of all, d].
    """
    dlse = np.zeros(q.shape[:3]) if dlse is None else dlse
    if given.cu_q is None or len(given.cu_q) == 1:  # no sequence: all arrays are empty
        return _alike(q, k, v, dO, dlse, np.arange(q.shape[0]), scale, causal, given)
    results = [
        _alike(
            q[:, :, rows], k[:, :, keys], v[:, :, keys], dO[:, :, rows], dlse[:, :, rows],
            np.array([b]), scale, causal, given,
        )
        for b, rows, keys in given.sequences()
    ]  # fmt: skip
    return _one_after_the_other(results)


def _alike(q: F64, k: F64, v: F64, dO: F64, dlse: F64, batch: Ints, scale: float, causal: bool, given: Given) -> Result:
    """Attention of sequences with as many rows and as many keys each; `batch`: their numbers."""
    group = q.shape[1] // k.shape[1]
    K, V = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    kept = given.weights_kept(batch, q.shape[1], q.shape[2], k.shape[2])

    mod = given.modified(scale * (q @ K.swapaxes(-1, -2)), batch)
    S = np.where(given.seen(q.shape[2], k.shape[2], causal), mod.score, -np.inf)
    m, l, P, P_sink = softmax(S, given.sinks)
    O = (P * kept) @ V

    delta = (dO * O).sum(axis=-1) - dlse
    dP = kept * (dO @ V.swapaxes(-1, -2))
    dS = P * (dP - delta[..., None])
    seen = ~np.isneginf(S)
    dX = times(dS, mod.slope, seen)  # the gradient of scale Q K^T
    return Result(
        O=O, m=m, l=l,
        dQ=scale * (dX @ K),
        dK=_sum_groups(scale * (dX.swapaxes(-1, -2) @ q), group),
        dV=_sum_groups((P * kept).swapaxes(-1, -2) @ dO, group),
        dsinks=None if given.sinks is None else -(P_sink * delta).sum(axis=(0, 2)),
        dtables=given.table_gradients(mod, dS, seen),
        sizes=_sizes(q, K, P * (np.abs(dP) + np.abs(delta[..., None])), seen, scale, group, mod, given),
    )  # fmt: skip


def _sizes(
    q: F64, K: F64, size: F64, seen: NDArray[np.bool_], scale: float, group: int, mod: Modified, given: Given
) -> dict[str, F64]:  # fmt: skip
    """What rounding errors are relative to: dQ, dK and the gradients of tables with `size`, |dS| before it cancels."""
    of_X = times(size, np.abs(mod.slope), seen)
    return {
        "dQ": scale * (of_X @ np.abs(K)),
        "dK": _sum_groups(scale * (of_X.swapaxes(-1, -2) @ np.abs(q)), group),
        **{f"dtable_{name}": x for name, x in given.table_gradients(mod, size, seen, sizes=True).items()},
    }


def softmax(S: F64, sinks: F64 | None) -> tuple[F64, F64, F64, F64]:
    """m and l of scores [B, H, Nq, Nk], their softmax, and the share of each row's sink, which is one more score."""
    m = S.max(axis=-1, initial=-np.inf)
    sink = np.full_like(m, -np.inf) if sinks is None else np.broadcast_to(sinks[:, None], m.shape)
    m = np.maximum(m, sink)
    P, P_sink = _exp(S, m[..., None]), _exp(sink, m)
    l = P.sum(axis=-1) + P_sink
    total = np.where(l == 0, 1, l)
    return m, l, P / total[..., None], P_sink / total


def _exp(S: F64, m: F64) -> F64:
    """exp(S - m); 0 for a score of -inf, also where m is -inf."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isneginf(S), 0.0, np.exp(S - m))


def _one_after_the_other(results: list[Result]) -> Result:
    """The results of packed sequences as one; gradients of what they share are added."""

    def joined(name: str) -> F64:
        return np.concatenate([getattr(result, name) for result in results], axis=2)

    def added(gradients: Iterable[F64]) -> F64:
        return np.sum(list(gradients), axis=0)

    first = results[0]
    return Result(
        O=joined("O"), m=joined("m"), l=joined("l"), dQ=joined("dQ"), dK=joined("dK"), dV=joined("dV"),
        dsinks=None if first.dsinks is None else added(x.dsinks for x in results if x.dsinks is not None),
        dtables={name: added(x.dtables[name] for x in results) for name in first.dtables},
        sizes={
            name: np.concatenate([x.sizes[name] for x in results], axis=2)
            if name in ("dQ", "dK")
            else added(x.sizes[name] for x in results)
            for name in first.sizes
        },
    )  # fmt: skip


def _sum_groups(gradient: F64, group: int) -> F64:
    """[B, Hq, N, d] -> [B, Hk, N, d]: query heads that share a key/value head add their gradients."""
    B, Hq, N, d = gradient.shape
    return gradient.reshape(B, Hq // group, group, N, d).sum(axis=2)
