"""Choose the best tile for a kernel: Problem + Gpu -> Winner. The only file that imports Optuna."""

from __future__ import annotations

import multiprocessing
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from .compile import compile_source
from .errors import CompileError, NothingFound, RenderError
from .predict import Prediction, predict
from .render import render
from .sass import SassError
from .spec.defaults import default_tile, published_tiles
from .spec.gpu import Gpu
from .spec.kernel import TILE_OF, KernelName, KernelSpec
from .spec.limits import why_illegal
from .spec.problem import Problem
from .spec.tile import Tile

if TYPE_CHECKING:
    import optuna

WORKERS = 2
AHEAD = (
    2 * WORKERS
)  # trials asked for before the oldest is told; a fixed number, so that the seed alone fixes the search
GIVE_UP = 300  # suggestions in a row that bring nothing new: the space is as good as exhausted
STARTUP = 10  # trials before TPE models anything

Choices = Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One tile that was tried, and what became of it."""

    tile: Tile
    prediction: Prediction | None
    failure: str = ""  # the error's class and first line, if there is no prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Winner:
    """The outcome of a search."""

    spec: KernelSpec
    prediction: Prediction
    default: Prediction | None  # of the default tile
    candidates: tuple[Candidate, ...] = field(repr=False)
    rejected: tuple[str, ...] = ()  # tiles predicted faster that failed the check, and why


def choose(
    kernel: KernelName,
    problem: Problem,
    gpu: Gpu,
    *,
    trials: int,
    seed: int = 0,
    verify: Callable[[KernelSpec], str] = lambda spec: "",
    progress: Callable[[Candidate], None] = lambda candidate: None,
) -> Winner:
    """The tile of `kernel` with the least predicted time among at most `trials` different legal tiles.

    The default tile and the published ones are tried first, then what TPE suggests. Illegal tiles and repeats cost no
    trial. `verify` says why a kernel is wrong, or "": the fastest that it accepts wins. Raises NothingFound.
    """
    search = _Search(kernel, problem, gpu, trials, seed)
    candidates: list[Candidate] = []
    with ProcessPoolExecutor(WORKERS, mp_context=multiprocessing.get_context("spawn")) as pool:
        pending: deque[tuple[optuna.Trial, Future[Candidate]]] = deque()
        asked = search.ask()
        while asked or pending:
            if asked:
                trial, tile = asked
                pending.append((trial, pool.submit(evaluate, kernel, problem, gpu, tile)))
            if not asked or len(pending) == AHEAD:
                trial, future = pending.popleft()  # the oldest, whichever is ready first: the order of telling is fixed
                candidates.append(future.result())
                search.tell(trial, candidates[-1])
                progress(candidates[-1])
            asked = search.ask()
    return _best(kernel, problem, gpu, candidates, verify)


def evaluate(kernel: KernelName, problem: Problem, gpu: Gpu, tile: Tile) -> Candidate:
    """Compile one tile and predict its time. What can be wrong with a candidate is data; anything else is raised."""
    try:
        binary = compile_source(render(KernelSpec.of(kernel, problem, tile, gpu.sm)))
        return Candidate(tile, predict(binary, problem, gpu))
    except (RenderError, CompileError, SassError) as error:
        return Candidate(tile, None, f"{type(error).__name__}: {str(error).splitlines()[0]}")


class _Search:
    """Optuna's study over the legal tiles of one kernel: each is given out once."""

    def __init__(self, kernel: KernelName, problem: Problem, gpu: Gpu, trials: int, seed: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True, n_startup_trials=STARTUP)
        self._study = optuna.create_study(direction="minimize", sampler=sampler)
        self._kernel, self._problem, self._gpu = kernel, problem, gpu
        self._left = trials
        self._seen: set[Tile] = set()
        self._choices = choices(kernel, problem)
        default = default_tile(kernel, problem, gpu)
        self._flags = {name for name, value in asdict(default).items() if isinstance(value, bool)}
        for tile in (default, *published_tiles(kernel, problem, gpu)):
            values = {name: int(value) for name, value in asdict(tile).items()}
            if all(values[name] in allowed for name, allowed in self._choices.items()):
                self._study.enqueue_trial(values, skip_if_exists=True)

    def ask(self) -> tuple[optuna.Trial, Tile] | None:
        """A legal tile that was not given out before; None when the trials or the space are used up."""
        from optuna.trial import TrialState

        for _ in range(GIVE_UP if self._left else 0):
            trial = self._study.ask()
            tile = self._suggest(trial)
            if tile in self._seen:
                self._study.tell(trial, state=TrialState.FAIL)  # TPE does not look at failed trials
            elif why_illegal(KernelSpec.of(self._kernel, self._problem, tile, self._gpu.sm), self._gpu):
                self._seen.add(tile)
                self._study.tell(trial, state=TrialState.PRUNED)  # TPE learns to stay away
            else:
                self._seen.add(tile)
                self._left -= 1
                return trial, tile
        return None

    def tell(self, trial: optuna.Trial, candidate: Candidate) -> None:
        """The predicted seconds of a tile that was given out."""
        from optuna.trial import TrialState

        if candidate.prediction is None:
            self._study.tell(trial, state=TrialState.PRUNED)
        else:
            self._study.tell(trial, candidate.prediction.seconds)

    def _suggest(self, trial: optuna.Trial) -> Tile:
        values: dict[str, Any] = {}
        for name, allowed in self._choices.items():
            step = allowed[1] - allowed[0] if len(allowed) > 1 else 1
            if list(allowed) == list(range(allowed[0], allowed[-1] + 1, step)):
                values[name] = trial.suggest_int(name, allowed[0], allowed[-1], step=step)
            else:
                values[name] = int(trial.suggest_categorical(name, list(allowed)))
        for name in values.keys() & self._flags:
            values[name] = bool(values[name])
        return TILE_OF[self._kernel](**values)


