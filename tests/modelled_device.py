"""A device whose clocks are those of the issue model: what a GPU of given constants would tell the microbenchmarks."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from flashsmith.gpuday.benchmarks import STAMPS, SUB_PARTITIONS, Kernel, kernels, timed_loop, unrolled
from flashsmith.gpuday.rates import Run
from flashsmith.sass import Board, Function, disassemble
from flashsmith.sass.issue import simulate
from flashsmith.sass.plan import Step, plan_steps

FAR = 1e6  # cycles: warps that start so late disturb nobody
LONG = 800  # instructions: so many of each warp show the steady state
FUNCTIONS: dict[bytes, dict[str, Function]] = {}  # of a cubin: listing one takes longer than all else here


@dataclass
class ModelledDevice:
    """A Driver. It runs nothing: a launch writes the clocks of the issue model where the kernel would."""

    board: Board
    index: int = 0
    memory: torch.device = field(default_factory=lambda: torch.device("cpu"))
    launches: int = 0
    _named: dict[str, tuple[Kernel, Function]] = field(default_factory=dict)
    _order: list[str] = field(default_factory=list)
    _known: dict[tuple[str, int], float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.board.name

    @property
    def sm(self) -> int:
        return self.board.sm

    @property
    def sms(self) -> int:
        return self.board.sms

    @contextmanager
    def current(self) -> Iterator[None]:
        yield

    def stream(self) -> int:
        return 0

    def capturing(self) -> bool:
        return False

    def allow_smem(self, function: int, smem_bytes: int) -> None:
        raise AssertionError("no benchmark needs more shared memory than a block has")

    def synchronize(self) -> None:
        """Nothing is under way."""

    def load(self, cubin: bytes, name: str) -> int:
        if cubin not in FUNCTIONS:
            FUNCTIONS[cubin] = disassemble(cubin).functions
        kernel = next(k for k in kernels(self.sm) if k.name == name)
        self._named[name] = kernel, FUNCTIONS[cubin][name]
        self._order.append(name)
        return len(self._order) - 1

    def launch(self, function: int, grid: int, block: int, smem: int, stream: int, parameters: int) -> None:
        run = Run.from_address(ctypes.c_uint64.from_address(parameters).value)
        name, warps = self._order[function], block // 32
        kernel, listed = self._named[name]
        self.launches += 1
        if kernel.function == "policy":
            starts = simulate(self._steps(listed), STAMPS + 1, warps, [0.0], self.board)
            stamps = [round(time) for warp in starts for time in warp[1:]]
            (ctypes.c_int64 * len(stamps)).from_address(run.clocks)[:] = stamps
            return
        if (name, warps) not in self._known:
            self._known[name, warps] = self._cycles(kernel, listed, warps)
        cycles = self._known[name, warps] * run.steps
        for warp in range(grid * warps):
            if kernel.function != "pipe" or warp % SUB_PARTITIONS < int(kernel.arguments[2]):
                pair = round(cycles), round(cycles / self.board.clock_ghz)
                (ctypes.c_int64 * 2).from_address(run.clocks + 16 * warp)[:] = pair

    def _steps(self, listed: Function) -> list[Step]:
        return plan_steps(timed_loop(listed), self.board)

    def _cycles(self, kernel: Kernel, listed: Function, warps: int) -> float:
        """Of a step: the slope of the time over the trips, so that filling the pipes does not count."""
        steps = self._steps(listed)
        alone = kernel.function == "pipe" and kernel.arguments[2] == 1

        def time(trips: int) -> float:
            if not alone:
                return max(warp[-1] for warp in simulate(steps, trips, warps, [0.0], self.board))
            begins = [FAR * (w % SUB_PARTITIONS) for w in range(warps)]  # blocks of one warp
            return max(warp[-1] for warp in simulate(steps, trips, 1, begins, self.board)[::SUB_PARTITIONS])

        trips = 3 + LONG // len(steps)
        return (time(2 * trips) - time(trips)) / trips / unrolled(kernel, listed)
