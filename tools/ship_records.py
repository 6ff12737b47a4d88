"""Search the tiles that flashsmith ships: tuned/<gpu>.json for every GPU that multiplies bf16, predicted.

    python tools/ship_records.py [--trials 8] [--seed 0] [--kernels forward,dq] [--out tuned]

bf16 and fp16, d of HEAD_DIMS, causal and not; every kernel that `flashsmith tune` searches, at the lengths that it has
by default. Each class of GPUs, whose SMs are alike, is searched once in bf16. For its other members and for fp16 the
best tile of that search is tried again, beside the default. Winners are checked on the emulator, races included.

What is there and fresh is kept, so a run that was stopped goes on. The same trials and seed give the same bytes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path

from flashsmith.choose import choose
from flashsmith.compile import version_text
from flashsmith.engines.emulated import EmulatedEngine
from flashsmith.errors import NoTunedKernel
from flashsmith.load import source_sha256
from flashsmith.objective import Candidate, build, by_time, evaluate
from flashsmith.predict import model_of
from flashsmith.spec.backward_shape import red_width
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.gpu import GPUS, Gpu, find_gpu
from flashsmith.spec.kernel import KernelName, KernelSpec
from flashsmith.spec.limits import why_no_dtype
from flashsmith.spec.problem import Dtype, Pass, Problem
from flashsmith.spec.record import Record, read_records, record_path, write_record
from flashsmith.spec.tile import Tile
from flashsmith.tune import record_of, tuned_kernels
from flashsmith.verify import why_wrong

HEAD_DIMS = (64, 96, 128, 192, 256)
DTYPES: tuple[Dtype, ...] = ("bf16", "fp16")
PASSES: tuple[Pass, ...] = ("forward", "backward")
AGAIN = 2  # trials for each other member and dtype: the default, the best tile of the class


class Here:
    """Times of the issue model, made in this process, one after the other."""

    def __init__(self, kernel: KernelName, problem: Problem, gpu: Gpu) -> None:
        self._asked = (kernel, problem, gpu)

    def submit(self, tile: Tile) -> Done:
        """Compile and predict now."""
        return Done(evaluate(*self._asked, tile))

    def final(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Best first."""
        return by_time(candidates)

    def close(self) -> None:
        """Nothing runs."""


class Done:
    """A candidate that has its time."""

    def __init__(self, candidate: Candidate) -> None:
        self._candidate = candidate

    def result(self) -> Candidate:
        """The candidate."""
        return self._candidate


def classes() -> list[list[Gpu]]:
    """The GPUs that multiply bf16; those whose SMs are alike stand together."""
    alike: dict[tuple[int, ...], list[Gpu]] = {}
    for gpu in GPUS.values():
        if why_no_dtype("bf16", gpu) is None:
            alike.setdefault(gpu.sm_class, []).append(gpu)
    return list(alike.values())


def kernels(problem: Problem, gpu: Gpu) -> list[KernelName]:
    """Those that are searched for a problem and a GPU."""
    return [kernel for each in PASSES for kernel in tuned_kernels(each, problem, gpu)]


def fits(kernel: KernelName, problem: Problem, gpu: Gpu) -> bool:
    """Whether a kernel has a tile for the problem at all."""
    try:
        default_tile(kernel, problem, gpu)
    except NoTunedKernel:
        return False
    return kernel in kernels(problem, gpu)


def ship(kernel: KernelName, d: int, causal: bool, *, trials: int, seed: int, folder: Path) -> str:
    """Every record of one kernel, head dimension and mask: all GPUs, both dtypes."""
    made, before = 0, list[Tile]()
    for members in classes():
        best = before  # of another class, until this one has been searched
        for gpu, dtype in product(members, DTYPES):
            problem = Problem(dtype=dtype, d=d, causal=causal, B=2, Hq=16, Nq=8192)
            if not fits(kernel, problem, gpu):
                continue
            leads = (gpu, dtype) == (members[0], DTYPES[0])
            record = fresh(folder, kernel, problem, gpu)
            if record is None:
                record = search(kernel, problem, gpu, best, trials=trials if leads else AGAIN, seed=seed)
                write_record(folder, record)
                made += 1
            if leads:
                best = best_of(record)
        before = best
    return f"{kernel} d={d}{' causal' if causal else ''}: {made} records made"


def search(kernel: KernelName, problem: Problem, gpu: Gpu, first: Sequence[Tile], *, trials: int, seed: int) -> Record:
    """The record of one search in this process; its winner is right on the emulator."""
    winner = choose(
        kernel, problem, gpu, trials=trials, seed=seed, first=first, ahead=1,
        objective=partial(Here, kernel, problem, gpu), verify=partial(wrong, problem),
    )  # fmt: skip
    return record_of(winner, problem, gpu, seed=seed)


def best_of(record: Record) -> list[Tile]:
    """The winner and the runner-up."""
    second = record.search.runner_up if record.search else None
    return [record.tile, second.tile] if second else [record.tile]


def wrong(problem: Problem, spec: KernelSpec) -> str:
    """Why the kernel is wrong, or "". The text is the same for all GPUs, but for the width of reductions."""
    return _wrong(replace(spec, sm=80 if red_width(spec.sm) == 1 else 90), problem)


@cache
def _wrong(spec: KernelSpec, problem: Problem) -> str:
    gpu = find_gpu("a100" if spec.sm == 80 else "h100-sxm")
    return why_wrong(build(spec), problem, gpu, partial(EmulatedEngine, check_races=True))


def fresh(folder: Path, kernel: KernelName, problem: Problem, gpu: Gpu) -> Record | None:
    """The record that is there, if the text, the compiler and the model are today's."""
    asked = (kernel, problem.dtype, problem.d, problem.causal)
    today = (version_text(), model_of(kernel))
    for record in read_records(record_path(folder, gpu.key)):
        if (record.kernel, record.dtype, record.d, record.causal) != asked:
            continue
        if (record.nvrtc, record.evidence.by) == today and record.source_sha256 == source_sha256(record.spec):
            return record
    return None


def main() -> None:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    widths = [Problem(dtype="bf16", d=d) for d in HEAD_DIMS]
    every = list(dict.fromkeys(k for gpu in GPUS.values() for problem in widths for k in kernels(problem, gpu)))
    parser.add_argument("--kernels", default=",".join(every))
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "tuned")
    asked = parser.parse_args()
    work = partial(ship, trials=asked.trials, seed=asked.seed, folder=asked.out)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        cells = product([k for k in every if k in asked.kernels.split(",")], HEAD_DIMS, (False, True))
        for done in as_completed([pool.submit(work, *cell) for cell in cells]):
            print(done.result(), flush=True)


if __name__ == "__main__":
    main()
