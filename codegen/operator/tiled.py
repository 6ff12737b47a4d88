"""Compute attention and its gradient tile by tile in PyTorch: the kernels' algorithm, on any device.

The loops are those that the kernels run on the chip. A tile of scores is made, used at once and dropped, so memory
grows as N and never as N x N. Batch and heads are vectorised, packed sequences come one after the other; scores,
statistics and sums are float32 (float64 for float64 inputs). Algorithms 1 and 4 of the FlashAttention paper (Dao et
al., 2022, appendix B), with the loops of FlashAttention-2: the forward owns a Q tile, the backward a K/V tile. Tiles of
which no row sees a key are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from .added import NOTHING, Added
from .scores import INF, Call, wide_dtype

Br = 128  # query rows of a tile
Bc = 128  # keys of a tile
Needs = tuple[bool, bool, bool]  # which of dQ, dK, dV are asked for


def tiled_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, added: Added = NOTHING, *, Br: int = Br, Bc: int = Bc
) -> tuple[Tensor, Tensor, Tensor]:
    """O [B, Hq, Nq, dv] and, per row, m and l [B, Hq, Nq]: max of the scores, and sum of exp(S - m); of the sink, too.

    q [B, Hq, Nq, d]; k [B, Hk, Nk, d]; v [B, Hk, Nk, dv]. A row that sees no key has O = 0 and, without a sink,
    m = -inf, l = 0.
    """
    wide = wide_dtype(q.dtype)
    O = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    m, l = (torch.empty(q.shape[:3], dtype=wide, device=q.device) for _ in range(2))
    for call, of_rows, of_keys in _calls(q, k, scale, causal, added):
        _forward(call, q[of_rows], k[of_keys], v[of_keys], O[of_rows], m[of_rows], l[of_rows], Br, Bc)
    return O, m, l


_Slices = tuple[slice, slice, slice]  # of batch, heads, rows


def _calls(q: Tensor, k: Tensor, scale: float, causal: bool, added: Added) -> Iterator[tuple[Call, _Slices, _Slices]]:
    """The whole batch, or each packed sequence, with its parts of tensors of queries and of keys; none without rows."""
    every = slice(None)
    rows, keys = [every], [every]
    if added.cu_q is not None and added.cu_k is not None:
        rows, keys = ([slice(*ends) for ends in pairwise(cu.tolist())] for cu in (added.cu_q, added.cu_k))
    for b, (of_rows, of_keys) in enumerate(zip(rows, keys, strict=True)):
        call = Call.of(q[:, :, of_rows], k[:, :, of_keys], scale, causal, added, first=b)
        if not call.empty:
            yield call, (every, every, of_rows), (every, every, of_keys)


def _forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, O: Tensor, m: Tensor, l: Tensor, Br: int, Bc: int
) -> None:  # fmt: skip
    """Writes O, m and l."""
    for i in range(0, call.Nq, Br):
        rows = slice(i, i + Br)
        O_i, m_i, l_i = _query_tile(call, call.tile(q, i, Br), k, v, i, min(i + Br, call.Nq) - 1, Bc)
        O[:, :, rows] = call.heads(O_i / torch.where(l_i == 0, 1, l_i)).to(O.dtype)
        m[:, :, rows] = call.heads(m_i)[..., 0]
        l[:, :, rows] = call.heads(l_i)[..., 0]


def _query_tile(
    call: Call, Q: Tensor, k: Tensor, v: Tensor, i: int, last: int, Bc: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Q's rows, i to `last`, against every key they see, last tile first: l O, m, l by the online softmax.

    A sink is a score that each row has seen before.
    """
    O_i = Q.new_zeros((*Q.shape[:3], v.shape[3]))
    m_i = _sinks(call, Q)
    l_i = torch.where(m_i == -INF, 0.0, torch.ones_like(m_i))
    first, end = call.keys_seen(i)[0], call.keys_seen(last)[1]
    for j in reversed(range(first // Bc * Bc, end, Bc)):
        K, V = call.tile(k, j, Bc), call.tile(v, j, Bc)
        tile = call.scores(i, last + 1 - i, j, K.shape[2], Q.device)
        S = tile.modified((Q @ K.mT) * call.scale)
        m_new = torch.maximum(m_i, S.amax(-1, keepdim=True))
        reference = _finite(m_new)
        P = torch.exp(S - reference)
        shrink = torch.exp(m_i - reference)  # 0 for the first tile
        l_i = shrink * l_i + P.sum(-1, keepdim=True)
        O_i = shrink * O_i + tile.dropped(P) @ V
        m_i = m_new
    return O_i, m_i, l_i


def _sinks(call: Call, Q: Tensor) -> Tensor:
    """The sink of each row of a tile of queries, [B, Hk, rows, 1]; -inf if there is none."""
    sinks = call.added.sinks
    if sinks is None:
        return Q.new_full((*Q.shape[:3], 1), -INF)
    of_rows = sinks.to(call.wide).reshape(call.Hk, call.group).repeat_interleave(Q.shape[2] // call.group, 1)
    return of_rows[..., None].expand(call.B, -1, -1, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """dQ [B, Hq, Nq, d], dK [B, Hk, Nk, d], dV [B, Hk, Nk, dv]; None for those that nobody needs."""

    dQ: Tensor | None
    dK: Tensor | None
    dV: Tensor | None
    dsinks: Tensor | None = None  # [Hq], in the dtype of scores, as those of the tables
    dtables: Mapping[str, Tensor] = field(default_factory=dict)  # of the tables whose gradients score_mod asks for


def tiled_backward(
    dO: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, O: Tensor, m: Tensor, l: Tensor,
    scale: float, causal: bool, added: Added = NOTHING,
    *, needs: Needs = (True, True, True), Br: int = Br, Bc: int = Bc,
) -> Gradients:  # fmt: skip
    """The gradients of what `needs` says, and of sinks and tables.

    dO as O; dlse [B, Hq, Nq] is the gradient of lse = m + ln l, whose derivative by S is P:
    dS = P o (dP - delta + dlse). delta sums over the whole row, so it is made before the loop.
    """
    wide = wide_dtype(q.dtype)
    need_q, need_k, need_v = needs
    dQ = torch.zeros(q.shape, dtype=wide, device=q.device) if need_q else None
    dK, dV = (torch.zeros_like(x) if need else None for x, need in ((k, need_k), (v, need_v)))
    asked = added.score_mod.grads if added.score_mod else ()
    dtables = {x.name: torch.zeros_like(added.tables[x.name], dtype=wide) for x in asked}
    delta = (dO.to(wide) * O.to(wide)).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    m, l, delta = (x[..., None] for x in (m, l, delta))
    for call, of_rows, of_keys in _calls(q, k, scale, causal, added):
        dQ_b, dK_b, dV_b = (x if x is None else x[part] for x, part in ((dQ, of_rows), (dK, of_keys), (dV, of_keys)))
        rows = _Rows(q[of_rows], dO[of_rows], delta[of_rows], m[of_rows], l[of_rows], dQ_b)
        _backward(call, rows, k[of_keys], v[of_keys], _Keys(dK_b, dV_b, dtables), Br, Bc)
    return Gradients(
        dQ=None if dQ is None else (scale * dQ).to(q.dtype), dK=dK, dV=dV,
        dsinks=None if added.sinks is None else _sink_gradients(added.sinks.to(wide), delta, m, l), dtables=dtables,
    )  # fmt: skip


def _sink_gradients(sinks: Tensor, delta: Tensor, m: Tensor, l: Tensor) -> Tensor:
    """Of sinks [Hq]: each row's weight of its sink, times 0 - delta. The others are [B, Hq, Nq, 1]."""
    weight = torch.exp(sinks[:, None, None] - _finite(m)) / torch.where(l == 0, 1, l)
    return -(weight * delta).sum((0, 2, 3))


@dataclass(frozen=True, slots=True)
class _Rows:
    """What the backward reads for query rows, [B, Hq, Nq, d, dv or 1], and the dQ that it adds to."""

    q: Tensor
    dO: Tensor
    delta: Tensor
    m: Tensor
    l: Tensor
    dQ: Tensor | None


@dataclass(frozen=True, slots=True)
class _Keys:
    """What it writes for keys, and the gradients of tables that it adds to."""

    dK: Tensor | None
    dV: Tensor | None
    dtables: Mapping[str, Tensor]


def _backward(call: Call, rows: _Rows, k: Tensor, v: Tensor, keys: _Keys, Br: int, Bc: int) -> None:
    """Writes dK and dV; adds to dQ / scale and to the gradients of tables."""
    for j in range(0, call.Nk, Bc):
        dK, dV = _key_tile(call, rows, call.tile(k, j, Bc), call.tile(v, j, Bc), j, Br, keys)
        if keys.dK is not None:
            keys.dK[:, :, j : j + Bc] = call.scale * dK
        if keys.dV is not None:
            keys.dV[:, :, j : j + Bc] = dV


def _key_tile(call: Call, rows: _Rows, K: Tensor, V: Tensor, j: int, Br: int, keys: _Keys) -> tuple[Tensor, Tensor]:
    """dK / scale and dV of the keys from j on, over every query row that sees them; adds their part of dQ / scale."""
    dK, dV = torch.zeros_like(K), torch.zeros_like(V)
    only_dV = keys.dK is None and rows.dQ is None and not keys.dtables
    first, end = call.rows_that_see(j, j + K.shape[2] - 1)
    for i in range(first, end, Br):
        count = min(Br, end - i)
        Q, dO, delta, m, l = (call.tile(x, i, count) for x in (rows.q, rows.dO, rows.delta, rows.m, rows.l))
        tile = call.scores(i, count, j, K.shape[2], Q.device)
        taken = (Q @ K.mT) * call.scale
        P = torch.exp(tile.modified(taken) - _finite(m)) / torch.where(l == 0, 1, l)  # recomputed, used, dropped
        if keys.dV is not None:
            dV += tile.dropped(P).mT @ dO
        if only_dV:
            continue
        dS = P * (tile.dropped(dO @ V.mT) - delta)
        tile.add_table_gradients(keys.dtables, dS, P, taken)
        dX = tile.gradient_of_taken(dS, P, taken)
        if keys.dK is not None:
            dK += dX.mT @ Q
        if rows.dQ is not None:
            rows.dQ[:, :, i : i + count] += call.heads(dX @ K)
    return dK, dV


def _finite(m: Tensor) -> Tensor:
    """m, or 0 for rows that have seen no key: -inf - -inf would be NaN."""
    return torch.where(m == -INF, 0, m)
