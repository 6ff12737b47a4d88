"""A crew of workers in processes of their own, with times that cost nothing; any of them may be killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import alembic.command  # noqa: F401  (what Optuna imports for PostgreSQL alone)
import psycopg  # noqa: F401
import redis  # noqa: F401
import sqlalchemy.orm  # noqa: F401
from flashsmith import propose
from flashsmith.choose import choose
from flashsmith.objective import Candidate
from flashsmith.predict import Prediction
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.problem import Problem
from flashsmith.spec.space import legal_tiles
from flashsmith.spec.tile import Tile, tile_key
from flashsmith.study import Study
from flashsmith.study.storage import open_storage

GPU = find_gpu("a100")
PROBLEM = Problem(dtype="bf16", d=64, Nq=2048)
SPACE = legal_tiles("forward", PROBLEM, GPU)[::18][:30]

# Processes that fork from one that has imported everything: a killed worker costs no second to replace.
PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__])


def predicted(seconds: float) -> Prediction:
    return Prediction(
        kernel="forward", gpu="a100", seconds=seconds, tflops=1 / seconds, spread=0.05, blocks_per_sm=2,
        pipes={"tensor": 0.5 + seconds / 100}, bound_by="the test", spills_in_loop=0,
    )  # fmt: skip


def true_seconds(tile: Tile) -> float:
    """A time for each tile; no two are alike."""
    return 1.0 + (hash_of(tile) % 9973) / 7.0


def hash_of(tile: Tile) -> int:
    return int.from_bytes(tile_key(tile).encode(), "big")


class Cheap:
    """An objective that notes each try in a file, takes its time, and knows the answer."""

    def __init__(self, notes: Path, takes_s: float = 0.0, dies_at: int = 0) -> None:
        self.notes, self.takes_s, self.dies_at, self.count = notes, takes_s, dies_at, 0

    def submit(self, tile: Tile) -> Any:
        return Cheap.Later(self, tile)

    def final(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        return sorted((c for c in candidates if c.time is not None), key=lambda c: c.time.seconds)

    def close(self) -> None:
        return None

    class Later:
        def __init__(self, objective: Cheap, tile: Tile) -> None:
            self.objective, self.tile = objective, tile

        def result(self) -> Candidate:
            with open(self.objective.notes, "a") as notes:
                notes.write(f"{os.getpid()} {tile_key(self.tile)}\n")
            self.objective.count += 1
            if self.objective.count == self.objective.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(self.objective.takes_s)
            return Candidate(self.tile, predicted(true_seconds(self.tile)))


def open_at(url: str, name: str = "crew", space: Sequence[Tile] = SPACE) -> Study:
    return Study(open_storage(url), name, "forward", space, where=url, beat_s=1.0, grace_s=60.0)


def work(
    url: str, name: str, notes: Path, space: Sequence[Tile], trials: int, takes_s: float, ahead: int, dies_at: int
) -> None:  # fmt: skip
    """One worker; the winner goes to a file beside the notes."""
    propose.legal_tiles = lambda *args, **how: space  # type: ignore[attr-defined]
    with open_at(url, name, space) as study:
        winner = choose("forward", PROBLEM, GPU, trials=trials, study=study, ahead=ahead,
                        objective=lambda: Cheap(notes, takes_s, dies_at))  # fmt: skip
    notes.with_name(f"{notes.name}.{os.getpid()}").write_text(f"{tile_key(winner.spec.tile)} {len(winner.candidates)}")


def start(
    count: int, url: str, name: str, notes: Path, *, space: Sequence[Tile] = SPACE, trials: int = 1000,
    takes_s: float = 0.02, ahead: int = 2, dies_at: int = 0,
) -> list[Any]:  # fmt: skip
    """Begin with `count` workers."""
    arguments = (url, name, notes, space, trials, takes_s, ahead, dies_at)
    workers = [PROCESSES.Process(target=work, args=arguments) for _ in range(count)]
    for worker in workers:
        worker.start()
    return workers


def winners(notes: Path) -> list[str]:
    return [file.read_text() for file in notes.parent.glob(f"{notes.name}.*")]


def tries(notes: Path) -> list[tuple[int, str]]:
    """(process, tile) of each try, in order."""
    lines = notes.read_text().splitlines() if notes.exists() else []
    return [(int(pid), key) for pid, _, key in (line.partition(" ") for line in lines)]
