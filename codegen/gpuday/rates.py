"""Run the microbenchmarks on a device and say what each took."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from ..compile import compile_text, options_for
from ..engines.driver import Driver, Handle
from ..sass import DisassemblerMissing, SassError, disassemble
from .benchmarks import (
    SMEM_BYTES,
    STAMPS,
    SUB_PARTITIONS,
    WARPS,
    WINDOW_BYTES,
    Benchmark,
    Kernel,
    benchmarks,
    kernels,
    text,
    unrolled,
)

LAUNCHES = 5  # timed of each, after one that warms caches
CLOCK = "tensor_16_0"  # what the clock is read under
CLOCK_S = 0.25  # of a launch, about
CLOCK_LAUNCHES = 8  # the last one is read: two seconds warm the chip and let its clock settle
CLOCK_GUESS_HZ = 2e9
FINITE_BF16 = 0x3FFF3FFF  # bits of two numbers below 2


class Run(ctypes.Structure):
    """The one argument of every kernel, as the template declares it."""

    _fields_ = (
        ("clocks", ctypes.c_uint64), ("results", ctypes.c_uint64), ("window", ctypes.c_uint64), ("steps", ctypes.c_int),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Lead:
    """How two warps of a sub-partition share its tensor core, from the times that each noted."""

    gap: float  # mean time between their stamps over that between two stamps of one: 0 taking turns; greedy 1/2 or more
    younger_first: float  # share of the sub-partitions in which the warp of the higher number is ahead


def measured_rates(driver: Driver, chosen: Sequence[Benchmark] | None = None) -> Iterator[dict[str, Any]]:
    """One finding a benchmark, of those chosen or of all, then the clock under load.

    A kernel whose loop is not what it should be has its fault instead of a time; loops are looked at where nvdisasm is.
    """
    with driver.current():
        bench = _Bench(driver)
        yield from (bench.finding(b) for b in (benchmarks(driver.sm) if chosen is None else chosen))
        yield from (bench.clock(data) for data in ("zero", "random"))


class _Bench:
    """The compiled kernels and the memory that they share."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.sm, self.sms = driver, driver.sm, driver.sms
        self.cubin, _, _ = compile_text("microbench", text(self.sm), self.sm, options_for(self.sm))
        self.faults = _faults(self.cubin, kernels(self.sm))
        self.functions: dict[str, Handle] = {}
        warps, memory = self.sms * WARPS, driver.memory
        self.clocks = torch.zeros(max(2 * warps, WARPS * STAMPS), dtype=torch.int64, device=memory)
        self.results = torch.zeros(32 * warps, dtype=torch.float32, device=memory)
        self.window = torch.zeros(WINDOW_BYTES * warps // 4, dtype=torch.int32, device=memory)

    def finding(self, benchmark: Benchmark) -> dict[str, Any]:
        """Cycles of a step, the median over the launches, and the rate that they stand for."""
        kernel = benchmark.kernel
        blocks = self.sms if benchmark.everywhere else 1
        found = {"benchmark": kernel.name, "warps": benchmark.warps, "sms": blocks, "unit": benchmark.unit}
        if kernel.name in self.faults:
            return {**found, "failure": self.faults[kernel.name]}
        if kernel.function == "policy":
            stamps = self._stamps(benchmark)
            lead = lead_of(stamps)
            return {**found, **_cycles(benchmark, [max(map(max, stamps))]), **asdict(lead), "stamps": stamps}
        self._launch(kernel, blocks, benchmark.warps, benchmark.steps)
        times = []
        for _ in range(LAUNCHES):
            self._launch(kernel, blocks, benchmark.warps, benchmark.steps)
            times.append(max(self._pairs(blocks * benchmark.warps))[0])
        return {**found, **_cycles(benchmark, times)}

    def clock(self, data: str) -> dict[str, Any]:
        """GHz while every SM multiplies: cycles over nanoseconds of the same loop, on zeros or on random numbers."""
        benchmark = next(b for b in benchmarks(self.sm) if b.kernel.name == CLOCK and b.warps == WARPS)
        found: dict[str, Any] = {"benchmark": "clock", "warps": WARPS, "sms": self.sms, "unit": "GHz", "data": data}
        if CLOCK in self.faults:
            return {**found, "failure": self.faults[CLOCK]}
        step = self.finding(benchmark)["cycles"]
        if data == "random":
            self.window.random_(0, 2**31 - 1).bitwise_and_(FINITE_BF16)
        for _ in range(CLOCK_LAUNCHES):
            self._launch(benchmark.kernel, self.sms, WARPS, int(CLOCK_S * CLOCK_GUESS_HZ / step), wait=False)
        self.driver.synchronize()
        self.window.zero_()
        pairs = self._pairs(self.sms * WARPS)
        cycles, nanoseconds = (sum(column) for column in zip(*pairs, strict=True))
        return {**found, "rate": cycles / nanoseconds, "seconds": nanoseconds / len(pairs) / 1e9}

    def _launch(self, kernel: Kernel, blocks: int, warps: int, steps: int, *, wait: bool = True) -> None:
        driver = self.driver
        if kernel.name not in self.functions:
            self.functions[kernel.name] = driver.load(self.cubin, kernel.name)
        self.clocks.zero_()
        run = Run(self.clocks.data_ptr(), self.results.data_ptr(), self.window.data_ptr(), steps)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(run))
        place = ctypes.addressof(parameters)
        driver.launch(
            self.functions[kernel.name], blocks, 32 * warps, warps * SMEM_BYTES, driver.stream(), place
        )  # fmt: skip
        if wait:
            driver.synchronize()

    def _pairs(self, warps: int) -> list[tuple[int, int]]:
        """Cycles and nanoseconds of each warp that worked."""
        pairs = self.clocks[: 2 * warps].view(warps, 2).tolist()
        return [(cycles, nanoseconds) for cycles, nanoseconds in pairs if cycles]

    def _stamps(self, benchmark: Benchmark) -> list[list[int]]:
        """[warps][steps]: the times that `policy` noted, of its second launch."""
        for _ in range(2):
            self._launch(benchmark.kernel, 1, benchmark.warps, STAMPS)
        found: list[list[int]] = self.clocks[: benchmark.warps * STAMPS].view(benchmark.warps, STAMPS).tolist()
        return found


