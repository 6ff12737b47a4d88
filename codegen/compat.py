"""Answer to the calls that people already write: flash-attn's flash_attn_func, PyTorch's scaled_dot_product_attention.

Names, argument orders, layouts and masks are theirs; a value that is not served raises NotImplementedError naming it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import UsageError
from .operator.inputs import check_are_tensors
from .operator.op import attention


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Tensor:  # fmt: skip
    """flash_attn.flash_attn_func (2.1 and later): q [B, Nq, Hq, d], k and v [B, Nk, Hk, d]; O as q.

    `causal` aligns the mask to the bottom right. deterministic=False still follows torch.use_deterministic_algorithms.

    >>> q = torch.randn(1, 50, 4, 64)
    >>> flash_attn_func(q, q, q, causal=True).shape
    torch.Size([1, 50, 4, 64])
    """
    refuse("flash_attn_func", "dropout_p", dropout_p, dropout_p == 0)
    refuse("flash_attn_func", "window_size", window_size, tuple(window_size) == (-1, -1))
    refuse("flash_attn_func", "softcap", softcap, softcap == 0)
    refuse("flash_attn_func", "alibi_slopes", alibi_slopes, alibi_slopes is None)
    refuse("flash_attn_func", "return_attn_probs", return_attn_probs, not return_attn_probs)
    return attention(
        q, k, v, causal=causal, scale=softmax_scale, layout="bnhd", deterministic=deterministic or None
    )  # fmt: skip


def sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """torch.nn.functional.scaled_dot_product_attention: query [B, Hq, Nq, d] or [B, Nq, d], key and value alike.

    `is_causal` aligns the mask to the top left, as PyTorch does: query i sees keys 0 to i, however many there are.

    >>> q = torch.randn(1, 4, 50, 64)
    >>> sdpa(q, q, q, is_causal=True).shape
    torch.Size([1, 4, 50, 64])
    """
    check_are_tensors((3, 4), query=query, key=key, value=value)
    refuse("sdpa", "attn_mask", attn_mask, attn_mask is None)
    refuse("sdpa", "dropout_p", dropout_p, dropout_p == 0)
    if not query.dim() == key.dim() == value.dim():
        raise UsageError(
            f"query has {query.dim()} dimensions, key {key.dim()}, value {value.dim()}: they must be equal."
        )
    if query.dim() == 3:
        return _top_left(query[:, None], key[:, None], value[:, None], is_causal, scale)[:, 0]
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise UsageError(
            f"query has {query.shape[1]} heads and key has {key.shape[1]}: they must be equal unless enable_gqa=True."
        )
    return _top_left(query, key, value, is_causal, scale)


def _top_left(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    """Attention with the causal mask j <= i, by calls whose mask is j <= i + Nk - Nq."""
    Nq, Nk = q.shape[2], k.shape[2]
    if not causal or Nq == Nk:
        return attention(q, k, v, causal=causal, scale=scale)
    if Nq < Nk:  # no query sees a key from Nq on
        return attention(q, k[:, :, :Nq], v[:, :, :Nq], causal=True, scale=scale)
    square = attention(q[:, :, :Nk], k, v, causal=True, scale=scale)
    below = attention(q[:, :, Nk:], k, v, scale=scale)  # queries from Nk on see every key
    return torch.cat((square, below), dim=2)


def refuse(call: str, argument: str, value: object, served: bool) -> None:
    """Raise NotImplementedError that names the argument and its value, unless it is served."""
    if not served:
        shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise NotImplementedError(f"{call}: {argument}={shown} is not served; leave {argument} at its default.")
