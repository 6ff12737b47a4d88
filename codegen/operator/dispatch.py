"""Choose who computes attention of PyTorch tensors, and ask: the kernels on an engine, or the tiled loop in PyTorch.

FLASHSMITH_ENGINE names it: `cuda` runs the kernels on the GPU, as CUDA tensors do anyway; `emulator` runs them on CPU
tensors; `torch` is the tiled loop, which CPU tensors get anyway and tensors of every device may.
"""

from __future__ import annotations

import math
import os
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from ..errors import UsageError
from .added import NOTHING, Added
from .order import in_order
from .tiled import Gradients, Needs, tiled_backward, tiled_forward

ENGINES = ("cuda", "emulator", "torch")


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, added: Added = NOTHING, *, bnhd: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """O [B, Hq, Nq, dv]; m and l [B, Hq, Nq]. `bnhd`: O lies in memory as [B, Nq, Hq, dv]."""
    factor = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    if runs_kernels(q.device):
        O, m, l = _kernels().kernel_forward(q, k, v, factor, causal, added, bnhd=bnhd)
    else:
        with torch.autocast(q.device.type, enabled=False):  # it reaches into the body of an op
            O, m, l = tiled_forward(q, k, v, factor, causal, added)
        O = in_order(O, bnhd)
    return O, m, l


def backward(
    dO: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, O: Tensor, m: Tensor, l: Tensor,
    scale: float | None, causal: bool, added: Added = NOTHING, *, bnhd: bool, deterministic: bool, needs: Needs,
) -> Gradients:  # fmt: skip
    """The gradients of what `needs` says, of sinks, and of the tables whose gradients score_mod asks for.

    dQ, dK, dV are laid out as `bnhd` says. dlse [B, Hq, Nq] or None: the gradient of m + ln l.
    """
    factor = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    if runs_kernels(q.device):
        made: Gradients = _kernels().kernel_backward(
            dO, dlse, q, k, v, O, m, l, factor, causal, added, bnhd=bnhd, deterministic=deterministic, needs=needs
        )
        return made
    with torch.autocast(q.device.type, enabled=False):
        found = tiled_backward(dO, dlse, q, k, v, O, m, l, factor, causal, added, needs=needs)
    dQ, dK, dV = (None if x is None else in_order(x, bnhd) for x in (found.dQ, found.dK, found.dV))
    return Gradients(dQ=dQ, dK=dK, dV=dV, dsinks=found.dsinks, dtables=found.dtables)


@cache
def _kernels() -> ModuleType:
    """Imported by the first call that needs it, and found in a tenth of a microsecond by the others."""
    return import_module(".kernels", __package__)


def runs_kernels(device: torch.device) -> bool:
    """Whether tensors of `device` go to the kernels. Raises UsageError for an engine that is unknown or not theirs."""
    engine = os.environ.get("FLASHSMITH_ENGINE")
    if not engine:
        return device.type == "cuda"
    if engine not in ENGINES:
        raise UsageError(f"FLASHSMITH_ENGINE={engine!r} is not known; use one of {', '.join(ENGINES)}.")
    owner = {"cuda": "cuda", "emulator": "cpu"}.get(engine, device.type)
    if device.type != owner:
        raise UsageError(f"FLASHSMITH_ENGINE={engine} takes {owner} tensors; these are on {device}.")
    return engine != "torch"
