"""Give PyTorch exact attention: one call, differentiable, that autograd and torch.compile see as one op each way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, TypedDict, overload

import torch
from torch import Tensor

from ..errors import UsageError
from ..spec.features import Anchor, Window
from .features import Sizes, bounds_of, check_lengths, check_packed, gathered
from .inputs import autocast, check_alike, check_are_tensors, check_no_tangents, check_scale, check_shapes
from .library import featured_forward, plain_forward

if TYPE_CHECKING:
    from typing_extensions import Unpack

Layout = Literal["bhnd", "bnhd"]


class PackedOptions(TypedDict, total=False):
    """What attention and attention_varlen are told by name."""

    causal: bool
    scale: float | None
    deterministic: bool | None
    window: Window | None
    anchor: Anchor
    softcap: float | None
    alibi_slopes: Tensor | None
    bias: Tensor | None
    sinks: Tensor | None
    dropout_p: float
    score_mod: str | None
    tables: Mapping[str, Tensor] | None
    rng: Tensor | None


class Options(PackedOptions, total=False):
    """What attention alone is told by name beside those."""

    layout: Layout
    key_lengths: Tensor | None


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[Options]
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None, layout: Layout = "bhnd",
    return_lse: bool = False, deterministic: bool | None = None, window: Window | None = None,
    anchor: Anchor = "bottom-right", key_lengths: Tensor | None = None, softcap: float | None = None,
    alibi_slopes: Tensor | None = None, bias: Tensor | None = None, sinks: Tensor | None = None,
    dropout_p: float = 0, score_mod: str | None = None, tables: Mapping[str, Tensor] | None = None,
    rng: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """O = softmax(scale * Q K^T) V, exact, with memory that grows as N.

    q [B, Hq, Nq, d], k [B, Hk, Nk, d], v [B, Hk, Nk, dv] -> O [B, Hq, Nq, dv]; Hq a multiple of Hk; d and dv multiples
    of 8 from 8 to 256. With layout="bnhd": [B, N, H, d], and so is O. `scale` is 1/sqrt(d) unless given. `return_lse`
    adds lse [B, Hq, Nq], the natural logarithm of the sum of exponentials of a row's scores, float32 (float64 for
    float64); O and lse are both differentiable. `deterministic`: gradients bit-identical from run to run; None follows
    torch.use_deterministic_algorithms.

    **Which keys a query sees.** Query i stands at key p = i + Nk - Nq, or at p = i with anchor="top-left". `causal`: it
    sees the keys up to p. `window` (left, right): keys p - left to p + right; None or -1 for no bound. `key_lengths`
    [B], int32: of sequence b the first so many keys, and no diagonal moves. A row that sees no key gives 0 and
    lse = -inf.

    **What becomes of a score**, in this order: `softcap` c makes it c tanh(score / c). `alibi_slopes` [Hq] or [B, Hq]
    take slope |i + Nk - Nq - j| away, whatever the anchor. `bias` is added; it broadcasts to [B, Hq, Nq, Nk].
    `score_mod` is one expression in score, the integers b, h, i, j, Nq, Nk and entries of `tables`, float tensors of 1
    to 4 dimensions by name; flashsmith.score_mod says what may be written. A score of -inf is a key that is not seen.
    What FlexAttention takes as functions is written so:

        def score_mod(score, b, h, q_idx, kv_idx):
            return score - w[h] * (q_idx - kv_idx)        score_mod="score - w[h] * (i - j)", tables={"w": w}
        def mask_mod(b, h, q_idx, kv_idx):
            return doc[q_idx] == doc[kv_idx]              score_mod="score if doc[i] == doc[j] else -inf",
                                                          tables={"doc": doc.float()}

    Tiles that `causal` and `window` hide are skipped, those that a formula or a bias hides are not.

    **What becomes of the weights.** `sinks` [Hq]: a logit of each head that takes part in its softmax, and in lse, and
    has no value. `dropout_p`: the share of the weights that are dropped, the others growing by 1 / (1 - dropout_p), to
    16 bits; which ones follows from `rng`, int64 [2] on q's device (a seed and an offset), drawn from PyTorch's
    generator unless given.

    alibi_slopes, bias, sinks and tables are differentiable; gradients of all but sinks are added up by atomics, so
    that `deterministic` refuses them on the kernels. bfloat16, float16 and float32 run on the kernels or, like
    float64, as the same tiled algorithm in PyTorch: see FLASHSMITH_ENGINE. Under autocast q, k and v are cast to its
    dtype.

    Raises TypeError or a ValueError (UsageError) that names the tensor and the rule. Values of int32 tensors are looked
    at on the CPU alone.

    >>> q, k, v = (torch.randn(2, 8, 300, 64) for _ in range(3))
    >>> attention(q, k, v, causal=True, window=(128, 0)).shape
    torch.Size([2, 8, 300, 64])
    """
    check_are_tensors(q=q, k=k, v=v)
    if layout not in ("bhnd", "bnhd"):
        raise UsageError(f"layout={layout!r} is not known; use 'bhnd' or 'bnhd'.")
    q, k, v = autocast(q, k, v)
    check_alike(q, k, v)
    check_no_tangents(q=q, k=k, v=v)
    bnhd = layout == "bnhd"
    if bnhd:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    check_shapes(q, k, v)
    scale = check_scale(scale)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    plain = (
        window is None and key_lengths is None and softcap is None and alibi_slopes is None and bias is None
        and sinks is None and score_mod is None and not tables and dropout_p == 0 and anchor == "bottom-right"
    )  # fmt: skip
    if plain:
        O, m, l = plain_forward(q, k, v, scale, causal, bnhd, deterministic)
    else:
        sizes = Sizes(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        lengths = {}
        if key_lengths is not None:
            check_lengths("key_lengths", key_lengths, q, sizes.B, sizes.Nk)
            lengths["k_lens"] = key_lengths
        extras, asked = gathered(
            q, sizes, lengths, anchor=anchor, softcap=softcap, alibi_slopes=alibi_slopes, bias=bias,
            sinks=sinks, dropout_p=dropout_p, score_mod=score_mod, tables=tables, rng=rng,
        )  # fmt: skip
        O, m, l = featured_forward(
            q, k, v, extras, asked, bounds_of(window), [0, 0], dropout_p, scale, causal, bnhd, deterministic
        )
    O = O.transpose(1, 2) if bnhd else O
    return (O, _lse(m, l)) if return_lse else O


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    *, return_lse: Literal[False] = ..., **options: Unpack[PackedOptions],
) -> Tensor: ...  # fmt: skip
@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    *, return_lse: Literal[True], **options: Unpack[PackedOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    *, causal: bool = False, scale: float | None = None, return_lse: bool = False, deterministic: bool | None = None,
    window: Window | None = None, anchor: Anchor = "bottom-right", softcap: float | None = None,
    alibi_slopes: Tensor | None = None, bias: Tensor | None = None, sinks: Tensor | None = None,
    dropout_p: float = 0, score_mod: str | None = None, tables: Mapping[str, Tensor] | None = None,
    rng: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of sequences that lie one after the other, each an attention of its own.

    q [all queries, Hq, d], k [all keys, Hk, d], v [all keys, Hk, dv] -> O [all queries, Hq, dv]. Sequence b has of q
    the rows from cu_seqlens_q[b] up to cu_seqlens_q[b + 1], and of k and v those of cu_seqlens_k; both [B + 1], int32,
    from 0 to the number of all. A sequence may have no row, or no key. max_seqlen_q and max_seqlen_k: rows and keys of
    the longest, or more. `return_lse` adds lse [Hq, all queries].

    The rest is as in attention; b counts the sequences, i and j rows and keys within one, Nq and Nk are its own, and a
    bias broadcasts to [B, Hq, max_seqlen_q, max_seqlen_k].

    Raises as attention does. What the int32 tensors hold is checked on the CPU alone: on a GPU that would stall it, and
    rows outside every sequence are not written.

    >>> q, k, v = (torch.randn(50, 4, 64) for _ in range(3))
    >>> cu = torch.tensor([0, 20, 50], dtype=torch.int32)
    >>> attention_varlen(q, k, v, cu, cu, 30, 30, causal=True).shape
    torch.Size([50, 4, 64])
    """
    check_are_tensors((3,), q=q, k=k, v=v)
    q, k, v = autocast(q, k, v)
    check_alike(q, k, v)
    check_no_tangents(q=q, k=k, v=v)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    check_shapes(q, k, v)
    check_packed("q", cu_seqlens_q, max_seqlen_q, q, q.shape[2])
    check_packed("k", cu_seqlens_k, max_seqlen_k, q, k.shape[2])
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise UsageError(
            f"cu_seqlens_q has {cu_seqlens_q.shape[0]} entries and cu_seqlens_k {cu_seqlens_k.shape[0]}: both have one "
            "more than there are sequences."
        )
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    extras, asked = gathered(
        q, Sizes(cu_seqlens_q.shape[0] - 1, q.shape[1], max_seqlen_q, max_seqlen_k),
        {"cu_q": cu_seqlens_q, "cu_k": cu_seqlens_k}, anchor=anchor, softcap=softcap,
        alibi_slopes=alibi_slopes, bias=bias, sinks=sinks, dropout_p=dropout_p, score_mod=score_mod, tables=tables,
        rng=rng,
    )  # fmt: skip
    O, m, l = featured_forward(
        q, k, v, extras, asked, bounds_of(window), [max_seqlen_q, max_seqlen_k], dropout_p, check_scale(scale), causal,
        True, deterministic,
    )  # fmt: skip
    O = O[0].transpose(0, 1)
    return (O, _lse(m, l)[0]) if return_lse else O


def _lse(m: Tensor, l: Tensor) -> Tensor:
    """m + ln l; -inf + 0 where a row sees no key, and no 1/0 in the gradient."""
    return m + torch.log(torch.where(l == 0, 1, l))
