"""Searches by measured time, with processes and devices that are faked; what is recorded, and what never is."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flashsmith import tune
from flashsmith.choose import ALIKE, Candidate, choose
from flashsmith.cli import main
from flashsmith.errors import MeasuringBroken, NothingFound, UsageError, WrongResult
from flashsmith.measure import Timing
from flashsmith.measuring import contention
from flashsmith.measuring.process import Measurer
from flashsmith.objective import Measured
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import KernelSpec
from flashsmith.spec.problem import Problem
from flashsmith.spec.record import read_records, record_path
from flashsmith.spec.tile import ForwardTile

from tests.measuring.test_rematch import Now
from tests.measuring.works import Spec, gpu_with_bad_kernels, true_seconds

GPU = find_gpu("a100")
PROBLEM = Problem(dtype="bf16", d=64, Hq=2, Nq=256)
DEFAULT = default_tile("forward", PROBLEM, GPU)


def measured(bad: dict[int, str], trials: int = 10, timeout_s: float = 2.0) -> Any:
    """A search by the times of a real measuring process that runs the faked work."""
    with Measurer(partial(gpu_with_bad_kernels, bad), timeout_s=timeout_s) as measurer:
        objective = partial(Measured, "forward", PROBLEM, GPU, measurer, pool=Now(), builder=Spec)
        return choose("forward", PROBLEM, GPU, trials=trials, objective=objective), measurer  # type: ignore[arg-type]


def test_a_search_survives_its_candidates() -> None:
    """Those that fault, crash, hang or are wrong fail with a reason; the others have the times they would have had
    alone; the fastest right one wins (BUG-29, BUG-32)."""
    clean, quiet = measured({})
    tried = [c.tile for c in clean.candidates]
    widths = list(dict.fromkeys(tile.Bc for tile in tried))
    assert quiet.starts == 1 and tried[0] == DEFAULT and len(widths) >= 5
    fates = dict(zip(widths[1:], ("fault", "crash", "hang", "wrong"), strict=False))
    found, measurer = measured(fates, timeout_s=1.0)
    seen = {c.tile: c for c in found.candidates}
    classes = {"fault": "LaunchError", "crash": "Crash", "hang": "Timeout", "wrong": "WrongResult"}
    hurt = 0
    for tile, candidate in seen.items():
        if tile.Bc in fates:
            assert candidate.time is None and candidate.failure.startswith(classes[fates[tile.Bc]])
            hurt += fates[tile.Bc] != "wrong"
        else:
            assert candidate.time is not None and candidate.time.seconds == true_seconds(tile)
    assert len(seen) == 10 and measurer.starts <= 1 + hurt
    assert found.spec.tile == min((t for t in seen if t.Bc not in fates), key=true_seconds)


def broken(bad: str) -> Callable[[KernelSpec], Any]:
    """A compiler that refuses everything in the same words, its key and line numbers apart."""
    return lambda spec: f"CompileError: NVRTC refused {spec.key}:\n\nkernel.cu({spec.threads}): error: no mma\n{bad}"


@pytest.mark.parametrize("cause", ["compile", "wrong"])
def test_nothing_valid_ends_early_and_says_why(cause: str) -> None:
    """The count of each class and the first message in full, after a few candidates of many (BUG-33)."""
    seen: list[Candidate] = []
    work = gpu_with_bad_kernels(dict.fromkeys(range(0, 200, 16), "wrong"))
    measurer = SimpleNamespace(ask=lambda request: work(request), close=lambda: None)

    def ask(request: Any) -> Any:
        try:
            return work(request)
        except WrongResult as error:
            from flashsmith.errors import Rejected

            raise Rejected(f"WrongResult: {error}") from error

    measurer.ask = ask
    builder = broken("in detail") if cause == "compile" else Spec
    objective = partial(Measured, "forward", PROBLEM, GPU, measurer, pool=Now(), builder=builder)
    with pytest.raises(NothingFound) as error:
        choose("forward", PROBLEM, GPU, trials=200, objective=objective, progress=seen.append)  # type: ignore[arg-type]
    assert len(seen) == ALIKE
    first = "CompileError: NVRTC refused forward_" if cause == "compile" else "WrongResult: O is off by 1.0e\\+00"
    assert error.match(f"{ALIKE} x {first}")
    assert cause != "compile" or "in detail" in str(error.value)


def test_failures_that_differ_do_not_end_a_search() -> None:
    """Nor do those after a valid candidate."""
    words = iter(["alpha", "beta"] * 50)
    objective = partial(
        Measured, "forward", PROBLEM, GPU, SimpleNamespace(close=lambda: None), pool=Now(),
        builder=lambda spec: f"CompileError: {next(words)}",
    )  # fmt: skip
    with pytest.raises(NothingFound, match=r"30 x CompileError: alpha"):
        choose("forward", PROBLEM, GPU, trials=30, objective=objective)  # type: ignore[arg-type]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An A100 at index 3, measured by a faked work, in this process."""
    state = SimpleNamespace(work=gpu_with_bad_kernels({}), held=[])

    class InProcess:
        def __init__(self, make: Any) -> None:
            assert make.args == ("forward", PROBLEM, GPU, 3)

        def __enter__(self) -> InProcess:
            return self

        def __exit__(self, *error: object) -> None:
            return None

        def ask(self, request: Any) -> Any:
            with pytest.raises(UsageError, match="another search measures"), contention.device_lock("0000:07:00.0"):
                pass
            state.held.append(request)
            return state.work(request)

        def close(self) -> None:
            return None

    monkeypatch.setattr(tune, "Measurer", InProcess)
    monkeypatch.setattr(tune, "device_for", lambda gpu, by: None if by == "predicted" else 3)
    monkeypatch.setattr(tune, "device_identity", lambda index: "0000:07:00.0")
    monkeypatch.setattr(tune, "Measured", partial(Measured, pool=Now(), builder=Spec))
    monkeypatch.setattr(tune, "predicted_order", lambda *args, **options: (ForwardTile(Br=128, Bc=80, warps=8),))
    monkeypatch.setattr(tune, "why_wrong", lambda *args, **options: "")
    return state


