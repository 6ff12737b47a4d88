"""Run plain attention in the dtype of the tensors with PyTorch on the CPU: the yardstick of every check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .given import F64, PLAIN, Bool, Given, Ints, places_of
from .reference import Result, softmax
from .score_mod import evaluate
from .spec.dtype import Bits, widen
from .spec.problem import Dtype

_TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def plain_attention(
    q: Bits,
    k: Bits,
    v: Bits,
    dO: Bits,
    *,
    dtype: Dtype,
    scale: float,
    causal: bool,
    given: Given = PLAIN,
) -> Result:
    """Attention and its gradient with every matrix, S and P too, rounded to `dtype`: what a user has without a kernel.

    q [B, Hq, Nq, d]; k [B, Hk, Nk, d]; v [B, Hk, Nk, dv]; dO [B, Hq, Nq, dv], as the bits of `dtype`. Sinks and tables
    are float32, and so are score_mod and the gradients of both. m and l are those of the rounded scores.
    """
    Q, K, V = (_tensor(x, dtype).requires_grad_() for x in (q, k, v))
    shared = {name: torch.from_numpy(table.astype(np.float32)).requires_grad_() for name, table in given.tables.items()}
    sinks = None if given.sinks is None else torch.from_numpy(given.sinks.astype(np.float32)).requires_grad_()
    call = _Call(scale, causal, given, shared, sinks)
    if given.cu_q is None:
        parts = [call.alike(Q, K, V, np.arange(q.shape[0]))]
    else:
        parts = [
            call.alike(Q[:, :, rows], K[:, :, keys], V[:, :, keys], np.array([b]))
            for b, rows, keys in given.sequences()
        ]
    O = torch.cat([part.O for part in parts], dim=2)
    asked = {table.name: shared[table.name] for table in given.score_mod.grads} if given.score_mod else {}
    leaves = (Q, K, V, *([] if sinks is None else [sinks]), *asked.values())
    dQ, dK, dV, *others = map(_array, torch.autograd.grad(O, leaves, _tensor(dO, dtype), materialize_grads=True))
    dsinks = None if sinks is None else others.pop(0)
    return Result(
        O=_array(O), m=np.concatenate([part.m for part in parts], 2), l=np.concatenate([part.l for part in parts], 2),
        dQ=dQ, dK=dK, dV=dV, dsinks=dsinks, dtables=dict(zip(asked, others, strict=True)),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Part:
    O: Tensor
    m: F64
    l: F64


@dataclass(frozen=True, slots=True)
class _Call:
    """What the sequences of a batch share; tables and sinks as tensors that record what is made of them."""

    scale: float
    causal: bool
    given: Given
    tables: Mapping[str, Tensor]
    sinks: Tensor | None

    def alike(self, Q: Tensor, K: Tensor, V: Tensor, batch: Ints) -> _Part:
        """Attention of sequences with as many rows and as many keys each; `batch`: their numbers."""
        (_, Hq, Nq, _), Nk = Q.shape, K.shape[2]
        group = Hq // K.shape[1]
        seen = np.array(self.given.seen(Nq, Nk, self.causal))
        S = (Q @ K.repeat_interleave(group, 1).transpose(-1, -2)) * self.scale
        S = self.modified(S, batch, seen).masked_fill(torch.from_numpy(~seen), -torch.inf)
        P = self.softmax(S)
        kept = torch.as_tensor(self.given.weights_kept(batch, Hq, Nq, Nk)).to(P.dtype)
        m, l, _, _ = softmax(_array(S), self.given.sinks)
        return _Part((P * kept) @ V.repeat_interleave(group, 1), m, l)

    def modified(self, S: Tensor, batch: Ints, seen: Bool) -> Tensor:
        """What score_mod makes of the scores, rounded to their dtype.

        A key that is not seen stands where one is: its derivative may not be finite, and autograd multiplies it by 0.
        """
        formula = self.given.formula
        if formula is None:
            return S
        places = places_of(batch, *S.shape[1:])
        if seen.any():
            *_, i, j = np.argwhere(seen)[0]
            places |= {"i": np.where(seen, places["i"], i), "j": np.where(seen, places["j"], j)}
        return evaluate(formula, score=S.float(), **places, tensors=self.tables).to(S.dtype)

    def softmax(self, S: Tensor) -> Tensor:
        """P; 0 for a row that sees no key. A sink is one more column of scores."""
        if self.sinks is not None:
            S = torch.cat([S, self.sinks[:, None, None].expand(*S.shape[:3], 1).to(S.dtype)], dim=-1)
        alive = (~torch.isneginf(S)).any(-1, keepdim=True)
        P = torch.softmax(torch.where(alive, S, 0), dim=-1) * alive
        return P if self.sinks is None else P[..., :-1]


def _tensor(bits: Bits, dtype: Dtype) -> Tensor:
    return torch.from_numpy(widen(bits, dtype)).to(_TORCH[dtype])


def _array(tensor: Tensor) -> F64:
    return np.asarray(tensor.detach().to(torch.float64).numpy())
