"""Predict every legal tile of some kernels and keep the times, for replays of a search.

    python benchmarks/record_spaces.py            all of SPACES: 2614 tiles, on two cores some two a second
    python benchmarks/record_spaces.py NAME ...   these

What is recorded is skipped.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from flashsmith.objective import evaluate
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.space import legal_tiles
from recorded_space import Space

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
    wanted = [space for space in SPACES if not names or space.name in names]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        for space in wanted:
            if space.path.exists():
                continue
            gpu = find_gpu(space.gpu)
            work = partial(evaluate, space.kernel, space.problem, gpu)
            candidates = list(pool.map(work, legal_tiles(space.kernel, space.problem, gpu), chunksize=4))
            space.write(candidates)
            print(
                f"{space.name}: {len(candidates)} tiles, {sum(c.time is None for c in candidates)} failed", flush=True
            )


if __name__ == "__main__":
    main(sys.argv[1:])
