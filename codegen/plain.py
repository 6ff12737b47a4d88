"""Run plain attention in a 16-bit dtype with PyTorch on the CPU: the yardstick of every check."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from .reference import F64, Result, visible
from .spec.dtype import widen
from .spec.problem import Dtype

_TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16}


def plain_attention(
    q: NDArray[np.uint16],
    k: NDArray[np.uint16],
    v: NDArray[np.uint16],
    dO: NDArray[np.uint16],
    *,
    dtype: Dtype,
    scale: float,
    causal: bool,
) -> Result:
    """Attention and its gradient with every matrix, S and P too, rounded to `dtype`: what a user has without a kernel.

    q, dO [B, Hq, Nq, d]; k, v [B, Hk, Nk, d], as the bits of `dtype`. m and l are those of the rounded scores.
    """
    Q, K, V = (_tensor(x, dtype).requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    mask = torch.from_numpy(visible(q.shape[2], k.shape[2], causal))
    alive = mask.any(-1)[:, None]  # [Nq, 1]: rows that see a key

    S = (Q @ K.repeat_interleave(group, 1).transpose(-1, -2)) * scale
    S = S.masked_fill(~mask, -torch.inf)
    P = torch.softmax(torch.where(alive, S, 0), dim=-1) * alive
    O = P @ V.repeat_interleave(group, 1)
    dQ, dK, dV = torch.autograd.grad(O, (Q, K, V), _tensor(dO, dtype))

    S64 = _array(S)
    m = S64.max(axis=-1, initial=-np.inf)
    with np.errstate(invalid="ignore"):
        l = np.where(visible(q.shape[2], k.shape[2], causal), np.exp(S64 - m[..., None]), 0).sum(-1)
    return Result(O=_array(O), m=m, l=l, dQ=_array(dQ), dK=_array(dK), dV=_array(dV))


def _tensor(bits: NDArray[np.uint16], dtype: Dtype) -> torch.Tensor:
    return torch.from_numpy(widen(bits, dtype)).to(_TORCH[dtype])


def _array(tensor: torch.Tensor) -> F64:
    return np.asarray(tensor.detach().to(torch.float64).numpy())
