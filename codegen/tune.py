"""Tune a pass for a GPU: search each of its kernels, check the winners on the emulator, write their records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from .check import check
from .choose import Candidate, Winner, choose
from .compile import Binary, compile_source, version_text
from .engines.emulated import EmulatedEngine
from .load import source_sha256
from .render import render
from .spec.defaults import default_tile
from .spec.gpu import Gpu
from .spec.kernel import FORWARD, FUSED, SPLIT, KernelName, KernelSpec
from .spec.problem import Pass, Problem
from .spec.record import Evidence, Record, check_writable, write_record
from .spec.tile import Tile

TUNED: dict[Pass, tuple[KernelName, ...]] = {"forward": ("forward",), "backward": ("fused", "dkdv", "dq")}


@dataclass(frozen=True, slots=True)
class Tuned:
    """One kernel's search and the record that it left."""

    winner: Winner
    record: Record
    path: Path


def tune_kernel(
    kernel: KernelName,
    problem: Problem,
    gpu: Gpu,
    folder: Path,
    *,
    trials: int,
    seed: int = 0,
    progress: Callable[[Candidate], None] = lambda candidate: None,
) -> Tuned:
    """Search the tiles of one kernel by predicted time and record the winner, once the emulator finds it right.

    Raises UsageError before any work if `folder` cannot be written; NothingFound if no candidate is valid.
    """
    check_writable(folder)
    verify = partial(why_wrong, problem=problem, gpu=gpu)
    winner = choose(kernel, problem, gpu, trials=trials, seed=seed, progress=progress, verify=verify)
    record = _record(winner, problem, gpu)
    return Tuned(winner, record, write_record(folder, record))


def why_wrong(spec: KernelSpec, problem: Problem, gpu: Gpu) -> str:
    """Run a kernel with the rest of its pass on the emulator, races watched, tails and unequal lengths included.

    "" if it is right, else the tensors that are not. The rest of the pass has default tiles.
    """
    which: Pass = "forward" if spec.kernel == "forward" else "backward"
    kernels = FORWARD if which == "forward" else FUSED if spec.kernel in ("fused", "convert") else SPLIT
    binaries = {name: _companion(name, spec, problem, gpu) for name in kernels}
    for Nq, Nk in ((129, 200), (70, 70)):
        small = replace(problem, B=1, Hq=2, Hk=1, Nq=Nq, Nk=Nk)
        verdict = check(small, which, binaries, EmulatedEngine(check_races=True))
        if not verdict.ok:
            return f"Nq={Nq}, Nk={Nk}: {verdict.reason}"
    return ""


def _companion(kernel: KernelName, spec: KernelSpec, problem: Problem, gpu: Gpu) -> Binary:
    shared = kernel == spec.kernel or (kernel == "convert" and spec.kernel == "fused")
    tile: Tile = spec.tile if shared else default_tile(kernel, problem, gpu)
    return compile_source(render(KernelSpec.of(kernel, problem, tile, gpu.sm)))


def _record(winner: Winner, problem: Problem, gpu: Gpu) -> Record:
    spec, prediction = winner.spec, winner.prediction
    return Record(
        gpu=gpu.key, sm=gpu.sm, kernel=spec.kernel, dtype=spec.dtype, d=spec.d, causal=spec.causal,
        B=problem.B, Hq=problem.Hq, Hk=problem.kv_heads, Nq=problem.Nq, Nk=problem.keys, tile=spec.tile,
        evidence=Evidence(
            kind="predicted", time_ms=round(prediction.seconds * 1e3, 5), tflops=round(prediction.tflops, 1),
            spread=round(prediction.spread, 3), by=prediction.by, trials=len(winner.candidates),
        ),
        source_sha256=source_sha256(spec), nvrtc=version_text(),
    )  # fmt: skip
