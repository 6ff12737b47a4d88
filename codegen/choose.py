"""Choose the best tile for a kernel: Problem + Gpu -> Winner."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial

from .errors import NothingFound
from .objective import WORKERS, Candidate, Objective, Pending, Predicted, Time
from .predict import Prediction
from .propose import Proposer
from .spec.defaults import default_tile
from .spec.gpu import Gpu
from .spec.kernel import KernelName, KernelSpec
from .spec.problem import Problem
from .spec.tile import Tile
from .study import Claim, Study, open_study

AHEAD = 2 * WORKERS  # tiles asked for before the oldest is told; fixed, so that the seed alone fixes the search
WIDE = 128  # head dimension above which a kernel is to spill no register at all, not only none in a loop
ALIKE = 10  # failures in a row, of one kind and with nothing valid before them, that end a search


@dataclass(frozen=True, slots=True, kw_only=True)
class Winner:
    """The outcome of a search."""

    spec: KernelSpec
    time: Time
    default: Time | None  # of the default tile
    candidates: tuple[Candidate, ...] = field(repr=False)  # in the order of their trials, those of earlier runs too
    rejected: tuple[str, ...] = ()  # faster tiles that were not taken, and why
    study: str = ""  # its name
    reused: int = 0  # candidates that were there when this search began

    @property
    def saved(self) -> int:
        """Candidates that the model turned down, so that the GPU was not asked."""
        return sum(candidate.pruned for candidate in self.candidates)


def choose(
    kernel: KernelName,
    problem: Problem,
    gpu: Gpu,
    *,
    trials: int,
    seed: int = 0,
    first: Sequence[Tile] = (),
    measured: bool = False,
    study: Study | None = None,
    objective: Callable[[], Objective] | None = None,
    ahead: int = AHEAD,
    verify: Callable[[KernelSpec], str] = lambda spec: "",
    progress: Callable[[Candidate], None] = lambda candidate: None,
) -> Winner:
    """The fastest tile of `kernel` among at most `trials` different legal ones, by the times of `objective`.

    What `study` knows already is not tried again, and counts; without one, the search leaves nothing behind. Times are
    predicted unless `objective` makes others; with `measured` these are a GPU's, which tells tiles apart that a
    prediction does not. `first` are tiles to try early. `verify` says why a kernel is wrong, or "": the fastest that it
    accepts wins. Raises NothingFound, early if every candidate fails alike; StorageLost.
    """
    with ExitStack() as held:
        if study is None:
            study = held.enter_context(open_study(None, kernel, problem, gpu, "measured" if measured else "predicted"))
        reused = len(study.book.candidates)
        timed = held.enter_context(closing(objective() if objective else Predicted(kernel, problem, gpu)))
        propose = Proposer(kernel, problem, gpu, seed=seed, first=first, measured=measured)
        search(study, propose, timed, trials=trials, ahead=ahead, progress=progress)
        candidates, ranked = study.book.candidates, study.ranking()
        if ranked is None:
            ranked = timed.final(candidates)
            of_trial = {candidate.tile: candidate for candidate in candidates}
            if any(of_trial[candidate.tile] != candidate for candidate in ranked):  # new times, and they cost something
                study.keep_ranking(ranked)
        winner = _best(kernel, problem, gpu, candidates, ranked, verify)
        winner = replace(winner, study=study.name, reused=reused)
        if winner.saved:
            study.note("saved", winner.saved)
        return winner


def search(
    study: Study,
    propose: Proposer,
    timed: Objective,
    *,
    trials: int,
    ahead: int = AHEAD,
    progress: Callable[[Candidate], None] = lambda candidate: None,
) -> None:
    """One worker's part of a search: try tiles until `trials` of them are finished, by whomever, or none is left.

    Ends early if nothing is valid and all that was found since it began fails alike. `progress` hears of every
    candidate once, those found earlier first.
    """
    pending: deque[tuple[Claim, Pending]] = deque()
    before = {candidate.tile for candidate in study.book.candidates}
    heard: set[Tile] = set()
    while True:
        candidates = study.book.candidates
        for candidate in candidates:
            if candidate.tile not in heard:
                heard.add(candidate.tile)
                progress(candidate)
        if _hopeless(candidates, before):
            return
        claim = study.ask(trials, propose) if len(pending) < ahead else None
        if claim:
            pending.append((claim, timed.submit(claim.tile)))
        elif pending:
            claim, later = pending.popleft()  # the oldest, whichever is ready first: the order of telling is fixed
            study.tell(claim, later.result())
        elif study.book.settled(trials):
            return
        else:
            study.wait()


def _hopeless(candidates: Sequence[Candidate], before: Collection[Tile]) -> bool:
    """Whether nothing was valid and the last failures are one and the same but for names and numbers.

    Those of earlier runs are left out: whatever it was may have been mended.
    """
    new = [c.failure for c in candidates if c.tile not in before]
    if len(new) < ALIKE or any(c.time is not None for c in candidates):
        return False
    return len({re.sub(r"\S*\d\S*", "#", failure) for failure in new[-ALIKE:]}) == 1


def _best(
    kernel: KernelName,
    problem: Problem,
    gpu: Gpu,
    candidates: Sequence[Candidate],
    ranked: Sequence[Candidate],
    verify: Callable[[KernelSpec], str],
) -> Winner:
    """The first of `ranked` that `verify` accepts, of those that do not spill (see _spills) if there is one.

    Raises NothingFound with counts and the first message of each.
    """
    times = {c.tile: c.time for c in (*candidates, *ranked)}
    spills = partial(_spills, d=problem.d)
    rejected: list[str] = []
    for candidate in sorted(ranked, key=spills):
        spec = KernelSpec.of(kernel, problem, candidate.tile, gpu.sm)
        reason = candidate.failure if candidate.time is None else verify(spec)
        if candidate.time is not None and not reason:
            if not spills(candidate):
                faster = [c.tile for c in ranked[: ranked.index(candidate)] if spills(c)]
                keys = [KernelSpec.of(kernel, problem, tile, gpu.sm).key for tile in faster]
                rejected += [f"{key}: spills registers, at a price that is not well predicted" for key in keys]
            return Winner(
                spec=spec, time=candidate.time, default=times.get(default_tile(kernel, problem, gpu)),
                candidates=tuple(candidates), rejected=tuple(rejected),
            )  # fmt: skip
        rejected.append(f"{spec.key}: {reason}")
    raise NothingFound(
        f"no {kernel} kernel for {problem.text} on {gpu.key} among {len(candidates)} candidates:\n"
        + "\n".join([*_failures(candidates), *rejected])
    )


def _spills(candidate: Candidate, d: int) -> bool:
    """Whether a loop is predicted to move registers to and from memory; what was measured has paid for it.

    A few moves before and after it cost nothing; but a head wider than WIDE is at the limit of the registers.
    """
    time = candidate.time
    return isinstance(time, Prediction) and (time.spills_in_loop > 0 or (d > WIDE and time.spill_bytes > 0))


def _failures(candidates: Sequence[Candidate]) -> list[str]:
    """How many candidates failed in each class, and the first message of each in full."""
    classes = [c.failure.partition(":")[0] for c in candidates if c.failure]
    firsts: dict[str, str] = {}
    for candidate in candidates:
        firsts.setdefault(candidate.failure.partition(":")[0], candidate.failure)
    return [f"{count} x {firsts[name]}" for name, count in Counter(classes).most_common()]
