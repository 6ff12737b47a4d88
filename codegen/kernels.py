"""Run the kernels on PyTorch's tensors: those that serve the problem, on the engine of the tensors' device."""

from __future__ import annotations

import threading
from functools import cache, lru_cache

import torch
from torch import Tensor

from .compile import Binary, compile_source
from .engines.torch_tensors import torch_engine
from .inputs import KERNEL_DTYPES
from .load import load_best
from .render import render
from .run import Forward, run_backward, run_forward
from .spec.kernel import FUSED, SPLIT, KernelName, KernelSpec
from .spec.problem import Problem
from .tiled import Needs

_compiling = threading.Lock()


def kernel_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, *, bnhd: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """O [B, Hq, Nq, d]; m and l [B, Hq, Nq], float32. Raises TypeError for a dtype that the kernels do not serve."""
    side = torch_engine(q.device)
    binary = _binary(_spec(_problem(q, k, causal), "forward", side.gpu))
    out = run_forward(side.engine, binary, side.given(q), side.given(k), side.given(v), scale, bnhd=bnhd)
    return side.taken(out.O, q.dtype), side.taken(out.m, torch.float32), side.taken(out.l, torch.float32)


def kernel_backward(
    dO: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, O: Tensor, m: Tensor, l: Tensor,
    scale: float, causal: bool, *, bnhd: bool, deterministic: bool, needs: Needs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """dQ, dK, dV as q, k, v; None where `needs` says so. dlse [B, Hq, Nq] or None: the gradient of m + ln l."""
    side = torch_engine(q.device)
    problem, gpu = _problem(q, k, causal), side.gpu
    binaries = {kernel: _binary(_spec(problem, kernel, gpu)) for kernel in kernels_for(needs, deterministic)}
    Q, K, V, G = (side.given(x) for x in (q, k, v, dO))
    saved = Forward(side.given(O), side.given(m.contiguous()), side.given(l.contiguous()))
    of_lse = None if dlse is None else side.given(dlse.contiguous())
    out = run_backward(side.engine, binaries, Q, K, V, saved, G, scale, of_lse, bnhd=bnhd)
    dQ, dK, dV = (
        side.taken(x, q.dtype) if x is not None and need else None
        for x, need in zip((out.dQ, out.dK, out.dV), needs, strict=True)
    )
    return dQ, dK, dV


def kernels_for(needs: Needs, deterministic: bool) -> tuple[KernelName, ...]:
    """The kernels that make the gradients asked for: `fused` is worth its atomics only where all are.

    >>> kernels_for((True, False, False), deterministic=False)
    ('delta', 'dq')
    """
    need_q, need_k, need_v = needs
    if need_q and (need_k or need_v):
        return SPLIT if deterministic else FUSED
    return ("delta", "dq") if need_q else ("delta", "dkdv")


def _problem(q: Tensor, k: Tensor, causal: bool) -> Problem:
    if q.dtype not in KERNEL_DTYPES:
        served = " and ".join(str(dtype) for dtype in KERNEL_DTYPES)
        raise TypeError(f"q, k and v are {q.dtype}: the kernels serve {served}. Cast them, or use torch.autocast.")
    B, Hq, Nq, d = q.shape
    dtype = KERNEL_DTYPES[q.dtype]
    return Problem(dtype=dtype, d=d, causal=causal, B=B, Hq=Hq, Hk=k.shape[1], Nq=Nq, Nk=k.shape[2])


@lru_cache(maxsize=4096)
def _spec(problem: Problem, kernel: KernelName, gpu: str) -> KernelSpec:
    """The kernel that serves `problem`: records are read once for each set of lengths."""
    return load_best(problem, kernel, gpu).spec


def _binary(spec: KernelSpec) -> Binary:
    """The kernel's machine code; of threads that ask at once, one compiles and the others wait."""
    with _compiling:
        return _compiled(spec)


@cache
def _compiled(spec: KernelSpec) -> Binary:
    return compile_source(render(spec))
