"""Register the ops that autograd and torch.compile see: attention each way, plain and with features.

A plain call has ops of its own, because what a call costs on the host grows with every argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import dispatch
from .features import added_of, gradients_of
from .order import empty_in_order
from .scores import wide_dtype

# The package; doctest imports this file under the name of its folder as well.
NAMESPACE = (__package__ or "flashsmith").partition(".")[0]

Tensors3 = tuple[Tensor, Tensor, Tensor]


@torch.library.custom_op(
    f"{NAMESPACE}::attention_forward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, float? scale, bool causal, bool bnhd, bool deterministic)"
    " -> (Tensor, Tensor, Tensor)",
)
def plain_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, bnhd: bool, deterministic: bool
) -> Tensors3:
    """O, m, l: see dispatch.forward. `deterministic` is for the backward."""
    return dispatch.forward(q, k, v, scale, causal, bnhd=bnhd)


@torch.library.custom_op(
    f"{NAMESPACE}::attention_backward",
    mutates_args=(),
    schema="(Tensor dO, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor O, Tensor m, Tensor l, float? scale,"
    " bool causal, bool bnhd, bool deterministic, bool need_q, bool need_k, bool need_v) -> (Tensor, Tensor, Tensor)",
)
def plain_backward(
    dO: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, O: Tensor, m: Tensor, l: Tensor,
    scale: float | None, causal: bool, bnhd: bool, deterministic: bool, need_q: bool, need_k: bool, need_v: bool,
) -> Tensors3:  # fmt: skip
    """dQ, dK, dV: see dispatch.backward. A gradient that is not asked for is a tensor of no elements."""
    found = dispatch.backward(
        dO, dlse, q, k, v, O, m, l, scale, causal,
        bnhd=bnhd, deterministic=deterministic, needs=(need_q, need_k, need_v),
    )  # fmt: skip
    dQ, dK, dV = (q.new_empty(0) if x is None else x for x in (found.dQ, found.dK, found.dV))
    return dQ, dK, dV


@torch.library.custom_op(
    f"{NAMESPACE}::attention_with_forward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor[] extras, str asked, SymInt[] window, SymInt[] longest,"
    " float dropout_p, float? scale, bool causal, bool bnhd, bool deterministic) -> (Tensor, Tensor, Tensor)",
)
def featured_forward(
    q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], asked: str, window: Sequence[int],
    longest: Sequence[int], dropout_p: float, scale: float | None, causal: bool, bnhd: bool, deterministic: bool,
) -> Tensors3:  # fmt: skip
    """The same, with features: `extras` are their tensors, `asked` says what is no number; see features.py."""
    added = added_of(asked, extras, window, longest, dropout_p)
    return dispatch.forward(q, k, v, scale, causal, added, bnhd=bnhd)


@torch.library.custom_op(
    f"{NAMESPACE}::attention_with_backward",
    mutates_args=(),
    schema="(Tensor dO, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor O, Tensor m, Tensor l, Tensor[] extras,"
    " str asked, SymInt[] window, SymInt[] longest, float dropout_p, float? scale, bool causal, bool bnhd,"
    " bool deterministic, bool[] needs) -> Tensor[]",
)
def featured_backward(
    dO: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, O: Tensor, m: Tensor, l: Tensor,
    extras: Sequence[Tensor], asked: str, window: Sequence[int], longest: Sequence[int], dropout_p: float,
    scale: float | None, causal: bool, bnhd: bool, deterministic: bool, needs: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """dQ, dK, dV and the gradients of `extras`; `needs` says which are asked for."""
    need_q, need_k, need_v, *of_extras = needs
    added = added_of(asked, extras, window, longest, dropout_p, of_extras)
    found = dispatch.backward(
        dO, dlse, q, k, v, O, m, l, scale, causal, added,
        bnhd=bnhd, deterministic=deterministic, needs=(need_q, need_k, need_v),
    )  # fmt: skip
    gradients = [found.dQ, found.dK, found.dV, *gradients_of(asked, extras, of_extras, found)]
    return [q.new_empty(0) if x is None else x for x in gradients]


# Shapes, for the tracing of torch.compile


def _shapes(q: Tensor, v: Tensor, bnhd: bool) -> Tensors3:
    m, l = (q.new_empty(q.shape[:3], dtype=wide_dtype(q.dtype)) for _ in range(2))
    return empty_in_order(q, bnhd, d=v.shape[3]), m, l


def _gradient_shapes(inputs: Sequence[Tensor], needs: Sequence[bool], bnhd: bool) -> list[Tensor]:
    pairs = zip(inputs, needs, strict=True)
    return [empty_in_order(x, bnhd) if need else x.new_empty(0) for x, need in pairs]


@plain_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, bnhd: bool, deterministic: bool) -> Tensors3:
    return _shapes(q, v, bnhd)


@plain_backward.register_fake
def _(
    dO: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, O: Tensor, m: Tensor, l: Tensor,
    scale: float | None, causal: bool, bnhd: bool, deterministic: bool, *needs: bool,
) -> Tensors3:  # fmt: skip
    dQ, dK, dV = _gradient_shapes((q, k, v), needs, bnhd)
    return dQ, dK, dV


@featured_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], asked: str, window: Sequence[int],
    longest: Sequence[int], dropout_p: float, scale: float | None, causal: bool, bnhd: bool, deterministic: bool,
) -> Tensors3:  # fmt: skip
    return _shapes(q, v, bnhd)


@featured_backward.register_fake
def _(
    dO: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, O: Tensor, m: Tensor, l: Tensor,
    extras: Sequence[Tensor], asked: str, window: Sequence[int], longest: Sequence[int], dropout_p: float,
    scale: float | None, causal: bool, bnhd: bool, deterministic: bool, needs: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    of_extras = zip(extras, needs[3:], strict=True)
    return [
        *_gradient_shapes((q, k, v), needs[:3], bnhd),
        *(x.new_empty(x.shape) if need else q.new_empty(0) for x, need in of_extras),
    ]


# Derivatives


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensors3) -> None:
    q, k, v, *ctx.options = inputs
    _keep(ctx, (q, k, v), output)


def _save_featured(ctx: Any, inputs: tuple[Any, ...], output: Tensors3) -> None:
    q, k, v, extras, *ctx.options = inputs
    _keep(ctx, (q, k, v, *extras), output)


def _keep(ctx: Any, inputs: Sequence[Tensor], output: Tensors3) -> None:
    ctx.save_for_backward(*output, *inputs)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dO: Tensor | None, dm: None, dl: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of q, k and v, for those that ask."""
    needs = ctx.needs_input_grad[:3]
    if dO is None and dl is None:
        return (None,) * 7
    O, m, l, *inputs = ctx.saved_tensors
    found = plain_backward(*_upstream(O, l, dO, dl), *inputs, O, m, l, *ctx.options, *needs)
    return (*_asked_for(found, needs), *(None,) * 4)


