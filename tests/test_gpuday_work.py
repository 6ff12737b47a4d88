"""What the parts of a GPU day do, with a fake device in the real one's place."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flashsmith.errors import LaunchError
from flashsmith.footprint import Measured
from flashsmith.gpuday import tiles, warpgroups, work
from flashsmith.gpuday.report import markdown
from flashsmith.spec.gpu import GPUS, find_gpu
from flashsmith.spec.problem import Problem
from flashsmith.tune import tuned_kernels

from tests.spec.test_record import RECORD
from tests.test_bench import FakeClock, sdpa, too_large

H200 = GPUS["h200"]
SMALL = Problem(dtype="bf16", d=64, Hq=1, Nq=64)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200 whose memory is the CPU's and whose clock is made up."""
    engine = SimpleNamespace(driver=SimpleNamespace(memory=torch.device("cpu")))
    monkeypatch.setattr("flashsmith.spec.gpu.present_gpu", lambda: H200)
    monkeypatch.setattr("flashsmith.gpuday.tiles.present_gpu", lambda: H200)
    monkeypatch.setattr("flashsmith.engines.cuda.cuda_engine", lambda: engine)
    monkeypatch.setattr("flashsmith.engines.clock.CudaClock", lambda engine, l2_bytes: FakeClock(1e-3))


def findings(part: Any, *arguments: str) -> list[Any]:
    """Everything that a part told, in order."""
    told: list[Any] = []
    part(lambda found: told.append(list(found)), *arguments)
    return told


def reported(name: str, found: Any) -> str:
    return markdown({"parts": {name: {"status": "done", "reason": "", "seconds": 1.0, "found": found, "output": ""}}})


def test_a_bench_tells_each_row_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    served = {"flashsmith": sdpa, "torch math": too_large, "FlexAttention": sdpa}
    monkeypatch.setattr("flashsmith.backends.backends", lambda: served)
    monkeypatch.setattr(
        "flashsmith.bench.problems", lambda dtype, d, causal, lengths=(64,): [replace(SMALL, Nq=n) for n in lengths]
    )
    told = findings(work.bench, "64", "False")
    assert [len(rows) for rows in told] == [1, 2, 3, 4] and {r["backend"] for r in told[-1]} == set(served) - {
        "FlexAttention"
    }
    text = reported("bench d64", told[-1])
    assert "forward bf16 d=64, measured" in text and "OutOfMemoryError" in text
    monkeypatch.setattr("flashsmith.bench.problems", lambda dtype, d, causal, lengths: [replace(SMALL, d=d)])
    assert {r["backend"] for r in findings(work.flex)[-1]} == {"FlexAttention"}


