"""Give a candidate its time: predicted from its machine code, or measured on the GPU. One search has one kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from .workers import Pool, Task

WORKERS = 2  # processes that compile, where one worker searches
PRUNED = "Pruned"  # the class of failure of a tile that the model turned down

Time: TypeAlias = "Prediction | Timing"
Prepared: TypeAlias = "tuple[Binary | str, Prediction | None]"  # the code or why there is none; its predicted time


@dataclass(frozen=True, slots=True)
class Candidate:
    """One tile that was tried, and what became of it."""

    tile: Tile
    time: Time | None
    failure: str = ""  # the class of failure and its message, if there is no time

    @property
    def pruned(self) -> bool:
        """Whether the model turned the tile down, and nothing is wrong with it."""
        return self.failure.startswith(f"{PRUNED}: ")


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

    def __init__(self, kernel: KernelName, problem: Problem, gpu: Gpu, *, processes: int = WORKERS) -> None:
        self._pool = Pool(processes)
        self._asked = (kernel, problem, gpu)

    def submit(self, tile: Tile) -> Pending:
        return _Predicting(tile, self._pool.submit(evaluate, *self._asked, tile))

    def final(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        return by_time(candidates)

    def close(self) -> None:
        self._pool.close()


@dataclass(frozen=True, slots=True)
class _Predicting:
    """A candidate that is being compiled and timed by the model."""

    tile: Tile
    task: Task[Candidate]

    def result(self) -> Candidate:
        try:
            return self.task.result()
        except Rejected as error:
            return Candidate(self.tile, None, str(error))


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
    """Times of the GPU: workers compile ahead, one process measures, the best few meet again at the end.

    With `judge`, the model times each candidate first: `judge` hears of that prediction and says why it is not worth
    the GPU's time, or "". The default tile is always measured.
    """

    def __init__(
        self, kernel: KernelName, problem: Problem, gpu: Gpu, measurer: Asked, *, pool: Pool | None = None,
        processes: int = WORKERS, builder: Callable[[KernelSpec], Binary | str] = build_or_say,
        judge: Callable[[Candidate], str] | None = None,
    ) -> None:  # fmt: skip
        self._kernel, self._problem, self._gpu = kernel, problem, gpu
        self._measurer, self._builder, self._judge = measurer, builder, judge
        self._pool = pool or Pool(processes)
        self._default = default_tile(kernel, problem, gpu)
        self._built: dict[Tile, Binary] = {}

    def submit(self, tile: Tile) -> Pending:
        spec, expect = self._spec(tile), self._judge is not None
        return _Later(self, tile, self._pool.submit(prepare, self._builder, spec, self._problem, self._gpu, expect))

    def measured(self, tile: Tile, prepared: Prepared) -> Candidate:
        """Try a tile whose compilation has ended."""
        built, expected = prepared
        if isinstance(built, str):
            return Candidate(tile, None, built)
        if self._judge and expected is not None:
            reason = self._judge(Candidate(tile, expected))
            if reason and tile != self._default:
                return Candidate(tile, None, f"{PRUNED}: {reason}")
        try:
            timing = self._measurer.ask(Try(built))
        except Rejected as error:
            return Candidate(tile, None, str(error))
        self._built[tile] = built
        return Candidate(tile, timing)

    def final(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The best five and the default meet again, interleaved."""
        best = by_time(candidates)
        entries = best[:FINALISTS] + [c for c in best[FINALISTS:] if c.tile == self._default]
        standings = rematch([c.tile for c in entries], self._again)
        by = {c.tile: c.time.by for c in entries if c.time is not None}
        return [self._finished(standing, by[standing.entry]) for standing in standings]

    def _finished(self, standing: Standing[Tile], by: str) -> Candidate:
        """A finalist with the time of the rematch, or with the reason for which it fell out."""
        tile = standing.entry
        if standing.failure:
            return Candidate(tile, None, standing.failure)
        try:
            of_all = timing_of(self._spec(tile), self._problem, self._gpu, standing.samples, by=by)
        except ImpossibleTime as error:
            return Candidate(tile, None, f"{type(error).__name__}: {error}")
        tflops = of_all.tflops * of_all.seconds / standing.seconds
        return Candidate(tile, replace(of_all, seconds=standing.seconds, tflops=tflops))

    def close(self) -> None:
        try:
            self._measurer.close()
        finally:
            self._pool.close()

    def _again(self, tile: Tile, count: int) -> list[float]:
        if tile not in self._built:  # measured by another worker, or by an earlier run
            built = self._builder(self._spec(tile))
            if isinstance(built, str):
                raise Rejected(built)
            self._built[tile] = built
        return list(self._measurer.ask(Again(self._built[tile], count)))

    def _spec(self, tile: Tile) -> KernelSpec:
        return KernelSpec.of(self._kernel, self._problem, tile, self._gpu.sm)


def prepare(
    builder: Callable[[KernelSpec], Binary | str], spec: KernelSpec, problem: Problem, gpu: Gpu, expect: bool
) -> Prepared:
    """Compile a tile and, if `expect`, predict its time; no time if the model does not know the code."""
    built = builder(spec)
    if isinstance(built, str) or not expect:
        return built, None
    try:
        return built, predict(built, problem, gpu)
    except SassError:
        return built, None


@dataclass(frozen=True, slots=True)
class _Later:
    """A candidate that is being compiled; whoever waits for it measures it."""

    objective: Measured
    tile: Tile
    task: Task[Prepared]

    def result(self) -> Candidate:
        try:
            prepared = self.task.result()
        except Rejected as error:
            return Candidate(self.tile, None, str(error))
        return self.objective.measured(self.tile, prepared)


def by_time(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that have a time, fastest first."""
    return sorted((c for c in candidates if c.time is not None), key=_seconds)


def _seconds(candidate: Candidate) -> float:
    return float("inf") if candidate.time is None else candidate.time.seconds
