"""Give PyTorch exact attention: one call, differentiable, that autograd and torch.compile see as one op each way."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from ..errors import UsageError
from . import dispatch
from .inputs import autocast, check_alike, check_are_tensors, check_no_tangents, check_scale, check_shapes
from .tiled import wide_dtype

Layout = Literal["bhnd", "bnhd"]


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = ..., scale: float | None = ..., layout: Layout = ...,
    return_lse: Literal[False] = ..., deterministic: bool | None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = ..., scale: float | None = ..., layout: Layout = ...,
    return_lse: Literal[True], deterministic: bool | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None, layout: Layout = "bhnd",
    return_lse: bool = False, deterministic: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """O = softmax(scale * Q K^T) V, exact, with memory that grows as N.

    q [B, Hq, Nq, d], k and v [B, Hk, Nk, d]; Hq a multiple of Hk; d a multiple of 8 from 8 to 256. With
    layout="bnhd": [B, N, H, d], and so is O. `causal`: query i sees key j iff j <= i + Nk - Nq. A row that sees no key
    gives 0 and lse = -inf. `scale` is 1/sqrt(d) unless given. `return_lse` adds lse [B, Hq, Nq], the natural logarithm
    of the sum of exponentials of a row's scores, float32 (float64 for float64); O and lse are both differentiable.
    `deterministic`: gradients bit-identical from run to run; None follows torch.use_deterministic_algorithms.

    float16 and bfloat16 run on the kernels or, like float32 and float64, as the same tiled algorithm in PyTorch: see
    FLASHSMITH_ENGINE. Under autocast the inputs are cast to its dtype.

    Raises TypeError or a ValueError (UsageError) that names the tensor and the rule.

    >>> q, k, v = (torch.randn(2, 8, 300, 64) for _ in range(3))
    >>> attention(q, k, v, causal=True).shape
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
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    O, m, l = _forward(q, k, v, check_scale(scale), causal, bnhd, deterministic)
    O = O.transpose(1, 2) if bnhd else O
    if not return_lse:
        return O
    return O, m + torch.log(torch.where(l == 0, 1, l))  # -inf + 0 where a row sees no key, and no 1/0 in the gradient


# The package; doctest imports this file under the name of its folder as well.
NAMESPACE = (__package__ or "flashsmith").partition(".")[0]


@torch.library.custom_op(
    f"{NAMESPACE}::attention_forward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, float? scale, bool causal, bool bnhd, bool deterministic)"
    " -> (Tensor, Tensor, Tensor)",
)
def _forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, bnhd: bool, deterministic: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """O, m, l: see dispatch.forward. `deterministic` is for the backward."""
    return dispatch.forward(q, k, v, scale, causal, bnhd=bnhd)


@torch.library.custom_op(
    f"{NAMESPACE}::attention_backward",
    mutates_args=(),
    schema="(Tensor dO, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor O, Tensor m, Tensor l, float? scale,"
    " bool causal, bool bnhd, bool deterministic, bool need_q, bool need_k, bool need_v) -> (Tensor, Tensor, Tensor)",
)
def _backward(
    dO: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, O: Tensor, m: Tensor, l: Tensor,
    scale: float | None, causal: bool, bnhd: bool, deterministic: bool, need_q: bool, need_k: bool, need_v: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK, dV: see dispatch.backward. A gradient that is not asked for is a tensor of no elements."""
    found = dispatch.backward(
        dO, dlse, q, k, v, O, m, l, scale, causal,
        bnhd=bnhd, deterministic=deterministic, needs=(need_q, need_k, need_v),
    )  # fmt: skip
    dQ, dK, dV = (q.new_empty(0) if x is None else x for x in found)
    return dQ, dK, dV


@_forward.register_fake
def _forward_shapes(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, bnhd: bool, deterministic: bool
) -> tuple[Tensor, Tensor, Tensor]:
    m, l = (q.new_empty(q.shape[:3], dtype=wide_dtype(q.dtype)) for _ in range(2))
    return dispatch.empty_in_order(q, bnhd), m, l


@_backward.register_fake
def _backward_shapes(
    dO: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, O: Tensor, m: Tensor, l: Tensor,
    scale: float | None, causal: bool, bnhd: bool, deterministic: bool, need_q: bool, need_k: bool, need_v: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    asked = ((q, need_q), (k, need_k), (v, need_v))
    dQ, dK, dV = (dispatch.empty_in_order(x, bnhd) if need else q.new_empty(0) for x, need in asked)
    return dQ, dK, dV


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, *ctx.options = inputs
    O, m, l = output
    ctx.save_for_backward(q, k, v, O, m, l)
    ctx.mark_non_differentiable(m)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dO: Tensor | None, dm: None, dl: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of q, k and v, for those that ask.

    m is a reference: lse = m + ln l does not change with it, so it is held constant and l carries the gradient of lse,
    dlse = l dl.
    """
    q, k, v, O, m, l = ctx.saved_tensors
    scale, causal, bnhd, deterministic = ctx.options
    needs = ctx.needs_input_grad[:3]
    if dO is None and dl is None:
        return (None,) * 7
    dO = torch.zeros_like(O) if dO is None else dO
    dlse = None if dl is None else l * dl
    found = _backward(dO, dlse, q, k, v, O, m, l, scale, causal, bnhd, deterministic, *needs)
    dQ, dK, dV = (x if need else None for x, need in zip(found, needs, strict=True))
    return dQ, dK, dV, None, None, None, None


def _refuse_second_order(ctx: Any, *gradients: Tensor) -> None:
    raise NotImplementedError(
        "flashsmith.attention has no second derivative. Where a gradient of a gradient is needed, use "
        "torch.nn.functional.scaled_dot_product_attention under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
    )


_forward.register_autograd(_gradients, setup_context=_save)
_backward.register_autograd(_refuse_second_order)
