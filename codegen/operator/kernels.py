"""Run the kernels on PyTorch's tensors: those that serve the problem, on the engine of the tensors' device."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache

import numpy as np
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
from ..run import NAMED, Extras, Forward, run_backward, run_forward
from ..run import NOTHING as NO_EXTRAS
from ..score_mod import table_name
from ..spec.features import Lengths
from ..spec.gpu import served_gpu
from ..spec.kernel import KernelName, KernelSpec
from ..spec.problem import Pass, Problem
from .added import NOTHING, Added
from .inputs import KERNEL_DTYPES
from .order import in_order
from .tiled import Gradients, Needs
from .warm import Recorder, Replay, replay_of

REPLAYS = 4096  # calls of different shapes that are kept ready to be repeated

NO_TENSORS: Mapping[str, Tensor] = {}

Key = tuple[object, ...]
_replays: dict[Key, Replay] = {}


def kernel_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, added: Added = NOTHING, *, bnhd: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """O [B, Hq, Nq, dv]; m and l [B, Hq, Nq], float32. Raises TypeError for a dtype that the kernels do not serve."""
    side = torch_engine(q.device)
    more = NO_TENSORS if added is NOTHING else _tensors(added)
    tensors = (q, k, v, *more.values())
    key: Key = (side.engine, q.dtype, q.shape, v.shape, q.stride(), k.stride(), v.stride(), scale, causal, bnhd)
    if added is not NOTHING:
        key += _key(added)
    replay = _replays.get(key)
    again = replay and replay(tensors)
    if again is not None:
        return again  # type: ignore[return-value]
    problem = _problem(q, k, v, causal, added)
    form = _form(problem, "forward", side.gpu, False)
    binaries = {kernel: _binary(_spec(problem, kernel, side.gpu)) for kernel in form.kernels}
    engine = _recorded(side)
    x = {name: side.given(tensor) for name, tensor in zip(("Q", "K", "V", *more), tensors, strict=True)}
    out = run_forward(
        engine, binaries, x["Q"], x["K"], x["V"], scale, parts=form.parts, bnhd=bnhd,
        extras=_extras(added, problem, engine, x),
    )  # fmt: skip
    _remember(key, engine, x, (out.O, out.m, out.l), q.dtype)
    O = in_order(side.taken(out.O, q.dtype), bnhd)  # the emulator's tensors are copies, in an order of their own
    return O, side.taken(out.m, torch.float32), side.taken(out.l, torch.float32)


def kernel_backward(
    dO: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, O: Tensor, m: Tensor, l: Tensor,
    scale: float, causal: bool, added: Added = NOTHING, *, bnhd: bool, deterministic: bool, needs: Needs,
) -> Gradients:  # fmt: skip
    """The gradients of what `needs` says, of sinks, and of the tables whose gradients score_mod asks for.

    dlse [B, Hq, Nq] or None: the gradient of m + ln l. Raises BadProblem for a deterministic gradient of a table.
    """
    side = torch_engine(q.device)
    m, l = m.contiguous(), l.contiguous()
    tensors = {"Q": q, "K": k, "V": v, "O": O, "dO": dO, "m": m, "l": l}
    if dlse is not None:
        tensors["dlse"] = dlse.contiguous()
    key: Key = (
        side.engine, q.dtype, q.shape, v.shape, q.stride(), k.stride(), v.stride(), O.stride(), dO.stride(),
        dlse is None, scale, causal, bnhd, deterministic, needs,
    )  # fmt: skip
    if added is not NOTHING:
        tensors |= _tensors(added)
        key += _key(added)
    replay = _replays.get(key)
    again = replay and replay(tuple(tensors.values()))
    if again is not None:
        return _gradients(again, added)  # type: ignore[arg-type]
    problem = _problem(q, k, v, causal, added)
    form = _form(problem, "backward", side.gpu, deterministic).form
    names = [table.name for table in added.score_mod.grads] if added.score_mod else []
    binaries = {
        kernel: _binary(_spec(problem, kernel, side.gpu)) for kernel in kernels_for(needs, form, tables=bool(names))
    }
    engine = _recorded(side)
    x = {name: side.given(tensor) for name, tensor in tensors.items()}
    extras = _extras(added, problem, engine, x)
    extras = replace(extras, grads={name: engine.zeros(extras.tables[name].shape, np.float32) for name in names})
    saved = Forward(x["O"], x["m"], x["l"])
    out = run_backward(
        engine, binaries, x["Q"], x["K"], x["V"], saved, x["dO"], scale, x.get("dlse"), bnhd=bnhd, extras=extras
    )  # fmt: skip
    asked = [tensor if need else None for tensor, need in zip((out.dQ, out.dK, out.dV), needs, strict=True)]
    asked += [out.dsinks, *extras.grads.values()]
    _remember(key, engine, x, asked, q.dtype)
    of_inputs = [None if tensor is None else in_order(side.taken(tensor, q.dtype), bnhd) for tensor in asked[:3]]
    of_added = [None if tensor is None else side.taken(tensor, torch.float32) for tensor in asked[3:]]
    return _gradients((*of_inputs, *of_added), added)


def _gradients(found: Sequence[Tensor | None], added: Added) -> Gradients:
    """dQ, dK, dV, what each row adds to the gradients of sinks, and the gradients of tables, in that order."""
    dQ, dK, dV, dsinks, *dtables = found
    names = (table.name for table in added.score_mod.grads) if added.score_mod else ()
    return Gradients(
        dQ=dQ, dK=dK, dV=dV, dsinks=None if dsinks is None else dsinks.sum((0, 2)),
        dtables={name: x for name, x in zip(names, dtables, strict=True) if x is not None},
    )  # fmt: skip


def _tensors(added: Added) -> dict[str, Tensor]:
    """The tensors of the features by the names of the kernels' parameters."""
    named = {name: getattr(added, name) for name in NAMED}
    tables = {table_name(name): table for name, table in added.tables.items()}
    return {**{name: x.contiguous() for name, x in named.items() if x is not None}, **tables}


