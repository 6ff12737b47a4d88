"""Choose the best tile for a kernel: Problem + Gpu -> Winner. The only file that imports Optuna."""

from __future__ import annotations

import random
import re
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from .errors import NothingFound
from .objective import WORKERS, Candidate, Objective, Pending, Predicted, Time
from .spec.defaults import default_tile, published_tiles
from .spec.gpu import Gpu
from .spec.kernel import KernelName, KernelSpec
from .spec.limits import why_illegal
from .spec.problem import Problem
from .spec.space import choices, legal_tiles, tile_of
from .spec.tile import Tile

if TYPE_CHECKING:
    import optuna

AHEAD = 2 * WORKERS  # trials asked for before the oldest is told; fixed, so that the seed alone fixes the search
REPEATS = 20  # suggestions in a row that bring nothing new, after which a neighbour of the best tile is taken
STARTUP = 10  # trials before TPE models anything
ALIKE = 10  # failures in a row, of one kind and with nothing valid before them, that end a search


@dataclass(frozen=True, slots=True, kw_only=True)
class Winner:
    """The outcome of a search."""

    spec: KernelSpec
    time: Time
    default: Time | None  # of the default tile
    candidates: tuple[Candidate, ...] = field(repr=False)
    rejected: tuple[str, ...] = ()  # faster tiles that failed the last check, and why


def choose(
    kernel: KernelName,
    problem: Problem,
    gpu: Gpu,
    *,
    trials: int,
    seed: int = 0,
    first: Sequence[Tile] = (),
    objective: Callable[[], Objective] | None = None,
    verify: Callable[[KernelSpec], str] = lambda spec: "",
    progress: Callable[[Candidate], None] = lambda candidate: None,
) -> Winner:
    """The fastest tile of `kernel` among at most `trials` different legal ones, by the times of `objective`.

    The default tile comes first, without and with spills, then those of `first`, then the published ones, then what TPE
    suggests, or a neighbour of the best where TPE repeats itself. Illegal tiles and repeats cost no trial. Times are
    predicted unless `objective` makes others. `verify` says why a kernel is wrong, or "": the fastest that it accepts
    wins. Raises NothingFound, early if every candidate fails alike.
    """
    search = _Search(kernel, problem, gpu, trials, seed, first)
    candidates: list[Candidate] = []
    with closing(objective() if objective else Predicted(kernel, problem, gpu)) as timed:
        pending: deque[tuple[optuna.Trial, Pending]] = deque()
        asked = search.ask()
        while (asked or pending) and not _hopeless(candidates):
            if asked:
                trial, tile = asked
                pending.append((trial, timed.submit(tile)))
            if not asked or len(pending) == AHEAD:
                trial, later = pending.popleft()  # the oldest, whichever is ready first: the order of telling is fixed
                candidates.append(later.result())
                search.tell(trial, candidates[-1])
                progress(candidates[-1])
            asked = search.ask()
        ranked = timed.final(candidates)
    return _best(kernel, problem, gpu, candidates, ranked, verify)


def _hopeless(candidates: Sequence[Candidate]) -> bool:
    """Whether nothing was valid and the last failures are one and the same but for names and numbers."""
    if len(candidates) < ALIKE or any(c.time is not None for c in candidates):
        return False
    return len({re.sub(r"\S*\d\S*", "#", c.failure) for c in candidates[-ALIKE:]}) == 1


