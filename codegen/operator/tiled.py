"""Compute attention and its gradient tile by tile in PyTorch: the kernels' algorithm, on any device.

The loops are those that the kernels run on the chip. A tile of scores is made, used at once and dropped, so memory
grows as N and never as N x N. Batch and heads are vectorised; scores, statistics and sums are float32 (float64 for
float64 inputs). Algorithms 1 and 4 of the FlashAttention paper (Dao et al., 2022, appendix B), with the loops of
FlashAttention-2: the forward owns a Q tile, the backward a K/V tile.

Query heads that share a key/value head lie as further rows of its tile, so that one product serves the whole group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Br = 128  # query rows of a tile
Bc = 128  # keys of a tile
INF = float("inf")
Needs = tuple[bool, bool, bool]  # which of dQ, dK, dV are asked for


@dataclass(frozen=True, slots=True)
class _Call:
    """Sizes, mask and scale of one call."""

    B: int
    Hq: int
    Hk: int
    Nq: int
    Nk: int
    d: int
    scale: float
    causal: bool
    wide: torch.dtype  # of scores and sums

    @classmethod
    def of(cls, q: Tensor, k: Tensor, scale: float, causal: bool) -> _Call:
        B, Hq, Nq, d = q.shape
        return cls(B, Hq, k.shape[1], Nq, k.shape[2], d, scale, causal, wide_dtype(q.dtype))

    @property
    def empty(self) -> bool:
        """No query rows at all, or no heads."""
        return 0 in (self.B, self.Hq, self.Nq)

    def keys_seen(self, row: int) -> int:
        """Keys that query `row` sees: 0 to this many."""
        return min(self.Nk, max(0, row + 1 + self.Nk - self.Nq)) if self.causal else self.Nk

    def first_row(self, key: int) -> int:
        """The first query row that sees `key`."""
        return max(0, key - (self.Nk - self.Nq)) if self.causal else 0

    def tile(self, x: Tensor, start: int, rows: int) -> Tensor:
        """Rows of x [B, H, N, c] (H = Hq or Hk) as [B, Hk, H/Hk * rows, c] in the wide dtype."""
        part = x[:, :, start : start + rows]
        return part.to(self.wide).reshape(self.B, self.Hk, x.shape[1] // self.Hk * part.shape[2], x.shape[3])

    def heads(self, tile: Tensor) -> Tensor:
        """The inverse of `tile` for query rows: [B, Hk, Hq/Hk * rows, c] -> [B, Hq, rows, c]."""
        return tile.reshape(self.B, self.Hq, tile.shape[2] * self.Hk // self.Hq, tile.shape[3])

    def scores(self, Q: Tensor, K: Tensor, i: int, j: int) -> Tensor:
        """S = scale Q K^T of the tiles that begin at row i and key j; -inf where a row does not see a key."""
        S = (Q @ K.mT) * self.scale
        rows, keys = Q.shape[2] * self.Hk // self.Hq, K.shape[2]
        if self.keys_seen(i) >= j + keys:
            return S  # every row sees every key
        row = torch.arange(i, i + rows, device=Q.device).repeat(self.Hq // self.Hk)[:, None]
        key = torch.arange(j, j + keys, device=Q.device)
        return S.masked_fill(key > row + self.Nk - self.Nq, -INF)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, m, l and sums for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def tiled_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, *, Br: int = Br, Bc: int = Bc
) -> tuple[Tensor, Tensor, Tensor]:
    """O [B, Hq, Nq, d] and, per row, m and l [B, Hq, Nq]: max of the scaled scores, and sum of exp(S - m).

    q [B, Hq, Nq, d]; k, v [B, Hk, Nk, d]. A row that sees no key has O = 0, m = -inf, l = 0.
    """
    call = _Call.of(q, k, scale, causal)
    O = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    m, l = (torch.empty(q.shape[:3], dtype=call.wide, device=q.device) for _ in range(2))
    if call.empty:
        return O, m, l
    for i in range(0, call.Nq, Br):
        rows = slice(i, i + Br)
        O_i, m_i, l_i = _query_tile(call, call.tile(q, i, Br), k, v, i, min(i + Br, call.Nq) - 1, Bc)
        O[:, :, rows] = call.heads(O_i / torch.where(l_i == 0, 1, l_i)).to(O.dtype)
        m[:, :, rows] = call.heads(m_i)[..., 0]
        l[:, :, rows] = call.heads(l_i)[..., 0]
    return O, m, l


def _query_tile(
    call: _Call, Q: Tensor, k: Tensor, v: Tensor, i: int, last: int, Bc: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Q's rows, i to `last`, against every key they see, last tile first: l O, m, l by the online softmax."""
    O_i = torch.zeros_like(Q)
    m_i = Q.new_full((*Q.shape[:3], 1), -INF)
    l_i = torch.zeros_like(m_i)
    for j in reversed(range(0, call.keys_seen(last), Bc)):
        K, V = call.tile(k, j, Bc), call.tile(v, j, Bc)
        S = call.scores(Q, K, i, j)
        m_new = torch.maximum(m_i, S.amax(-1, keepdim=True))
        reference = _finite(m_new)
        P = torch.exp(S - reference)
        shrink = torch.exp(m_i - reference)  # 0 for the first tile
        l_i = shrink * l_i + P.sum(-1, keepdim=True)
        O_i = shrink * O_i + P @ V
        m_i = m_new
    return O_i, m_i, l_i


