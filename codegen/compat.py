"""Answer to the calls that people already write: flash-attn's functions, PyTorch's scaled_dot_product_attention.

Names, argument orders, layouts and masks are theirs; a value that is not served raises NotImplementedError naming it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .errors import UsageError
from .operator.inputs import check_are_tensors
from .operator.op import attention, attention_varlen

if TYPE_CHECKING:
    from .operator.op import PackedOptions

Sides = tuple[int, int]  # of a window; -1: no bound
Answer = Tensor | tuple[Tensor, Tensor, None]  # O, or with return_attn_probs O, lse and no weights


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sides = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Answer:  # fmt: skip
    """flash_attn.flash_attn_func (2.1 and later): q [B, Nq, Hq, d], k and v [B, Nk, Hk, d]; O as q.

    `causal` and the window are aligned to the bottom right. deterministic=False still follows
    torch.use_deterministic_algorithms. return_attn_probs adds lse [B, Hq, Nq], and None in the place of the weights,
    which never are in memory. Slopes are differentiable here.

    >>> q = torch.randn(1, 50, 4, 64)
    >>> flash_attn_func(q, q, q, causal=True, window_size=(16, 0)).shape
    torch.Size([1, 50, 4, 64])
    """
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    if not return_attn_probs:
        return attention(q, k, v, layout="bnhd", **options)
    return *attention(q, k, v, layout="bnhd", return_lse=True, **options), None


def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sides = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Answer:  # fmt: skip
    """flash_attn.flash_attn_kvpacked_func: flash_attn_func with kv [B, Nk, 2, Hk, d]."""
    k, v = _unpacked("kv", kv, dims=5, axis=2, count=2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sides = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Answer:  # fmt: skip
    """flash_attn.flash_attn_qkvpacked_func: flash_attn_func with qkv [B, N, 3, H, d]."""
    q, k, v = _unpacked("qkv", qkv, dims=5, axis=2, count=3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: Sides = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Answer:  # fmt: skip
    """flash_attn.flash_attn_varlen_func: q [all queries, Hq, d], k and v [all keys, Hk, d]; see attention_varlen.

    return_attn_probs adds lse [Hq, all queries].
    """
    refuse("flash_attn_varlen_func", "block_table", block_table, block_table is None)
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if not return_attn_probs:
        return attention_varlen(q, k, v, *lengths, **options)
    return *attention_varlen(q, k, v, *lengths, return_lse=True, **options), None


def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: Sides = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Answer:  # fmt: skip
    """flash_attn.flash_attn_varlen_kvpacked_func: flash_attn_varlen_func with kv [all keys, 2, Hk, d]."""
    k, v = _unpacked("kv", kv, dims=4, axis=1, count=2)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Sides = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Answer:  # fmt: skip
    """flash_attn.flash_attn_varlen_qkvpacked_func: flash_attn_varlen_func with qkv [all, 3, H, d]."""
    q, k, v = _unpacked("qkv", qkv, dims=4, axis=1, count=3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """torch.nn.functional.scaled_dot_product_attention: query [B, Hq, Nq, d] or [B, Nq, d], key and value alike.

    `is_causal` aligns the mask to the top left, as PyTorch does: query i sees keys 0 to i, however many there are.
    `attn_mask` broadcasts to the scores: True where a key is seen, or numbers, differentiable, that are added. Tiles
    that it hides are computed all the same. Beside is_causal it hides further keys.

    >>> q = torch.randn(1, 4, 50, 64)
    >>> sdpa(q, q, q, is_causal=True).shape
    torch.Size([1, 4, 50, 64])
    """
    check_are_tensors((3, 4), query=query, key=key, value=value)
    if not query.dim() == key.dim() == value.dim():
        raise UsageError(
            f"query has {query.dim()} dimensions, key {key.dim()}, value {value.dim()}: they must be equal."
        )
    one_head = query.dim() == 3
    if not one_head and query.shape[1] != key.shape[1] and not enable_gqa:
        raise UsageError(
            f"query has {query.shape[1]} heads and key has {key.shape[1]}: they must be equal unless enable_gqa=True."
        )
    bias = None if attn_mask is None else additive(attn_mask, query.dtype)
    if one_head:
        query, key, value = (x[:, None] for x in (query, key, value))
        bias = bias[:, None] if bias is not None and bias.dim() == 3 else bias
    top_left = is_causal and query.shape[2] != key.shape[2]
    O = attention(
        query, key, value, causal=is_causal, scale=scale, anchor="top-left" if top_left else "bottom-right", bias=bias,
        dropout_p=dropout_p,
    )  # fmt: skip
    return O[:, 0] if one_head else O


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of truths as numbers to add to scores, 0 or -inf; any other as it is.

    >>> additive(torch.tensor([True, False]), torch.float32)
    tensor([0., -inf])
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -math.inf)


def refuse(call: str, argument: str, value: object, served: bool) -> None:
    """Raise NotImplementedError that names the argument and its value, unless it is served."""
    if not served:
        shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise NotImplementedError(f"{call}: {argument}={shown} is not served; leave {argument} at its default.")


def _options(
    dropout_p: float, scale: float | None, causal: bool, window: Sides, softcap: float, alibi_slopes: Tensor | None,
    deterministic: bool,
) -> PackedOptions:  # fmt: skip
    """flash-attn's options as attention knows them; those that are off ask for nothing."""
    return {
        "dropout_p": dropout_p, "scale": scale, "causal": causal, "alibi_slopes": alibi_slopes,
        "window": None if tuple(window) == (-1, -1) else window, "softcap": softcap if softcap > 0 else None,
        "deterministic": deterministic or None,
    }  # fmt: skip


def _unpacked(name: str, x: Tensor, *, dims: int, axis: int, count: int) -> tuple[Tensor, ...]:
    """The parts that lie side by side in one tensor. Raises TypeError, or UsageError if it is not of that shape."""
    check_are_tensors((dims,), **{name: x})
    if x.shape[axis] != count:
        letters = "all" if dims == 4 else "B, N"
        raise UsageError(f"{name} has shape {tuple(x.shape)}: [{letters}, {count}, heads, d] is needed.")
    return x.unbind(axis)