class _Search:
    """Optuna's study over the legal tiles of one kernel: each is given out once."""

    def __init__(
        self, kernel: KernelName, problem: Problem, gpu: Gpu, trials: int, seed: int, first: Sequence[Tile] = ()
    ) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True, n_startup_trials=STARTUP)
        self._study = optuna.create_study(direction="minimize", sampler=sampler)
        self._kernel, self._problem, self._gpu = kernel, problem, gpu
        self._left = trials
        self._best: tuple[float, Tile] | None = None
        default = default_tile(kernel, problem, gpu)
        self._choices = choices(kernel, problem, gpu)
        self._untried = list(legal_tiles(kernel, problem, gpu))
        random.Random(seed).shuffle(self._untried)
        bold = default_tile(kernel, problem, gpu, spilling=True)
        for tile in (default, bold, *first, *published_tiles(kernel, problem, gpu)):
            if tile in self._untried:
                self._enqueue(tile)

    def ask(self) -> tuple[optuna.Trial, Tile] | None:
        """A legal tile that was not given out before; None when the trials or the space are used up."""
        from optuna.trial import TrialState

        repeats = 0
        while self._left and self._untried:
            trial = self._study.ask()
            tile = self._suggest(trial)
            if tile in self._untried:
                self._untried.remove(tile)
                self._left -= 1
                return trial, tile
            # TPE does not look at failed trials; from what is pruned, the illegal, it learns to stay away.
            legal = not why_illegal(self._spec(tile), self._gpu)
            self._study.tell(trial, state=TrialState.FAIL if legal else TrialState.PRUNED)
            repeats += 1
            if repeats == REPEATS:
                self._enqueue(self._neighbour())
        return None

    def tell(self, trial: optuna.Trial, candidate: Candidate) -> None:
        """The seconds of a tile that was given out."""
        from optuna.trial import TrialState

        if candidate.time is None:
            self._study.tell(trial, state=TrialState.PRUNED)
        else:
            self._study.tell(trial, candidate.time.seconds)
            if self._best is None or candidate.time.seconds < self._best[0]:
                self._best = candidate.time.seconds, candidate.tile

    def _suggest(self, trial: optuna.Trial) -> Tile:
        values: dict[str, Any] = {}
        for name, allowed in self._choices.items():
            step = allowed[1] - allowed[0] if len(allowed) > 1 else 1
            if list(allowed) == list(range(allowed[0], allowed[-1] + 1, step)):
                values[name] = trial.suggest_int(name, allowed[0], allowed[-1], step=step)
            else:
                values[name] = int(trial.suggest_categorical(name, list(allowed)))
        return tile_of(self._kernel, values)

    def _neighbour(self) -> Tile:
        """Of the tiles not tried yet, one that differs from the best in the fewest fields."""
        best = asdict(self._best[1] if self._best else self._untried[0])
        return min(self._untried, key=lambda tile: sum(best[name] != value for name, value in asdict(tile).items()))

    def _enqueue(self, tile: Tile) -> None:
        self._study.enqueue_trial({name: int(value) for name, value in asdict(tile).items()}, skip_if_exists=True)

    def _spec(self, tile: Tile) -> KernelSpec:
        return KernelSpec.of(self._kernel, self._problem, tile, self._gpu.sm)


def _best(
    kernel: KernelName,
    problem: Problem,
    gpu: Gpu,
    candidates: Sequence[Candidate],
    ranked: Sequence[Candidate],
    verify: Callable[[KernelSpec], str],
) -> Winner:
    """The first of `ranked` that `verify` accepts. Raises NothingFound with counts and the first message of each."""
    times = {c.tile: c.time for c in (*candidates, *ranked)}
    rejected: list[str] = []
    for candidate in ranked:
        spec = KernelSpec.of(kernel, problem, candidate.tile, gpu.sm)
        reason = candidate.failure if candidate.time is None else verify(spec)
        if candidate.time is not None and not reason:
            return Winner(
                spec=spec, time=candidate.time, default=times.get(default_tile(kernel, problem, gpu)),
                candidates=tuple(candidates), rejected=tuple(rejected),
            )  # fmt: skip
        rejected.append(f"{spec.key}: {reason}")
    raise NothingFound(
        f"no {kernel} kernel for {problem.text} on {gpu.key} among {len(candidates)} candidates:\n"
        + "\n".join([*_failures(candidates), *rejected])
    )


def _failures(candidates: Sequence[Candidate]) -> list[str]:
    """How many candidates failed in each class, and the first message of each in full."""
    classes = [c.failure.partition(":")[0] for c in candidates if c.failure]
    firsts: dict[str, str] = {}
    for candidate in candidates:
        firsts.setdefault(candidate.failure.partition(":")[0], candidate.failure)
    return [f"{count} x {firsts[name]}" for name, count in Counter(classes).most_common()]
