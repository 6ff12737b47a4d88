"""Name who else computes attention on this GPU: PyTorch's own kernels, one function each, called as ours is."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .bench import OURS

FLEX = "FlexAttention"  # compiles for seconds at each length

Attend = Callable[[Tensor, Tensor, Tensor, bool], Tensor]  # q, k, v [B, H, N, d] and causal, Nq = Nk


def backends() -> dict[str, Attend]:
    """Ours first, then PyTorch's by name. Whether one runs here shows when it is called."""
    kinds = {
        "torch flash": SDPBackend.FLASH_ATTENTION,
        "torch cuDNN": SDPBackend.CUDNN_ATTENTION,
        "torch mem-efficient": SDPBackend.EFFICIENT_ATTENTION,
        "torch math": SDPBackend.MATH,
    }
    theirs: dict[str, Attend] = {name: partial(_sdpa, kind) for name, kind in kinds.items()}
    return {OURS: _ours, **theirs, FLEX: _flex}


def _ours(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    from .operator.op import attention

    return attention(q, k, v, causal=causal)


def _sdpa(kind: SDPBackend, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    with sdpa_kernel(kind):
        return scaled_dot_product_attention(q, k, v, is_causal=causal)


def _flex(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    mask = _causal_blocks(q.shape[2], str(q.device)) if causal else None
    return _compiled_flex(q.shape[2])(q, k, v, block_mask=mask)


@lru_cache(maxsize=1)
def _compiled_flex(n: int) -> Callable[..., Any]:
    """Compiled for one length; forgotten at the next, before dynamo's limit on recompilations makes it run eagerly."""
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    return torch.compile(flex_attention, dynamic=False)


@cache
def _causal_blocks(n: int, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device=device)
