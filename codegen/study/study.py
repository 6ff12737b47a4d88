"""Give the tiles of a search out to its workers, once each, and keep what becomes of them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.exceptions import DuplicatedStudyError, UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from ..errors import StorageLost
from ..objective import Candidate
from ..propose import Known
from ..spec.gpu import Gpu
from ..spec.kernel import KernelName
from ..spec.problem import Problem
from ..spec.space import legal_tiles, tile_of
from ..spec.tile import Tile
from .beats import BEAT_S, GRACE_S, Heart, Watch
from .book import Book, Entry, Fate
from .form import candidate_of, outcome, packed, unpacked
from .name import Kind, study_name
from .owner import this_process
from .storage import open_storage, shown, storage_errors

MEMORY = "memory"  # where a study is that no other worker sees
POLL_S = 0.2  # between two looks of a worker that waits for others
# System attributes of a trial, which dashboards do not show.
OWNER, LIMIT, BEAT = "flashsmith:owner", "flashsmith:limit", "flashsmith:beat"

# How the failure of a trial begins that says nothing of its tile. Other failures are the tile's own.
LOST, STOPPED, YIELDED = "Lost: ", "Stopped: ", "Yielded: "

Propose = Callable[[Sequence[Known], Collection[Tile]], Tile | None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Claim:
    """A tile that a worker holds."""

    trial: int  # the storage's own number of the trial
    tile: Tile


def open_study(
    url: str | None, kernel: KernelName, problem: Problem, gpu: Gpu, kind: Kind,
    *, beat_s: float = BEAT_S, grace_s: float = GRACE_S,
) -> Study:  # fmt: skip
    """The study of a search, made if it is not there; in memory if `url` is None. Raises UsageError."""
    space = legal_tiles(kernel, problem, gpu, measured=kind == "measured")
    name = f"{kernel}-{kind}" if url is None else study_name(kernel, problem, gpu, kind, space)
    where = MEMORY if url is None else shown(url)
    return Study(open_storage(url), name, kernel, space, where=where, beat_s=beat_s, grace_s=grace_s)


class Study:
    """One worker's view of a search that any number of workers share, and that outlives them.

    A trial is one worker's try of one tile. It begins RUNNING, with the tile as its parameters, and ends COMPLETE with
    the seconds as its value and the whole time as an attribute, PRUNED if the model turned the tile down, or FAIL with
    the failure. A trial whose worker is gone is failed by whoever notices, and its tile is given out once more.

    Every method but `close` raises StorageLost if the storage cannot be reached.
    """

    def __init__(
        self, storage: BaseStorage, name: str, kernel: KernelName, space: Sequence[Tile],
        *, where: str = MEMORY, beat_s: float = BEAT_S, grace_s: float = GRACE_S,
    ) -> None:  # fmt: skip
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.name, self.where, self.storage = name, where, storage
        self._kernel, self._space = kernel, frozenset(space)
        self._distributions = _distributions(space)
        self._watch = Watch(grace_s)
        self._mine: dict[int, Claim] = {}
        self._finished: dict[int, Entry | None] = {}  # trials that never change again, as they were read
        self._study = self._made()
        self._beats = 0
        self._heart: Heart | None = None  # it begins with the first claim
        self._beat_s = beat_s
        self.book = self._read()

    def ask(self, limit: int, propose: Propose) -> Claim | None:
        """A tile to try; None if `limit` tiles are given out or no tile is left.

        First those whose workers are gone, then what `propose` says. Workers that know the same propose the same: one
        that came too late leaves the next few to others.
        """
        late = 0
        while True:
            tile = self.book.abandoned(limit)
            if tile is None and len(self.book) < limit:
                tile = self._proposed(propose, leave=random.randrange(2**late))
            if tile is None:
                return None
            claim = self._claim(tile, limit)
            if self.book.holds(tile, claim.trial, limit):
                return claim
            self._fail(claim.trial, f"{YIELDED}another worker was first.")
            self.look()
            late = min(late + 1, 4)

    def tell(self, claim: Claim, candidate: Candidate) -> bool:
        """What became of a tile. False if this worker was taken for dead meanwhile, and the tile given to another."""
        state, values = TrialState.PRUNED if candidate.pruned else TrialState.FAIL, None
        if candidate.time is not None:
            state, values = TrialState.COMPLETE, [candidate.time.seconds]
        told = False
        with suppress(UpdateFinishedTrialError):
            self._reach(self.storage.set_trial_user_attr, claim.trial, *outcome(candidate))
            self._reach(self.storage.set_trial_state_values, claim.trial, state, values)
            told = True
        self._mine.pop(claim.trial, None)
        self.look()
        return told

    def add(self, candidate: Candidate) -> None:
        """A tile and its time that were found elsewhere; nothing if the study has the tile, or cannot have it."""
        if candidate.time is None or candidate.tile in self.book or candidate.tile not in self._space:
            return
        name, value = outcome(candidate)
        trial = create_trial(
            value=candidate.time.seconds, params=asdict(candidate.tile), distributions=self._distributions,
            user_attrs={name: value}, system_attrs={OWNER: this_process(), LIMIT: len(self.book)},
        )  # fmt: skip
        self._reach(self.storage.create_new_trial, self._study, trial)
        self.look()

    def done(self, limit: int) -> bool:
        """Whether nothing is left to do for a search of `limit` tiles."""
        return len(self.book) >= min(limit, len(self._space)) and self.book.settled(limit)

    def look(self) -> None:
        """Read what others did."""
        self.book = self._read()

    def wait(self) -> None:
        """Let others go on for a moment, then look."""
        time.sleep(POLL_S)
        self.look()

    def note(self, name: str, value: object) -> None:
        """Keep a fact about the search."""
        if self.noted(name) != value:
            self._reach(self.storage.set_study_user_attr, self._study, name, value)

    def noted(self, name: str) -> Any:
        """The fact that was kept; None if there is none."""
        return self._reach(self.storage.get_study_user_attrs, self._study).get(name)

    def keep_ranking(self, ranked: Sequence[Candidate]) -> None:
        """The order of the candidates at the end, with times that no trial has."""
        self.note("ranking", {"of": len(self.book.candidates), "ranked": [dict(packed(c)) for c in ranked]})

    def ranking(self) -> list[Candidate] | None:
        """The order that was kept; None if there is none, or if tiles were tried since."""
        kept = self.noted("ranking")
        if not kept or kept["of"] != len(self.book.candidates):
            return None
        return [unpacked(self._kernel, values) for values in kept["ranked"]]

    def close(self) -> None:
        """Give back what this worker holds. That costs the tiles nothing; the next to ask gets them."""
        if self._heart:
            self._heart.stop()
        with suppress(StorageLost):  # then it is the heart that has stopped
            for trial in list(self._mine):
                self._fail(trial, f"{STOPPED}the search was stopped.")

    def __enter__(self) -> Study:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _proposed(self, propose: Propose, leave: int) -> Tile | None:
        """The proposal after `leave` others; the last one if there are not as many."""
        known, left = self.book.known, self.book.running
        tile = propose(known, left)
        for _ in range(leave):
            if tile is None:
                break
            left = [*left, tile]
            following = propose(known, left)
            if following is None:
                break
            tile = following
        return tile

    def _made(self) -> int:
        with suppress(KeyError):
            return self._reach(self.storage.get_study_id_from_name, self.name)
        with suppress(DuplicatedStudyError):  # another worker was faster
            self._reach(self.storage.create_new_study, [StudyDirection.MINIMIZE], self.name)
        return self._reach(self.storage.get_study_id_from_name, self.name)

    def _claim(self, tile: Tile, limit: int) -> Claim:
        """Write a trial of the tile, all of it at once; then look."""
        owner = this_process()
        trial = create_trial(
            state=TrialState.RUNNING, params=asdict(tile), distributions=self._distributions,
            user_attrs={"worker": f"process {owner['pid']} on {owner['host']}"},
            system_attrs={OWNER: owner, LIMIT: limit, BEAT: 0},
        )  # fmt: skip
        made: int = self._reach(self.storage.create_new_trial, self._study, trial)
        claim = Claim(made, tile)
        self._mine[made] = claim
        if self._heart is None and self.where != MEMORY:
            self._heart = Heart(self._beat, self._beat_s)
        self.look()
        return claim

    def _fail(self, trial: int, failure: str) -> None:
        with suppress(UpdateFinishedTrialError):  # somebody was faster
            self._reach(self.storage.set_trial_user_attr, trial, "failure", failure)
            self._reach(self.storage.set_trial_state_values, trial, TrialState.FAIL)
        self._mine.pop(trial, None)

    def _read(self) -> Book:
        """All trials; those whose workers are gone are failed first."""
        while True:
            trials = self._reach(self.storage.get_all_trials, self._study, deepcopy=False)
            book = Book(entry for trial in trials if (entry := self._entry(trial)) is not None)
            gone = [t for t in trials if t.state == TrialState.RUNNING and self._abandoned(t)]
            if not gone:
                return book
            for trial in gone:
                died = f"{LOST}its worker died ({trial.user_attrs['worker']})."
                holds = book.holds(self._tile(trial), trial._trial_id, len(book))
                self._fail(trial._trial_id, died if holds else f"{YIELDED}its worker died.")

    def _abandoned(self, trial: FrozenTrial) -> bool:
        if trial._trial_id in self._mine or OWNER not in trial.system_attrs:
            return False
        return self._watch.abandoned(trial._trial_id, trial.system_attrs[OWNER], trial.system_attrs[BEAT])

    def _entry(self, trial: FrozenTrial) -> Entry | None:
        """A trial as the book takes it; None for one that yielded, or that is none of ours."""
        if trial._trial_id in self._finished:
            return self._finished[trial._trial_id]
        entry = self._new_entry(trial)
        if trial.state.is_finished():
            self._finished[trial._trial_id] = entry
        return entry

    def _new_entry(self, trial: FrozenTrial) -> Entry | None:
        failure = trial.user_attrs.get("failure", "") if trial.state == TrialState.FAIL else ""
        if OWNER not in trial.system_attrs or failure.startswith(YIELDED):
            return None
        tile, limit = self._tile(trial), trial.system_attrs[LIMIT]
        fate: Fate = "running"
        if trial.state.is_finished():
            fate = "lost" if failure.startswith(LOST) else "stopped" if failure.startswith(STOPPED) else "done"
        if fate != "done":
            return Entry(trial._trial_id, tile, fate, limit, reason=failure)
        return Entry(trial._trial_id, tile, fate, limit, candidate_of(tile, trial.user_attrs))

    def _tile(self, trial: FrozenTrial) -> Tile:
        return tile_of(self._kernel, trial.params)

    def _beat(self) -> None:
        self._beats += 1
        for trial in list(self._mine):
            with suppress(UpdateFinishedTrialError, StorageLost):  # the next beat may get through
                self._reach(self.storage.set_trial_system_attr, trial, BEAT, self._beats)

    def _reach(self, call: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Call the storage."""
        try:
            return call(*arguments, **options)
        except storage_errors() as error:
            reason = str(error.__cause__ or error).strip().partition("\n")[0]
            raise StorageLost(
                f"{self.where} fails ({reason}). What was told is kept; the same command goes on from there."
            ) from error


def _distributions(space: Sequence[Tile]) -> dict[str, BaseDistribution]:
    """The values of each field, as dashboards plot them."""
    found: dict[str, BaseDistribution] = {}
    for name in [f.name for f in fields(space[0])] if space else []:
        values = sorted({getattr(tile, name) for tile in space})
        step = values[1] - values[0] if len(values) > 1 else 1
        if not isinstance(values[0], bool) and values == list(range(values[0], values[-1] + 1, step)):
            found[name] = IntDistribution(values[0], values[-1], step=step)
        else:
            found[name] = CategoricalDistribution(values)
    return found
