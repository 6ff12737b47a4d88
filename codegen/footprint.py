"""Count on the emulator, or measure on a GPU, the memory that `ledger` computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from .compile import compile_source
from .errors import UsageError
from .ledger import Ledger, ledger
from .load import load_best
from .render import render
from .spec.gpu import Gpu
from .spec.problem import Problem

COUNTED_N = (128, 256)  # two lengths, so that growth shows: twice the length, twice the bytes
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Bytes that one forward of the kernel wrote to global memory on the emulator, store by store."""

    n: int
    kernel: str  # key
    O: int
    m: int
    l: int
    total: int  # of all stores of the launch, wherever they went
    computed: Ledger

    @property
    def agrees(self) -> bool:
        """O, m and l once each, and nothing else."""
        own = (self.O, self.m, self.l, self.total)
        return own == (self.computed.O, self.computed.m, self.computed.l, self.computed.written)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Bytes of the GPU's memory that a forward held at its peak above what was there before it, and after it."""

    way: str
    n: int
    peak: int
    kept: int  # for the backward, once the forward is done: without its inputs
    failed: str = ""  # why there is no number


def count_forward(problem: Problem, gpu: Gpu, lengths: tuple[int, ...] = COUNTED_N) -> tuple[Counted, ...]:
    """Run the forward that serves `problem` at short lengths, one batch, on the emulator, and count its stores."""
    from .engines.emulated import EmulatedEngine
    from .inputs import make_inputs
    from .run import run_forward

    found = []
    for n in lengths:
        short = replace(problem, B=1, Nq=n, Nk=n)
        binary = compile_source(render(load_best(problem, "forward", gpu).spec))
        engine, x = EmulatedEngine(), make_inputs(short)
        q, k, v = (engine.tensor(array) for array in (x.q, x.k, x.v))
        out = run_forward(engine, {"forward": binary}, q, k, v, short.softmax_scale)
        _, report = engine.reports[-1]
        O, m, l = (report.written_bytes_of(tensor.address) for tensor in (out.O, out.m, out.l))
        total, key = report.global_written_bytes, binary.spec.key
        found.append(Counted(n=n, kernel=key, O=O, m=m, l=l, total=total, computed=ledger(short)))
    return tuple(found)


def measure_forward(problem: Problem, device: str = "cuda") -> tuple[Measured, ...]:
    """Peak and kept bytes of one training forward each way, by torch.cuda.max_memory_allocated.

    "standard" is attention written out in PyTorch, whose autograd keeps P. Raises UsageError without a GPU.
    """
    from .operator.op import attention

    if not torch.cuda.is_available():
        raise UsageError("memory is measured on a GPU, and none is here; without one it is counted.")
    ways: dict[str, Callable[..., torch.Tensor]] = {
        "standard": standard_attention,
        "flash": lambda q, k, v, causal: attention(q, k, v, causal=causal),
    }
    return tuple(_measure(way, attend, problem, device) for way, attend in ways.items())


def standard_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """softmax(Q K^T / sqrt(d)) V with every matrix in memory. q [B, Hq, Nq, d]; k, v [B, Hk, Nk, d]."""
    group, Nq, Nk = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    S = q @ k.mT * q.shape[3] ** -0.5
    if causal:
        hidden = torch.ones(Nq, Nk, dtype=torch.bool, device=q.device).triu(1 + Nk - Nq)
        S = S.masked_fill(hidden, float("-inf"))
    return torch.softmax(S, -1) @ v


def _measure(way: str, attend: Callable[..., torch.Tensor], problem: Problem, device: str) -> Measured:
    dtype = TORCH_DTYPES[problem.dtype]
    try:
        q = torch.randn(problem.B, problem.Hq, problem.Nq, problem.d, dtype=dtype, device=device).requires_grad_()
        k, v = (
            torch.randn(problem.B, problem.kv_heads, problem.keys, problem.d, dtype=dtype, device=device)
            .requires_grad_() for _ in range(2)
        )  # fmt: skip
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        O = attend(q, k, v, problem.causal)
        torch.cuda.synchronize()
        peak, kept = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
        del O
        return Measured(way=way, n=problem.Nq, peak=peak, kept=kept)
    except torch.OutOfMemoryError as error:
        return Measured(way=way, n=problem.Nq, peak=0, kept=0, failed=str(error).splitlines()[0])
