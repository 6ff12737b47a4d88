"""Many workers on one study, of whom some are killed: nothing is lost, nothing is done twice without need."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from flashsmith.spec.space import legal_tiles
from flashsmith.spec.tile import tile_key
from flashsmith.study.journal import JournalLock
from optuna.trial import TrialState

from tests.study import crew

ROUNDS = 20


def test_killed_workers_cost_nothing_but_time(storage: Callable[[int], str], tmp_path: Path) -> None:
    """Four workers of whom two are killed, each at a moment of its own, in 20 rounds: every tile finished, tried once,
    or once more for each killed worker that had it; the winner of one worker; no trial left RUNNING (BUG-35)."""
    space = crew.SPACE[:12] if "postgresql" in storage(0) else crew.SPACE  # which takes 40 ms to write a trial
    best, dice, hit = min(space, key=crew.true_seconds), random.Random(0), 0
    for n in range(ROUNDS):
        url, name, notes = storage(n), f"round {n}", tmp_path / f"notes {n}"
        workers = crew.start(4, url, name, notes, space=space)
        for worker, after in zip(workers, sorted(dice.sample(range(len(space) - 4), 2)), strict=False):
            wait_for_tries(notes, after)
            time.sleep(dice.uniform(0.0, 0.03))
            worker.kill()
        for worker in workers:
            worker.join(60)
        assert [worker.exitcode for worker in workers[2:]] == [0, 0]
        with crew.open_at(url, name, space) as study:
            trials, candidates = study.storage.get_all_trials(study._study), study.book.candidates
        assert TrialState.RUNNING not in {trial.state for trial in trials}
        assert len(candidates) == len(space) and {c.tile for c in candidates} == set(space)
        assert all(c.failure.startswith("Lost: its worker died") for c in candidates if c.time is None)
        lost = {tile_key(c.tile) for c in candidates if c.time is None}  # both killed workers had it
        killed, tried = {worker.pid for worker in workers[:2]}, crew.tries(notes)
        of_all, of_killed = Counter(key for _, key in tried), Counter(key for pid, key in tried if pid in killed)
        for key in map(tile_key, space):
            assert of_all[key] + (key in lost) >= 1 and of_all[key] <= 1 + of_killed[key], (n, key)
        if tile_key(best) not in lost:
            assert crew.winners(notes)[-2:] == [f"{tile_key(best)} {len(space)}"] * 2
        hit += any(count > 1 for count in of_all.values()) + len(lost)
    assert hit  # the kills did interrupt something


def wait_for_tries(notes: Path, count: int) -> None:
    end = time.monotonic() + 60
    while len(crew.tries(notes)) <= count:
        assert time.monotonic() < end
        time.sleep(0.002)


def test_sixteen_workers_start_at_once_on_nothing(storage: Callable[[int], str], tmp_path: Path) -> None:
    """Trivial trials, and a reader who keeps the storage for 3 s: no crash, every tile tried once (BUG-34)."""
    every, notes, url = legal_tiles("forward", crew.PROBLEM, crew.GPU), tmp_path / "notes", storage(0)
    space = every[:320] if url.endswith("journal") else every[:48]
    with held_by_a_reader(url):
        workers = crew.start(16, url, "crew", notes, space=space, takes_s=0.0, ahead=1)
        time.sleep(3.0)
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * 16
    with crew.open_at(url, "crew", space) as study:
        states = Counter(trial.state for trial in study.storage.get_all_trials(study._study))
        assert states[TrialState.COMPLETE] == len(study.book.candidates) == len(space)
        assert set(states) <= {TrialState.COMPLETE, TrialState.FAIL}
    assert Counter(key for _, key in crew.tries(notes)) == dict.fromkeys(map(tile_key, space), 1)


@contextmanager
def held_by_a_reader(url: str) -> Iterator[None]:
    """The journal's lock; a transaction that has read all tables of PostgreSQL; a client that blocks Redis."""
    if url.startswith("postgresql"):
        import psycopg

        with crew.open_at(url, "another"), psycopg.connect(url) as reader:
            reader.execute("SELECT * FROM studies, trials, trial_user_attributes")
            yield
    elif url.startswith("redis"):
        from redis import Redis

        with Redis.from_url(url) as client:
            client.execute_command("CLIENT", "PAUSE", 3000, "ALL")
        yield
    else:
        Path(url).touch()
        lock = JournalLock(Path(url))
        lock.acquire()
        yield
        lock.release()
