"""Draw random legal tiles of a kernel and measure each on the GPU."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from statistics import median
from typing import Any, cast

from ..compile import Binary, compile_source
from ..errors import CompileError, FlashsmithError
from ..render import render
from ..spec.gpu import Gpu, present_gpu
from ..spec.kernel import KernelName, KernelSpec
from ..spec.problem import Problem
from ..spec.space import legal_tiles
from ..spec.tile import Tile

COUNT = 60  # tiles of each kernel, half of them for each problem
SAMPLES = 10  # launches timed of each
COMPILERS = 8  # processes, at most: NVRTC holds a lock of its own, so threads would wait for each other

PROBLEMS = (
    Problem(dtype="bf16", d=128, B=4, Hq=16, Nq=4096),
    Problem(dtype="bf16", d=64, causal=True, B=4, Hq=32, Nq=4096),
)


def random_tiles(kernel: KernelName, problem: Problem, gpu: Gpu, count: int, seed: int = 0) -> tuple[Tile, ...]:
    """`count` different legal tiles, or all if there are fewer; the same for the same seed."""
    tiles = legal_tiles(kernel, problem, gpu, measured=True)
    return tuple(random.Random(seed).sample(tiles, min(count, len(tiles))))


def timed_tiles(kernel: str, count: int = COUNT) -> Iterator[dict[str, Any]]:
    """One line a tile: what ptxas says of it and its measured seconds, or why there are none."""
    name, gpu = cast(KernelName, kernel), present_gpu()
    for problem in PROBLEMS:
        yield from timed_lines(name, problem, gpu, random_tiles(name, problem, gpu, count // len(PROBLEMS)))


def timed_lines(kernel: KernelName, problem: Problem, gpu: Gpu, tiles: Sequence[Tile]) -> Iterator[dict[str, Any]]:
    """The same for tiles that are named: compiled side by side, timed one after the other in their order."""
    from ..measure import Again
    from ..measuring.trial import on_device

    bench = on_device(kernel, problem, gpu, 0)
    specs = [KernelSpec.of(kernel, problem, tile, gpu.sm) for tile in tiles]
    workers, spawn = min(COMPILERS, os.cpu_count() or 1), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        for spec, built in zip(specs, pool.map(_build, specs), strict=True):
            line: dict[str, Any] = {"key": spec.key, "tile": asdict(spec.tile), "problem": asdict(problem)}
            if isinstance(built, str):
                yield {**line, "failure": built}
                continue
            line |= {"registers": built.registers, "spill_bytes": built.spill_bytes}
            try:
                seconds = sorted(cast(list[float], bench(Again(built, SAMPLES))))
            except FlashsmithError as error:
                yield {**line, "failure": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
                continue
            yield {**line, "seconds": median(seconds), "least": seconds[0], "most": seconds[-1], "samples": SAMPLES}


def _build(spec: KernelSpec) -> Binary | str:
    try:
        return compile_source(render(spec))
    except CompileError as error:
        return f"CompileError: {str(error).splitlines()[0]}"
