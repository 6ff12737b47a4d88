"""Refuse tensors that attention does not serve, naming the tensor and the rule."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import BadProblem, UsageError
from ..spec.problem import Dtype, check_head_dim

KERNEL_DTYPES: dict[torch.dtype, Dtype] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
DTYPES = (*KERNEL_DTYPES, torch.float64)  # float64: on the tiled path only


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's dtype where autocast is on, as PyTorch's own attention does; float64 stays."""
    kind = tensors[0].device.type
    known = kind in ("cpu", "cuda") or torch.amp.is_autocast_available(kind)
    if not known or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def check_are_tensors(dims: tuple[int, ...] = (4,), **tensors: object) -> None:
    """Raise TypeError unless all are dense tensors that hold numbers, UsageError unless they have `dims` dimensions."""
    for name, x in tensors.items():
        if isinstance(x, Tensor) and x.layout is torch.strided and x.dim() in dims and not x.is_meta:
            continue
        x = _dense(name, x)
        if x.dim() not in dims:
            needed = " or ".join(map(str, dims))
            raise UsageError(f"{name} has shape {tuple(x.shape)}: {needed} dimensions are needed, d last.")


def _dense(name: str, x: object) -> Tensor:
    """x itself. Raises TypeError unless it is a dense tensor that holds numbers."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {type(x).__name__}, not a torch.Tensor.")
    if x.is_meta:
        raise TypeError(f"{name} is on the meta device: it has a shape and no numbers. Make it on a real device.")
    if x.layout != torch.strided:
        raise TypeError(f"{name} has layout {x.layout}; attention takes dense tensors (torch.strided).")
    return x


def check_alike(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise TypeError for a dtype that is not served or not shared; UsageError for tensors on several devices."""
    dtype = q.dtype
    if dtype not in DTYPES or not (dtype == k.dtype == v.dtype):
        dtypes = f"q is {dtype}, k is {k.dtype}, v is {v.dtype}"
        if not (dtype == k.dtype == v.dtype):
            raise TypeError(f"{dtypes}: all three must have one dtype. Cast them, or use torch.autocast.")
        served = ", ".join(str(each) for each in DTYPES)
        raise TypeError(f"{dtypes}: attention serves {served}.")
    if not (q.device == k.device == v.device):
        raise UsageError(f"q is on {q.device}, k on {k.device}, v on {v.device}: all three must be on one device.")


def check_tensor(
    name: str, x: object, q: Tensor, *, dtypes: tuple[torch.dtype, ...] = DTYPES,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> None:  # fmt: skip
    """Raise unless a feature's tensor is dense, of one of `dtypes` and of one of `shapes`, on q's device.

    float64 goes with q of float64. Raises TypeError for the first two, UsageError for the others.
    """
    x = _dense(name, x)
    if x.dtype not in dtypes:
        remedy = ""
        if torch.int32 in dtypes and not x.is_floating_point():
            remedy = " Call .int() on it."
        elif x.dtype == torch.bool:
            remedy = " Of a mask, torch.where(mask, 0.0, -torch.inf) makes numbers to add."
        raise TypeError(f"{name} is {x.dtype}; {' or '.join(map(str, dtypes))} is needed.{remedy}")
    if x.dtype == torch.float64 != q.dtype:
        raise TypeError(
            f"{name} is torch.float64 and q {q.dtype}: only q of that dtype goes with it. Call .float() on it."
        )
    if x.device != q.device:
        raise UsageError(f"{name} is on {x.device} and q on {q.device}: they must be on one device.")
    if shapes and tuple(x.shape) not in shapes.values():
        needed = " or ".join(f"{words} = {shape}" for words, shape in shapes.items())
        raise UsageError(f"{name} has shape {tuple(x.shape)}; {needed} is needed.")
    check_no_tangents(**{name: x})


def check_no_tangents(**tensors: Tensor) -> None:
    """Raise NotImplementedError for dual tensors: PyTorch would drop a tangent at a custom op without a word."""
    if forward_ad._current_level < 0:  # no dual level is open
        return
    for name, x in tensors.items():
        if forward_ad.unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
            raise NotImplementedError(f"{name} carries a tangent: attention has no forward-mode derivative.")


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise UsageError unless q is [B, Hq, Nq, d], k [B, Hk, Nk, d] and v [B, Hk, Nk, dv], Hq a multiple of Hk.

    And BadProblem for a d or dv that is not served.
    """
    (B, Hq, _, d), of_k = q.shape, k.shape
    if of_k == v.shape and (B, d) == (of_k[0], of_k[3]) and of_k[1] and Hq % of_k[1] == 0:
        return check_head_dim(d)  # all is well, as nearly always
    for name, x, axis, letter in (("k", k, 0, "B"), ("k", k, 3, "d"), ("v", v, 0, "B")):
        if x.shape[axis] != q.shape[axis]:
            raise UsageError(
                f"{name} has {letter}={x.shape[axis]} and q has {letter}={q.shape[axis]}: they must be equal."
            )
    for axis, letter in ((1, "Hk"), (2, "Nk")):
        if v.shape[axis] != k.shape[axis]:
            raise UsageError(f"v has {letter}={v.shape[axis]} and k has {letter}={k.shape[axis]}: they must be equal.")
    Hq, Hk = q.shape[1], k.shape[1]
    if Hq and (Hk == 0 or Hq % Hk):
        raise BadProblem(f"{Hq} query heads over {Hk} key/value heads: Hq must be a multiple of Hk.")
    check_head_dim(q.shape[3])
    check_head_dim(v.shape[3], "dv")


def check_scale(scale: float | None) -> float | None:
    """The scale as a Python float; BadProblem unless it is positive and finite. None: 1/sqrt(d)."""
    if scale is None:
        return None
    number = float(scale)
    if not 0 < number < math.inf:  # NaN is not either
        raise BadProblem(f"scale={scale}: must be positive and finite; leave it out for 1/sqrt(d).")
    return number