def _featured_gradients(ctx: Any, dO: Tensor | None, dm: None, dl: Tensor | None) -> tuple[Any, ...]:
    """The same, and those of the features' tensors, as a list."""
    need_extras = ctx.needs_input_grad[3]
    needs = [*ctx.needs_input_grad[:3], *need_extras]
    if dO is None and dl is None:
        return (None, None, None, [None] * len(need_extras), *(None,) * 8)
    O, m, l, q, k, v, *extras = ctx.saved_tensors
    found = featured_backward(*_upstream(O, l, dO, dl), q, k, v, O, m, l, extras, *ctx.options, needs)
    dQ, dK, dV, *of_extras = _asked_for(found, needs)
    return (dQ, dK, dV, of_extras, *(None,) * 8)


def _upstream(O: Tensor, l: Tensor, dO: Tensor | None, dl: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """dO and dlse.

    m is a reference: lse = m + ln l does not change with it, so it is held constant and l carries the gradient of lse,
    dlse = l dl.
    """
    return torch.zeros_like(O) if dO is None else dO, None if dl is None else l * dl


def _asked_for(found: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor | None]:
    return [x if need else None for x, need in zip(found, needs, strict=True)]


def _refuse_second_order(ctx: Any, *gradients: Tensor) -> None:
    raise NotImplementedError(
        "flashsmith.attention has no second derivative. Where a gradient of a gradient is needed, use "
        "torch.nn.functional.scaled_dot_product_attention under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
    )


plain_forward.register_autograd(_gradients, setup_context=_save)
plain_backward.register_autograd(_refuse_second_order)
featured_forward.register_autograd(_featured_gradients, setup_context=_save_featured)
featured_backward.register_autograd(_refuse_second_order)
