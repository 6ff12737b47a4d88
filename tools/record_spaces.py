"""Predict every legal tile of a kernel and keep the times, for replays of a search: tests/data/spaces/*.csv.gz.

    python tools/record_spaces.py            all of SPACES, some 25 minutes on two quiet cores
    python tools/record_spaces.py NAME ...   these

One line a tile: its fields, then the predicted seconds, or the class of its failure. What is recorded is skipped.
"""

from __future__ import annotations

import csv
import gzip
import io
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, fields
from functools import partial
from pathlib import Path
from typing import NamedTuple

from flashsmith.objective import Candidate, evaluate
from flashsmith.predict import MODEL
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import TILE_OF, KernelName
from flashsmith.spec.problem import Problem
from flashsmith.spec.space import legal_tiles

FOLDER = Path(__file__).parents[1] / "tests" / "data" / "spaces"


class Space(NamedTuple):
    """One kernel on one GPU."""

    kernel: KernelName
    gpu: str
    d: int
    causal: bool = False

    @property
    def name(self) -> str:
        return f"{self.kernel}_{self.gpu}_d{self.d}{'_causal' if self.causal else ''}"

    @property
    def problem(self) -> Problem:
        return Problem(dtype="bf16", d=self.d, causal=self.causal, B=2, Hq=16, Nq=8192)


SPACES = (
    Space("forward", "a100", 128),
    Space("forward", "rtx4090", 128),
    Space("fused", "a100", 128),
    Space("forward", "h100-sxm", 128),
    Space("dq", "a100", 128),
    Space("dkdv", "rtx4090", 128),
    Space("fused", "h100-sxm", 128),
    Space("dq", "h100-sxm", 256),
    Space("forward", "rtx4090", 128, causal=True),
)


def main(names: list[str]) -> None:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    FOLDER.mkdir(parents=True, exist_ok=True)
    wanted = [space for space in SPACES if not names or space.name in names]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        for space in wanted:
            path = FOLDER / f"{space.name}.csv.gz"
            if path.exists():
                continue
            tiles = legal_tiles(space.kernel, space.problem, find_gpu(space.gpu))
            work = partial(evaluate, space.kernel, space.problem, find_gpu(space.gpu))
            candidates = list(pool.map(work, tiles, chunksize=4))
            path.write_bytes(packed(space, candidates))
            print(
                f"{space.name}: {len(candidates)} tiles, {sum(c.time is None for c in candidates)} failed", flush=True
            )


def packed(space: Space, candidates: list[Candidate]) -> bytes:
    """The table, compressed; the same bytes for the same times."""
    text = io.StringIO()
    p = space.problem
    text.write(f"# {space.name}, {p.text}, B={p.B} Hq={p.Hq} Nq={p.Nq}: seconds predicted by {MODEL}\n")
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow([f.name for f in fields(TILE_OF[space.kernel])] + ["seconds"])
    for c in candidates:
        seconds = f"{c.time.seconds:.6e}" if c.time else c.failure.partition(":")[0]
        lines.writerow([int(value) for value in astuple(c.tile)] + [seconds])
    return gzip.compress(text.getvalue().encode(), mtime=0)


if __name__ == "__main__":
    main(sys.argv[1:])
