"""Run the kernels on PyTorch's tensors: those that serve the problem, on the engine of the tensors' device."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache

import torch
from torch import Tensor

from ..compile import Binary, compile_source
from ..engines.cuda import CudaEngine
from ..engines.engine import Engine
from ..engines.engine import Tensor as EngineTensor
from ..engines.torch_tensors import TorchEngine, torch_engine
from ..forms import KERNELS_OF, Choice, Form
from ..load import load_best, pass_form
from ..render import render
from ..run import Forward, run_backward, run_forward
from ..spec.gpu import served_gpu
from ..spec.kernel import KernelName, KernelSpec
from ..spec.problem import Pass, Problem
from .inputs import KERNEL_DTYPES
from .tiled import Needs
from .warm import Recorder, Replay, replay_of

REPLAYS = 4096  # calls of different shapes that are kept ready to be repeated

Key = tuple[object, ...]
_replays: dict[Key, Replay] = {}


def kernel_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, *, bnhd: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """O [B, Hq, Nq, d]; m and l [B, Hq, Nq], float32. Raises TypeError for a dtype that the kernels do not serve."""
    side = torch_engine(q.device)
    key = (side.engine, q.dtype, q.shape, k.shape, q.stride(), k.stride(), v.stride(), scale, causal, bnhd)
    replay = _replays.get(key)
    again = replay and replay((q, k, v))
    if again is not None:
        return again  # type: ignore[return-value]
    problem = _problem(q, k, causal)
    form = _form(problem, "forward", side.gpu, False)
    binaries = {kernel: _binary(_spec(problem, kernel, side.gpu)) for kernel in form.kernels}
    engine = _recorded(side)
    inputs = {name: side.given(x) for name, x in zip("QKV", (q, k, v), strict=True)}
    out = run_forward(
        engine, binaries, inputs["Q"], inputs["K"], inputs["V"], scale, parts=form.parts, bnhd=bnhd
    )  # fmt: skip
    _remember(key, engine, inputs, (out.O, out.m, out.l), q.dtype)
    return side.taken(out.O, q.dtype), side.taken(out.m, torch.float32), side.taken(out.l, torch.float32)


def kernel_backward(
    dO: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, O: Tensor, m: Tensor, l: Tensor,
    scale: float, causal: bool, *, bnhd: bool, deterministic: bool, needs: Needs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """dQ, dK, dV as q, k, v; None where `needs` says so. dlse [B, Hq, Nq] or None: the gradient of m + ln l."""
    side = torch_engine(q.device)
    m, l = m.contiguous(), l.contiguous()
    tensors = {"Q": q, "K": k, "V": v, "O": O, "dO": dO, "m": m, "l": l}
    if dlse is not None:
        tensors["dlse"] = dlse.contiguous()
    key = (
        side.engine, q.dtype, q.shape, k.shape, q.stride(), k.stride(), v.stride(), O.stride(), dO.stride(),
        dlse is None, scale, causal, bnhd, deterministic, needs,
    )  # fmt: skip
    replay = _replays.get(key)
    again = replay and replay(tuple(tensors.values()))
    if again is not None:
        return again  # type: ignore[return-value]
    problem = _problem(q, k, causal)
    form = _form(problem, "backward", side.gpu, deterministic).form
    binaries = {kernel: _binary(_spec(problem, kernel, side.gpu)) for kernel in kernels_for(needs, form)}
    engine = _recorded(side)
    x = {name: side.given(tensor) for name, tensor in tensors.items()}
    saved = Forward(x["O"], x["m"], x["l"])
    out = run_backward(
        engine, binaries, x["Q"], x["K"], x["V"], saved, x["dO"], scale, x.get("dlse"), bnhd=bnhd
    )  # fmt: skip
    asked = [tensor if need else None for tensor, need in zip((out.dQ, out.dK, out.dV), needs, strict=True)]
    _remember(key, engine, x, asked, q.dtype)
    dQ, dK, dV = (None if tensor is None else side.taken(tensor, q.dtype) for tensor in asked)
    return dQ, dK, dV


def _recorded(side: TorchEngine) -> Engine:
    """The engine; one that notes what it does, where its tensors are PyTorch's own and the call can be repeated."""
    return Recorder(side.engine) if isinstance(side.engine, CudaEngine) else side.engine


def _remember(
    key: Key, engine: Engine, inputs: Mapping[str, EngineTensor], results: Sequence[EngineTensor | None],
    dtype: torch.dtype,
) -> None:  # fmt: skip
    replay = replay_of(engine, inputs, results, dtype) if isinstance(engine, Recorder) else None
    if replay is not None:
        if len(_replays) >= REPLAYS:
            _replays.clear()
        _replays[key] = replay


def kernels_for(needs: Needs, form: Form) -> tuple[KernelName, ...]:
    """The kernels that make the gradients asked for: `fused` is worth its atomics only where all are.

    >>> kernels_for((True, False, False), "fused")
    ('delta', 'dq')
    """
    need_q, need_k, need_v = needs
    if need_q and (need_k or need_v):
        return KERNELS_OF[form]
    return ("delta", "dq") if need_q else ("delta", "dkdv")


def _problem(q: Tensor, k: Tensor, causal: bool) -> Problem:
    if q.dtype not in KERNEL_DTYPES:
        served = " and ".join(str(dtype) for dtype in KERNEL_DTYPES)
        raise TypeError(f"q, k and v are {q.dtype}: the kernels serve {served}. Cast them, or use torch.autocast.")
    B, Hq, Nq, d = q.shape
    dtype = KERNEL_DTYPES[q.dtype]
    return Problem(dtype=dtype, d=d, causal=causal, B=B, Hq=Hq, Hk=k.shape[1], Nq=Nq, Nk=k.shape[2])


@lru_cache(maxsize=4096)
def _form(problem: Problem, which: Pass, gpu: str, deterministic: bool) -> Choice:
    """The form of a pass that serves `problem`: chosen once for each set of lengths."""
    return pass_form(problem, which, served_gpu(gpu), deterministic)


@lru_cache(maxsize=4096)
def _spec(problem: Problem, kernel: KernelName, gpu: str) -> KernelSpec:
    """The kernel that serves `problem`: records are read once for each set of lengths."""
    return load_best(problem, kernel, gpu).spec


def _binary(spec: KernelSpec) -> Binary:
    """The kernel's machine code; of threads that ask for it at once, one compiles and the others wait."""
    with _compiling.setdefault(spec, threading.Lock()):
        return _compiled(spec)


@cache
def _compiled(spec: KernelSpec) -> Binary:
    return compile_source(render(spec))


_compiling: dict[KernelSpec, threading.Lock] = {}

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_compiling.clear)  # nobody in the child will open a lock that was held