def choices(kernel: KernelName, problem: Problem) -> Choices:
    """The values that each field of a kernel's tile may take; limits.why_illegal says which combinations fit."""
    steps = problem.d // 16
    if kernel == "forward":
        return {
            "Br": (64, 128, 192, 256), "Bc": tuple(range(16, 177, 16)), "warps": (4, 8),
            "q_steps": tuple(sorted({0, steps // 2, steps})), "lazy": (0, 1), "min_blocks": (1, 2, 3),
        }  # fmt: skip
    if kernel == "dq":
        return {
            "Br": (32, 64, 128, 256), "Bc": (16, 32, 48, 64, 80, 96, 112, 128), "warps": (4, 8), "slice": (0, 16, 32),
            "stages": (1, 2), "q_regs": (0, 1), "weave": (0, 1), "min_blocks": (1, 2),
        }  # fmt: skip
    return {
        "Br": (32, 64, 128), "Bc": (32, 64, 96, 128), "warps": (4, 8), "row_split": (1, 2, 4), "slice": (0, 16, 32),
        "stages": (1, 2), "v_regs": (0, 1), "weave": (0, 1), "min_blocks": (1, 2),
    }  # fmt: skip


def _best(
    kernel: KernelName,
    problem: Problem,
    gpu: Gpu,
    candidates: list[Candidate],
    verify: Callable[[KernelSpec], str],
) -> Winner:
    timed = {c.tile: c.prediction for c in candidates if c.prediction is not None}
    rejected: list[str] = []
    for tile, prediction in sorted(timed.items(), key=lambda item: item[1].seconds):
        spec = KernelSpec.of(kernel, problem, tile, gpu.sm)
        reason = verify(spec)
        if not reason:
            return Winner(
                spec=spec, prediction=prediction, default=timed.get(default_tile(kernel, problem, gpu)),
                candidates=tuple(candidates), rejected=tuple(rejected),
            )  # fmt: skip
        rejected.append(f"{spec.key}: {reason}")
    failures = Counter(c.failure for c in candidates if c.failure)
    counts = [f"{count} x {failure}" for failure, count in failures.most_common()] + rejected
    raise NothingFound(
        f"no {kernel} kernel for {problem.text} on {gpu.key} among {len(candidates)} candidates:\n" + "\n".join(counts)
    )