def lead_of(stamps: list[list[int]]) -> Lead:
    """From the stamps of eight warps: warp w and w + 4 share a sub-partition.

    >>> turns, ahead, behind = [20, 40, 60], [10, 30, 50], [20, 40, 60]
    >>> lead_of([turns] * 8).gap, lead_of([behind] * 4 + [ahead] * 4)
    (0.0, Lead(gap=0.5, younger_first=1.0))
    """
    gaps, younger_first = [], 0
    for older, younger in zip(stamps[:SUB_PARTITIONS], stamps[SUB_PARTITIONS:], strict=True):
        period = max(older[-1], younger[-1]) / len(older)
        gaps.append(sum(abs(a - b) for a, b in zip(older, younger, strict=True)) / len(older) / period)
        younger_first += sum(younger) < sum(older)
    return Lead(sum(gaps) / len(gaps), younger_first / SUB_PARTITIONS)


def _cycles(benchmark: Benchmark, times: list[int]) -> dict[str, Any]:
    steps = sorted(time / benchmark.steps for time in times)
    middle = median(steps)
    return {"cycles": middle, "least": steps[0], "most": steps[-1], "rate": benchmark.rate(middle)}


def _faults(cubin: bytes, named: tuple[Kernel, ...]) -> dict[str, str]:
    """What is wrong with the loop of each kernel that has something wrong; nothing where there is no nvdisasm."""
    try:
        functions = disassemble(cubin).functions
    except DisassemblerMissing:
        return {}
    faults = {}
    for kernel in named:
        try:
            unrolled(kernel, functions[kernel.name])
        except (ValueError, SassError) as error:
            faults[kernel.name] = str(error)
    return faults