def _key(added: Added) -> Key:
    """What a launch depends on beside q, k and v; of tables, which lie as they like, also the strides."""
    tables = [(x.dtype, x.shape, x.stride()) for x in added.tables.values()]
    there = [None if x is None else x.shape for x in (added.cu_q, added.k_lens, added.sinks, added.rng)]
    return (
        added.window, added.top_left, added.max_q, added.max_k, added.score_mod, added.keep_below, *there, *tables
    )  # fmt: skip


def _extras(added: Added, problem: Problem, engine: Engine, x: Mapping[str, EngineTensor]) -> Extras:
    """The same as `added`, as the kernels take it. A bound past all keys is as good as the last key."""
    if added is NOTHING:
        return NO_EXTRAS
    left, right = (min(bound or 0, problem.Nq + problem.keys) for bound in problem.bounds)
    return Extras(
        left=left, right=right, cu_q=x.get("cu_q"), cu_k=x.get("cu_k"), max_q=added.max_q, max_k=added.max_k,
        k_lens=x.get("k_lens"), sinks=x.get("sinks"), rng=x.get("rng"), keep_below=added.keep_below,
        tables={name: x[table_name(name)] for name in added.tables},
    )  # fmt: skip


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


# In whose place the gradients of queries or of keys alone have kernels of their own.
APART: dict[Form, Form] = {"fused": "split", "fused90": "split90"}


def kernels_for(needs: Needs, form: Form, *, tables: bool = False) -> tuple[KernelName, ...]:
    """The kernels that make the gradients asked for: `fused` is worth its atomics only where all are.

    Gradients of `tables` are added up by the kernels that own keys, those of sinks by `delta`.

    >>> kernels_for((True, False, False), "fused")
    ('delta', 'dq')
    """
    need_q, need_k, need_v = needs
    of_keys = need_k or need_v or tables
    if need_q and of_keys:
        return KERNELS_OF[form]
    delta, dkdv, dq = KERNELS_OF[APART.get(form, form)]
    if need_q:
        return (delta, dq)
    return (delta, dkdv) if of_keys else (delta,)


def _problem(q: Tensor, k: Tensor, v: Tensor, causal: bool, added: Added) -> Problem:
    if q.dtype not in KERNEL_DTYPES:
        served = " and ".join(str(dtype) for dtype in KERNEL_DTYPES)
        raise TypeError(f"q, k and v are {q.dtype}: the kernels serve {served}. Cast them, or use torch.autocast.")
    lengths: Lengths = "uniform" if added.k_lens is None else "padded"
    B, Nq, Nk = q.shape[0], q.shape[2], k.shape[2]
    if added.cu_q is not None:
        lengths, B, Nq, Nk = "packed", added.cu_q.shape[0] - 1, min(added.max_q, Nq), min(added.max_k, Nk)
    return Problem(
        dtype=KERNEL_DTYPES[q.dtype], d=q.shape[3], dv=v.shape[3], causal=causal, B=B, Hq=q.shape[1], Hk=k.shape[1],
        Nq=Nq, Nk=Nk, window=added.window, anchor="top-left" if added.top_left else "bottom-right", lengths=lengths,
        score_mod=added.score_mod, sinks=added.sinks is not None, dropout=1 - added.keep,
    )  # fmt: skip


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