def test_tiles_are_timed_and_failures_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line a tile with what ptxas says and its seconds; a tile that cannot be launched has its reason."""
    launches = iter(range(100))

    def on_device(*arguments: Any) -> Any:
        def bench(request: Any) -> list[float]:
            if next(launches) == 1:
                raise LaunchError("an illegal address\nmore")
            return [3e-3, 1e-3, 2e-3]

        return bench

    monkeypatch.setattr("flashsmith.measuring.trial.on_device", on_device)
    monkeypatch.setattr(tiles, "COUNT", 4)
    found = list(tiles.timed_tiles("dq", 4))
    assert len(found) == 4 and [("failure" in line) for line in found] == [False, True, False, False]
    assert found[1]["failure"] == "LaunchError: an illegal address"
    for line in (found[0], *found[2:]):
        assert (line["least"], line["seconds"], line["most"]) == (1e-3, 2e-3, 3e-3) and line["registers"] > 0
    assert [line["problem"]["d"] for line in found] == [128, 128, 64, 64]
    assert "3 tiles measured, 1 not" in reported("tiles dq", found)


def test_kernels_of_warpgroups_are_timed_beside_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each width with and without turns and the early wait, one control, and cuDNN before and after; then fused90."""
    problem = Problem(dtype="bf16", d=64, Hq=2, Nq=256)
    monkeypatch.setattr(warpgroups, "PROBLEMS", [problem])
    monkeypatch.setattr(warpgroups, "WIDTHS", (64, 80))
    monkeypatch.setattr(warpgroups, "ROWS", (64, 80))
    monkeypatch.setattr(warpgroups, "present_gpu", lambda: H200)
    monkeypatch.setattr(warpgroups, "_cudnn", cudnn)
    monkeypatch.setattr("flashsmith.measuring.trial.on_device", lambda *arguments: lambda request: [2e-3] * 3)
    every = findings(work.warpgroups)[-1]
    found = [line for line in every if line["which"] == "forward"]
    tiles = [line["tile"] for line in found[1:-1]]
    assert found[0]["key"] == found[-1]["key"] == "torch cuDNN" and [t["overlap"] for t in tiles].count(False) == 1
    assert {(t["Bc"], t["pingpong"], t["early_k_wait"]) for t in tiles[:-1]} == set(
        itertools.product((64, 80), (False, True), (False, True))
    )
    assert all(line["tflops"] == pytest.approx(problem.flops("forward") / 2e-3 / 1e12) for line in found[1:-1])
    sums = [(x["tile"]["Br"], x["tile"]["bulk_sums"]) for x in every if x["key"].startswith("fused90")]
    assert sorted(sums) == sorted(2 * [(64, False), (64, True)])  # 80 rows are no two halves of whole groups
    text = reported("warpgroups", every)
    assert "forward bf16 d=64 N=256, measured" in text and "| torch cuDNN | no such engine |" in text
    assert "backward bf16 d=64 N=256, measured" in text
    monkeypatch.setattr("flashsmith.spec.gpu.present_gpu", lambda: find_gpu("a100"))
    with pytest.raises(work.CannotRun, match="sm_90"):
        findings(work.warpgroups)


def cudnn(problem: Problem, which: str, gpu: Any) -> dict[str, Any]:
    return {"key": "torch cuDNN", "problem": asdict(problem), "which": which, "failure": "no such engine"}


def test_a_search_tells_each_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def tune_kernel(kernel: str, problem: Problem, gpu: Any, folder: Path, **options: Any) -> Any:
        asked.append((kernel, problem.d, problem.causal, gpu.key, folder, options["by"]))
        return SimpleNamespace(record=replace(RECORD, evidence=replace(RECORD.evidence, kind="measured")))

    monkeypatch.setattr("flashsmith.tune.tune_kernel", tune_kernel)
    told = findings(work.tune, "128", "True", str(tmp_path))
    names = (*tuned_kernels("forward", SMALL, H200), *tuned_kernels("backward", SMALL, H200))
    assert {"forward", "forward90", "fused", "dkdv", "dq"} <= set(names)
    assert asked == [(kernel, 128, True, "h200", tmp_path, "measured") for kernel in names]
    assert [len(rows) for rows in told] == [*range(1, len(names) + 1)]
    assert "| measured |" in reported("tune d128 causal", told[-1])


def test_memory_stands_beside_what_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(problem: Problem) -> tuple[Measured, ...]:
        return tuple(Measured(way=way, n=problem.Nq, peak=10**9, kept=10**8) for way in ("standard", "flash"))

    monkeypatch.setattr("flashsmith.footprint.measure_forward", measure)
    found = findings(work.memory)[-1]
    assert len(found) == 6 and found[-1]["computed"]["P"] == 4 * 2 * 32768**2
    assert "| flash | 32768 | 1.000 |" in reported("memory", found)


def test_wrong_results_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    result = {"passed": 3, "failed": [{"test": "t::x", "why": "off"}], "skipped": [], "seconds": 1.0}
    monkeypatch.setattr("flashsmith.gpuday.machine.run_tests", lambda: result)
    with pytest.raises(SystemExit, match="1 tests failed: t::x"):
        work.tests(lambda found: None)
    errors = [{"tool": "memcheck", "errors": 2, "status": 9, "output": ""}]
    monkeypatch.setattr("flashsmith.gpuday.machine.run_sanitizers", lambda: iter(errors))
    with pytest.raises(SystemExit, match="found errors"):
        work.sanitizer(lambda found: None)