def test_a_measured_record_says_by_whom_and_stays(device: SimpleNamespace, tmp_path: Path) -> None:
    """GPU, driver, date, spread and sample count; the device was locked; a predicted record does not replace it."""
    seen: list[Candidate] = []
    tuned = tune.tune_kernel("forward", PROBLEM, GPU, tmp_path, trials=6, progress=seen.append)
    (record,) = read_records(record_path(tmp_path, "a100"))
    assert record == tuned.record and device.held
    evidence = record.evidence
    assert evidence.kind == "measured" and evidence.by == "NVIDIA A100-SXM4-80GB, driver 580.65, 2026-11-29"
    assert evidence.samples == 180 and evidence.trials == 6 and evidence.time_ms == pytest.approx(
        1e3 * true_seconds(record.tile), abs=1e-5)  # type: ignore[arg-type]  # fmt: skip
    assert [c.tile for c in seen[:2]] == [DEFAULT, ForwardTile(Br=128, Bc=80, warps=8)]
    assert all(isinstance(c.time, Timing) for c in seen)  # the model ordered them, and its times stayed outside
    before = record_path(tmp_path, "a100").read_bytes()
    with pytest.raises(UsageError, match=r"holds a measured record for this \(NVIDIA A100-SXM4-80GB"):
        tune.tune_kernel("forward", PROBLEM, GPU, tmp_path, trials=1, by="predicted")
    assert record_path(tmp_path, "a100").read_bytes() == before


def test_nothing_found_writes_nothing(
    device: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, counts, the first error; no file, and an old one stays as it is (BUG-33)."""
    command = ["tune", "--gpu", "a100", "--d", "64", "--pass", "forward", "--trials", "20", "--nq", "256",
               "--heads", "2", "--batch", "1", "--out", str(tmp_path)]  # fmt: skip
    monkeypatch.setattr(tune, "Measured", partial(Measured, pool=Now(), builder=broken("in detail")))
    assert main(command) == 1
    message = capsys.readouterr().err
    assert f"{ALIKE} x CompileError: NVRTC refused" in message and "in detail" in message
    assert list(tmp_path.glob("*.json")) == []
    tune_ok = partial(Measured, pool=Now(), builder=Spec)
    monkeypatch.setattr(tune, "Measured", tune_ok)
    assert main(command) == 0
    before = record_path(tmp_path, "a100").read_bytes()
    monkeypatch.setattr(tune, "Measured", partial(Measured, pool=Now(), builder=broken("again")))
    assert main(command) == 1
    assert record_path(tmp_path, "a100").read_bytes() == before


def test_a_broken_process_stops_the_search() -> None:
    """It is nobody's failure that no process starts; it does not fill the study with failed trials."""

    def ask(request: Any) -> Any:
        raise MeasuringBroken("the measuring process does not start")

    objective = partial(
        Measured, "forward", PROBLEM, GPU, SimpleNamespace(ask=ask, close=lambda: None), pool=Now(), builder=Spec
    )
    with pytest.raises(MeasuringBroken):
        choose("forward", PROBLEM, GPU, trials=5, objective=objective)  # type: ignore[arg-type]


@pytest.mark.parametrize(("by", "here", "index"), [("auto", 2, 2), ("auto", None, None), ("predicted", 2, None)])
def test_times_are_measured_where_the_gpu_is(
    by: tune.By, here: int | None, index: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashsmith.engines.driver.find_device", lambda gpu: here)
    monkeypatch.setattr("flashsmith.engines.driver.why_no_cuda", lambda: "")
    assert tune.device_for(GPU, by) == index


def test_asking_for_measured_times_in_vain_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no a100 is here to measure on"):
        tune.device_for(GPU, "measured")
    monkeypatch.setattr("flashsmith.engines.driver.find_device", lambda gpu: 0)
    monkeypatch.setattr("flashsmith.engines.driver.why_no_cuda", lambda: "PyTorch is built without CUDA.")
    with pytest.raises(UsageError, match="built without CUDA"):
        tune.device_for(GPU, "measured")
    assert tune.device_for(GPU, "auto") is None


def test_neighbours_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By NVML's list of processes, ours left out; without NVML by the memory in use (BUG-31)."""
    running = [SimpleNamespace(pid=os.getpid()), SimpleNamespace(pid=4711)]
    nvml = SimpleNamespace(
        nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlDeviceGetHandleByPciBusId=lambda identity: identity,
        nvmlDeviceGetComputeRunningProcesses=lambda device: running, NVMLError=OSError,
    )  # fmt: skip
    monkeypatch.setattr(contention, "device_identity", lambda index: "0000:07:00.0")
    monkeypatch.setattr(contention, "import_module", lambda name: nvml)
    assert contention.neighbours(0) == "1 other processes (4711)"
    running.pop()
    assert contention.neighbours(0) == ""

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(contention, "import_module", missing)
    monkeypatch.setattr(contention, "_memory", lambda index: (70 << 30, 80 << 30))
    assert contention.neighbours(0) == "somebody who holds 10.0 GiB of its memory"
    monkeypatch.setattr(contention, "_memory", lambda index: ((80 << 30) - (1 << 29), 80 << 30))
    assert contention.neighbours(0) == ""
