"""Bench attention: ours beside PyTorch's own kernels, measured on a GPU; or ours predicted, where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import TYPE_CHECKING, Literal

from .spec.gpu import WGMMA_FLOPS_CLK, Gpu
from .spec.problem import Dtype, Pass, Problem

if TYPE_CHECKING:
    from .backends import Attend
    from .measure import Clock

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
TOKENS = 16384  # of a batch, whatever the length: the convention of the FlashAttention papers
WIDTH = 2048  # Hq * d, as there
OURS = "flashsmith"
BUDGET_S = 0.06  # of timed calls for one figure
FEWEST, MOST = 5, 50  # of them
FIRST = 3  # calls that warm up and say how many fit the budget

# FLOP per clock and SM of the part's fastest dense 16-bit product, where mma.sync does not reach it: wgmma, tcgen05.
FASTEST_FLOPS_CLK = {**WGMMA_FLOPS_CLK, 100: 8192}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One pass of one problem by one backend, measured or predicted; `seconds` is None where `note` says why."""

    which: Pass
    dtype: Dtype
    d: int
    causal: bool
    n: int
    backend: str
    evidence: Literal["measured", "predicted"]
    seconds: float | None = None
    low: float | None = None  # 20% quantile of the samples, seconds
    high: float | None = None
    samples: int = 0
    tflops: float | None = None  # credited FLOPs over time
    peak_share: float | None = None  # of the part's fastest dense 16-bit products
    note: str = ""


def problems(dtype: Dtype, d: int, causal: bool, lengths: Iterable[int] = LENGTHS) -> tuple[Problem, ...]:
    """One problem a length: 16k tokens, Hq * d = 2048.

    >>> [(p.B, p.Hq, p.Nq) for p in problems("bf16", 128, True, (512, 16384))]
    [(32, 16, 512), (1, 16, 16384)]
    """
    heads = max(1, WIDTH // d)
    return tuple(Problem(dtype=dtype, d=d, causal=causal, B=max(1, TOKENS // n), Hq=heads, Nq=n) for n in lengths)


def peak_tflops(gpu: Gpu) -> float:
    """The part's dense 16-bit tensor peak with fp32 accumulation, by whatever instruction is fastest, in TFLOP/s."""
    return gpu.sms * gpu.clock_ghz * FASTEST_FLOPS_CLK.get(gpu.sm, gpu.tensor_flops_clk) / 1e3


def bench_predicted(asked: Sequence[Problem], passes: Sequence[Pass], gpu: Gpu) -> Iterator[Row]:
    """A row for each problem and pass, from the machine code of the kernels that load serves."""
    from .load import load_pass, pass_form
    from .predict import predict

    for which in passes:
        for problem in asked:
            kernels, parts = load_pass(problem, which, gpu).values(), pass_form(problem, which, gpu).parts
            seconds = sum(predict(loaded.binary, problem, gpu, parts=parts).seconds for loaded in kernels)
            yield _row(problem, which, OURS, "predicted", gpu, seconds)


def bench_measured(
    asked: Sequence[Problem], passes: Sequence[Pass], gpu: Gpu, clock: Clock, backends: dict[str, Attend], device: str
) -> Iterator[Row]:
    """A row for each problem, pass and backend, in one run: a backend that cannot do a problem says why in its row."""
    for problem in asked:
        for which in passes:
            for name, attend in backends.items():
                yield _measured(problem, which, name, attend, gpu, clock, device)


def timed(launch: Callable[[], object], clock: Clock) -> list[float]:
    """Seconds of single calls, L2 overwritten before each; as many as fit the budget, after a few that warm up."""

    def call() -> None:
        launch()

    first = median(clock.seconds(call, FIRST))
    return clock.seconds(call, min(MOST, max(FEWEST, round(BUDGET_S / max(first, 1e-9)))))


def series(rows: Iterable[Row]) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """(N, TFLOP/s) points of each line of a plot. Evidence is part of a line's name: it never changes in one."""
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        if row.tflops is not None:
            lines.setdefault((row.backend, row.evidence), []).append((row.n, row.tflops))
    return {name: sorted(points) for name, points in lines.items()}


def _measured(problem: Problem, which: Pass, name: str, attend: Attend, gpu: Gpu, clock: Clock, device: str) -> Row:
    try:
        seconds = timed(_call(problem, which, attend, device), clock)
    except (RuntimeError, NotImplementedError, ImportError, ValueError, TypeError) as error:
        note = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        return _row(problem, which, name, "measured", gpu, None, note=note[:200])
    return _row(problem, which, name, "measured", gpu, median(seconds), samples=seconds)


def _row(
    problem: Problem, which: Pass, backend: str, evidence: Literal["measured", "predicted"], gpu: Gpu,
    seconds: float | None, samples: Sequence[float] = (), note: str = "",
) -> Row:  # fmt: skip
    tflops = None if seconds is None else problem.flops(which) / seconds / 1e12
    fifths = quantiles(samples, n=5, method="inclusive") if len(samples) > 1 else None
    return Row(
        which=which, dtype=problem.dtype, d=problem.d, causal=problem.causal, n=problem.Nq, backend=backend,
        evidence=evidence, seconds=seconds, tflops=tflops, samples=len(samples), note=note,
        low=fifths[0] if fifths else None, high=fifths[3] if fifths else None,
        peak_share=None if tflops is None else tflops / peak_tflops(gpu),
    )  # fmt: skip


def _call(problem: Problem, which: Pass, attend: Attend, device: str) -> Callable[[], object]:
    """One forward, or one backward of a forward that was made before."""
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[problem.dtype]
    shape = (problem.B, problem.Hq, problem.Nq, problem.d)
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, dO = (torch.randn(shape, dtype=dtype, device=device, generator=generator) for _ in range(4))
    if which == "forward":
        with torch.no_grad():
            attend(q, k, v, problem.causal)
        return torch.no_grad()(lambda: attend(q, k, v, problem.causal))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    O = attend(inputs[0], inputs[1], inputs[2], problem.causal)
    return lambda: torch.autograd.grad(O, inputs, dO, retain_graph=True)
