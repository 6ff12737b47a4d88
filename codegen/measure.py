"""Measure the time of a kernel on the GPU: a launch that is ready -> Timing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import ClassVar, Literal, Protocol

from .compile import Binary
from .engines.engine import Engine, Tensor
from .errors import ImpossibleTime
from .predict import credited_flops, sizes_of
from .run import NOTHING, Extras, blocks_of, dq_accumulator_floats, pack
from .spec.gpu import Gpu
from .spec.kernel import CONVERTS, HOPPER, KernelName, KernelSpec
from .spec.problem import Problem
from .work import PRODUCTS

WARM_UP_S = 0.05  # of launches that are not counted: clocks rise, code and page tables are fetched
BUDGET_S = 0.25  # of counted launches
FEWEST, MOST = 30, 100  # of them; more than 100 would fill the driver's queue of launches
# A time under half of what the table's rates allow is refused. Half: boost clocks lie up to 15% over the nominal ones.
FLOOR_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The measured time of one launch."""

    kind: ClassVar[Literal["measured"]] = "measured"
    kernel: KernelName
    gpu: str
    seconds: float  # the median
    low: float  # 20% quantile, seconds
    high: float  # 80% quantile, seconds
    samples: int
    tflops: float  # FLOPs of the kernel's own matrix products over time; 0 if it has none
    by: str  # the GPU's own name, driver and date

    @property
    def spread(self) -> float:
        """Between the quantiles, relative to the median."""
        return (self.high - self.low) / self.seconds


@dataclass(frozen=True, slots=True)
class Try:
    """Check a kernel, then time it: the answer is a Timing."""

    binary: Binary


@dataclass(frozen=True, slots=True)
class Again:
    """Time a kernel that was checked before: the answer is a list of seconds."""

    binary: Binary
    count: int


class Clock(Protocol):
    """What can time a launch."""

    def seconds(self, launch: Callable[[], None], count: int) -> list[float]:
        """The times of `count` launches, each with nothing of its inputs in L2. Raises LaunchError if one failed."""
        ...

    def clear(self, tensor: Tensor) -> None:
        """Set a tensor to zero on the device, as part of a launch that is timed."""
        ...


def measure(
    spec: KernelSpec, problem: Problem, gpu: Gpu, launch: Callable[[], None], clock: Clock, *, by: str
) -> Timing:  # fmt: skip
    """The time of `launch`, which is one launch of a kernel of `spec` for `problem`.

    Warm-up first, then as many launches as fit the budget. Raises LaunchError, and ImpossibleTime for a median below
    the floor.
    """
    return timing_of(spec, problem, gpu, sample(launch, clock), by=by)


def sample(launch: Callable[[], None], clock: Clock, *, count: int | None = None) -> list[float]:
    """Seconds of `count` launches after a warm-up, in their order; by default of as many as fit the budget.

    Raises LaunchError, and ImpossibleTime if the clock stands still.
    """
    spent, last = 0.0, 0.0
    for _ in range(MOST):
        if spent >= WARM_UP_S:
            break
        last = median(clock.seconds(launch, 3))
        if not last > 0:
            raise ImpossibleTime(f"a launch took {last * 1e3:g} ms: nothing ran, or the clock stands still.")
        spent += 3 * last
    if count is None:
        count = min(MOST, max(FEWEST, round(BUDGET_S / last)))
    return clock.seconds(launch, count)


def timing_of(spec: KernelSpec, problem: Problem, gpu: Gpu, seconds: Sequence[float], *, by: str) -> Timing:
    """Median and quantiles of samples. Raises ImpossibleTime if the median lies below the floor."""
    middle = median(seconds)
    low, high = _quantiles(seconds)
    floor = floor_seconds(spec, problem, gpu)
    if not math.isfinite(middle) or middle <= 0 or middle < floor:
        raise ImpossibleTime(
            f"{spec.key}: {middle * 1e3:.6g} ms, and no {gpu.key} does the work in less than {floor * 1e3:.6g} ms. "
            "Nothing ran, or the clock is wrong."
        )
    return Timing(
        kernel=spec.kernel, gpu=gpu.key, seconds=middle, low=low, high=high, samples=len(seconds),
        tflops=credited_flops(spec, problem) / middle / 1e12, by=by,
    )  # fmt: skip


def _quantiles(seconds: Sequence[float]) -> tuple[float, float]:
    """20% and 80%."""
    if len(seconds) < 2:
        return seconds[0], seconds[0]
    fifths = quantiles(seconds, n=5, method="inclusive")
    return fifths[0], fifths[3]


def floor_seconds(spec: KernelSpec, problem: Problem, gpu: Gpu) -> float:
    """Half the time that the visible products take at the kernel's tensor peak, or the inputs at the memory's rate."""
    if spec.kernel not in PRODUCTS:
        return 0.0
    of_d, of_dv = PRODUCTS[spec.kernel]
    columns = of_d * problem.d + of_dv * problem.value_dim
    flops = 2.0 * columns * problem.B * problem.Hq * problem.visible_pairs()
    rows = problem.B * problem.kv_heads * problem.keys * (min(problem.Nq, problem.keys) > 0)
    input_bytes = 2 * 2.0 * rows * problem.d  # K and V, read once
    peak = gpu.wgmma_tflops if spec.kernel in HOPPER else gpu.peak_tflops
    return FLOOR_SHARE * max(flops / (peak * 1e12), input_bytes / (gpu.hbm_gbs * 1e9))


def launcher(
    engine: Engine, binary: Binary, problem: Problem, tensors: dict[str, Tensor], clear: Callable[[Tensor], None],
    extras: Extras = NOTHING,
) -> Callable[[], None]:  # fmt: skip
    """One launch of `binary` on tensors that are there already, its arguments packed once.

    `tensors`, which the caller keeps alive, has those of the kernel's signature but dQ_acc, which depends on the tile;
    clearing that is part of the launch, as it is of a backward pass.
    """
    spec, sizes = binary.spec, sizes_of(problem)
    accumulator = None
    if spec.kernel in CONVERTS.values():
        accumulator = engine.zeros((dq_accumulator_floats(spec, sizes),), "float32")
        tensors = {**tensors, "dQ_acc": accumulator}
    args = pack(spec, tensors, sizes, problem.softmax_scale, extras, engine=engine)
    kernel, blocks = engine.load(binary), blocks_of(spec, sizes, engine.sms)

    def launch() -> None:
        if accumulator is not None:
            clear(accumulator)
        engine.launch(kernel, grid=blocks, block=spec.threads, smem=binary.smem_bytes, args=args)

    return launch
