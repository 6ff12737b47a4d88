"""Give a candidate its time: predicted from its machine code, or measured on the GPU. One search has one kind."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from .compile import Binary, compile_source
from .errors import CompileError, ImpossibleTime, Rejected, RenderError
from .measure import Again, Timing, Try, timing_of
from .measuring.rematch import FINALISTS, Standing, rematch
from .predict import Prediction, predict
from .render import render
from .sass import SassError
from .spec.defaults import default_tile
from .spec.gpu import Gpu
from .spec.kernel import KernelName, KernelSpec
from .spec.problem import Problem
from .spec.tile import Tile

WORKERS = 2

Time: TypeAlias = "Prediction | Timing"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One tile that was tried, and what became of it."""

    tile: Tile
    time: Time | None
    failure: str = ""  # the class of failure and its message, if there is no time


class Pending(Protocol):
    """A candidate whose time is on its way."""

    def result(self) -> Candidate:
        """Wait for it."""
        ...


class Objective(Protocol):
    """Where times come from."""

    def submit(self, tile: Tile) -> Pending:
        """Begin to try a tile."""
        ...

    def final(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those that may win, best first; then those that fell out at the end."""
        ...

    def close(self) -> None:
        """Stop what is under way and end the processes."""
        ...


class Predicted:
    """Times of the issue model, in worker processes; the same whenever they are asked for."""

    def __init__(self, kernel: KernelName, problem: Problem, gpu: Gpu) -> None:
        self._asked = (kernel, problem, gpu)
        self._pool = _workers()

    def submit(self, tile: Tile) -> Pending:
        return self._pool.submit(evaluate, *self._asked, tile)

    def final(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        return _by_time(candidates)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def evaluate(kernel: KernelName, problem: Problem, gpu: Gpu, tile: Tile) -> Candidate:
    """Compile one tile and predict its time. What can be wrong with a candidate is data; anything else is raised."""
    try:
        return Candidate(tile, predict(build(KernelSpec.of(kernel, problem, tile, gpu.sm)), problem, gpu))
    except (RenderError, CompileError, SassError) as error:
        return Candidate(tile, None, f"{type(error).__name__}: {error}")


def build(spec: KernelSpec) -> Binary:
    """The machine code of a candidate."""
    return compile_source(render(spec))


def build_or_say(spec: KernelSpec) -> Binary | str:
    """The machine code, or the class and message of what is wrong with the candidate."""
    try:
        return build(spec)
    except (RenderError, CompileError) as error:
        return f"{type(error).__name__}: {error}"


class Asked(Protocol):
    """A measuring process as the objective sees it; see measuring.Measurer."""

    def ask(self, request: object) -> Any:
        """The answer. Raises Rejected."""
        ...

    def close(self) -> None:
        """End the process."""
        ...


class Measured:
    """Times of the GPU: workers compile ahead, one process measures, the best few meet again at the end."""

    def __init__(
        self, kernel: KernelName, problem: Problem, gpu: Gpu, measurer: Asked, *,
        pool: Executor | None = None, builder: Callable[[KernelSpec], Binary | str] = build_or_say,
    ) -> None:  # fmt: skip
        self._kernel, self._problem, self._gpu = kernel, problem, gpu
        self._measurer = measurer
        self._pool, self._builder = pool or _workers(), builder
        self._built: dict[Tile, Binary] = {}

    def submit(self, tile: Tile) -> Pending:
        spec = KernelSpec.of(self._kernel, self._problem, tile, self._gpu.sm)
        return _Later(self, tile, self._pool.submit(self._builder, spec))

    def measured(self, tile: Tile, built: Binary | str) -> Candidate:
        """Try a tile whose compilation has ended."""
        if isinstance(built, str):
            return Candidate(tile, None, built)
        try:
            timing = self._measurer.ask(Try(built))
        except Rejected as error:
            return Candidate(tile, None, str(error))
        self._built[tile] = built
        return Candidate(tile, timing)

    def final(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The best five and the default meet again, interleaved."""
        best = _by_time(candidates)
        default = default_tile(self._kernel, self._problem, self._gpu)
        entries = best[:FINALISTS] + [c for c in best[FINALISTS:] if c.tile == default]
        standings = rematch([c.tile for c in entries], self._again)
        by = {c.tile: c.time.by for c in entries if c.time is not None}
        return [self._finished(standing, by[standing.entry]) for standing in standings]

    def _finished(self, standing: Standing[Tile], by: str) -> Candidate:
        """A finalist with the time of the rematch, or with the reason for which it fell out."""
        tile = standing.entry
        if standing.failure:
            return Candidate(tile, None, standing.failure)
        spec = KernelSpec.of(self._kernel, self._problem, tile, self._gpu.sm)
        try:
            of_all = timing_of(spec, self._problem, self._gpu, standing.samples, by=by)
        except ImpossibleTime as error:
            return Candidate(tile, None, f"{type(error).__name__}: {error}")
        tflops = of_all.tflops * of_all.seconds / standing.seconds
        return Candidate(tile, replace(of_all, seconds=standing.seconds, tflops=tflops))

    def close(self) -> None:
        try:
            self._measurer.close()
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _again(self, tile: Tile, count: int) -> list[float]:
        return list(self._measurer.ask(Again(self._built[tile], count)))


@dataclass(frozen=True, slots=True)
class _Later:
    """A candidate that is being compiled; whoever waits for it measures it."""

    objective: Measured
    tile: Tile
    built: Any  # Future[Binary | str]

    def result(self) -> Candidate:
        return self.objective.measured(self.tile, self.built.result())


def _by_time(candidates: Sequence[Candidate]) -> list[Candidate]:
    return sorted((c for c in candidates if c.time is not None), key=_seconds)


def _seconds(candidate: Candidate) -> float:
    return float("inf") if candidate.time is None else candidate.time.seconds


def _workers() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(WORKERS, mp_context=multiprocessing.get_context("spawn"))