def tiled_backward(
    dO: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, O: Tensor, m: Tensor, l: Tensor,
    scale: float, causal: bool, *, needs: Needs = (True, True, True), Br: int = Br, Bc: int = Bc,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """dQ [B, Hq, Nq, d], dK and dV [B, Hk, Nk, d]; None where `needs` says so.

    dO as O; dlse [B, Hq, Nq] is the gradient of lse = m + ln l, whose derivative by S is P:
    dS = P o (dP - delta + dlse). delta sums over the whole row, so it is made before the loop.
    """
    call = _Call.of(q, k, scale, causal)
    need_q, need_k, need_v = needs
    dQ = torch.zeros(q.shape, dtype=call.wide, device=q.device) if need_q else None
    dK, dV = (torch.zeros(k.shape, dtype=k.dtype, device=k.device) if need else None for need in (need_k, need_v))
    delta = (dO.to(call.wide) * O.to(call.wide)).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    rows = _Rows(q, dO, delta[..., None], m[..., None], l[..., None], dQ)
    for j in range(0, 0 if call.empty else call.Nk, Bc):
        dK_j, dV_j = _key_tile(call, rows, call.tile(k, j, Bc), call.tile(v, j, Bc), j, Br, needs)
        if dK is not None:
            dK[:, :, j : j + Bc] = scale * dK_j
        if dV is not None:
            dV[:, :, j : j + Bc] = dV_j
    return None if dQ is None else (scale * dQ).to(q.dtype), dK, dV


@dataclass(frozen=True, slots=True)
class _Rows:
    """What the backward reads for query rows, [B, Hq, Nq, d or 1], and the dQ that it adds to."""

    q: Tensor
    dO: Tensor
    delta: Tensor
    m: Tensor
    l: Tensor
    dQ: Tensor | None


def _key_tile(call: _Call, rows: _Rows, K: Tensor, V: Tensor, j: int, Br: int, needs: Needs) -> tuple[Tensor, Tensor]:
    """dK / scale and dV of the keys from j on, over every query row that sees them; adds their part of dQ / scale."""
    dK, dV = torch.zeros_like(K), torch.zeros_like(V)
    for i in range(call.first_row(j), call.Nq, Br):
        Q, dO, delta, m, l = (call.tile(x, i, Br) for x in (rows.q, rows.dO, rows.delta, rows.m, rows.l))
        S = call.scores(Q, K, i, j)
        P = torch.exp(S - _finite(m)) / torch.where(l == 0, 1, l)  # recomputed, used, dropped
        if needs[2]:
            dV += P.mT @ dO
        if not (needs[0] or needs[1]):
            continue
        dS = P * (dO @ V.mT - delta)
        if needs[1]:
            dK += dS.mT @ Q
        if rows.dQ is not None:
            rows.dQ[:, :, i : i + Br] += call.heads(dS @ K)
    return dK, dV


def _finite(m: Tensor) -> Tensor:
    """m, or 0 for rows that have seen no key: -inf - -inf would be NaN."""
    return torch.where(m == -INF, 0, m)
