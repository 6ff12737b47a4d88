"""Searches by measured time, with processes and devices that are faked; what is recorded, and what never is."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flashsmith import fleet, tune
from flashsmith.choose import ALIKE, choose
from flashsmith.cli import main
from flashsmith.errors import MeasuringBroken, NothingFound, UsageError, WrongResult
from flashsmith.measure import Again, Timing, Try
from flashsmith.measuring import contention
from flashsmith.measuring.process import Measurer
from flashsmith.objective import Candidate, Measured
from flashsmith.predict import Prediction
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.gpu import Gpu, find_gpu
from flashsmith.spec.kernel import KernelSpec
from flashsmith.spec.problem import Problem
from flashsmith.spec.record import read_records, record_path
from flashsmith.spec.space import legal_tiles
from flashsmith.spec.tile import ForwardTile
from flashsmith.study import open_study

from tests.measuring.test_process import alive
from tests.measuring.test_rematch import Now
from tests.measuring.works import Spec, gpu_with_bad_kernels, true_seconds
from tests.study.crew import predicted

GPU = find_gpu("a100")
PROBLEM = Problem(dtype="bf16", d=64, Hq=2, Nq=256)
DEFAULT = default_tile("forward", PROBLEM, GPU)
COMMAND = ("tune", "--gpu", "a100", "--d", "64", "--pass", "forward", "--nq", "256", "--heads", "2", "--batch", "1")


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
    """An A100 at index 3, measured by a faked work, in this process. The model finds all tiles alike."""
    state = SimpleNamespace(work=gpu_with_bad_kernels({}), held=[], predicted=lambda tile: 1e-3)

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

    def predict(binary: Any, problem: Problem, gpu: Gpu) -> Prediction:
        return Prediction(
            kernel="forward", gpu="a100", seconds=state.predicted(binary.spec.tile), tflops=1.0, spread=0.0,
            blocks_per_sm=1, pipes={}, bound_by="", spills_in_loop=0,
        )  # fmt: skip

    monkeypatch.setattr(fleet, "Measurer", InProcess)
    monkeypatch.setattr(tune, "devices_for", lambda gpu, by: () if by == "predicted" else (3,))
    monkeypatch.setattr(fleet, "device_identity", lambda index: "0000:07:00.0")
    monkeypatch.setattr(fleet, "Measured", partial(Measured, pool=Now(), builder=Spec))
    monkeypatch.setattr("flashsmith.objective.predict", predict)
    monkeypatch.setattr(fleet, "predicted_order", lambda job, model: (ForwardTile(Br=128, Bc=80, warps=8),))
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
    """Exit code 1, counts, the first error; no file, and an old one stays as it is (BUG-33). Failures of an earlier
    run do not end the next, where what caused them may be mended."""
    command = [*COMMAND, "--trials", "20", "--out", str(tmp_path)]
    first, second = (["--storage", str(tmp_path / f"{n}.journal")] for n in range(2))
    monkeypatch.setattr(fleet, "Measured", partial(Measured, pool=Now(), builder=broken("in detail")))
    assert main([*command, *first]) == 1
    message = capsys.readouterr().err
    assert f"{ALIKE} x CompileError: NVRTC refused" in message and "in detail" in message
    assert list(tmp_path.glob("*.json")) == []
    monkeypatch.setattr(fleet, "Measured", partial(Measured, pool=Now(), builder=Spec))
    assert main([*command, *first]) == 0
    assert f"holds 20 trials, {ALIKE} of them reused" in capsys.readouterr().out
    before = record_path(tmp_path, "a100").read_bytes()
    monkeypatch.setattr(fleet, "Measured", partial(Measured, pool=Now(), builder=broken("again")))
    assert main([*command, *second]) == 1
    assert record_path(tmp_path, "a100").read_bytes() == before


def test_a_complete_search_measures_nothing_again(
    device: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither a trial nor the rematch: the record is that of the first run, also in another folder (BUG-35)."""
    command = [*COMMAND, "--storage", str(tmp_path / "a.journal"), "--trials", "8", "--out"]
    assert main([*command, str(tmp_path / "one")]) == 0
    assert "holds 8 trials, 0 of them reused" in capsys.readouterr().out
    asked, record = len(device.held), record_path(tmp_path / "one", "a100").read_bytes()
    assert main([*command, str(tmp_path / "one")]) == 0
    assert "holds all 8 trials; nothing to do; record unchanged\n" in capsys.readouterr().out
    assert main([*command, str(tmp_path / "two")]) == 0
    assert len(device.held) == asked and record_path(tmp_path / "two", "a100").read_bytes() == record
    assert main([*[part.replace("8", "10") if part == "8" else part for part in command], str(tmp_path / "one")]) == 0
    assert "holds 10 trials, 8 of them reused" in capsys.readouterr().out and len(device.held) > asked


def test_the_model_saves_the_gpu_the_tiles_that_it_is_sure_of(
    device: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Predicted more than 15% behind the best prediction by then: not measured, counted, told. The default is measured
    whatever the model says, and no predicted time is in the study of the measured ones."""
    device.predicted = lambda tile: {True: 1.0e-3, False: 1.14e-3 if tile.Bc % 32 == 0 else 1.2e-3}[tile.Bc == 80]
    assert DEFAULT.Bc != 80
    storage = str(tmp_path / "a.journal")
    tuned = tune.tune_kernel("forward", PROBLEM, GPU, tmp_path, trials=30, storage=storage)
    winner = tuned.winner
    asked = {request.binary.spec.tile for request in device.held}
    refused = {c.tile: c.failure for c in winner.candidates if c.pruned}
    assert winner.saved == len(refused) > 0 and not asked & set(refused) and len(winner.candidates) == 30
    assert DEFAULT in asked and ForwardTile(Br=128, Bc=80, warps=8) in asked
    assert {tile.Bc % 32 == 0 or tile.Bc == 80 for tile in refused} == {False}
    assert set(refused.values()) == {"Pruned: predicted 20% behind the best prediction, and the model errs less."}
    with open_study(storage, "forward", PROBLEM, GPU, "measured") as study:
        assert study.name == winner.study and study.noted("saved") == winner.saved
        assert all(isinstance(c.time, Timing) for c in study.book.candidates if c.time)
        trials = study.storage.get_all_trials(study._study)
        assert [t.state.name for t in trials].count("PRUNED") == winner.saved
    with open_study(storage, "forward", PROBLEM, GPU, "predicted") as model:
        assert {type(c.time) for c in model.book.candidates} == {Prediction}
        foreseen = {c.tile for c in winner.candidates} & set(legal_tiles("forward", PROBLEM, GPU))
        assert {c.tile for c in model.book.candidates} == foreseen  # fields that it does not see have one value there
    assert main([*COMMAND, "--trials", "30", "--storage", storage, "--out", str(tmp_path)]) == 0
    assert f"nothing to do; record unchanged; the model saved the GPU {winner.saved} of them" in capsys.readouterr().out


def test_the_order_of_the_model_is_that_of_its_own_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half as many trials, found once; what the GPU's search asked about later does not change it."""
    job = fleet.Job(kernel="forward", problem=PROBLEM, gpu=GPU, trials=16, storage=str(tmp_path / "a.journal"))
    tried: list[Any] = []

    class Predicted:
        def __init__(self, *asked: Any, processes: int) -> None:
            assert asked == ("forward", PROBLEM, GPU) and processes == 2

        def submit(self, tile: Any) -> Any:
            tried.append(tile)
            return SimpleNamespace(result=lambda: candidate(tile, true_seconds(tile)))

        def final(self, candidates: Any) -> Any:
            return candidates

        def close(self) -> None:
            return None

    def candidate(tile: Any, seconds: float) -> Candidate:
        return Candidate(tile, predicted(seconds))

    monkeypatch.setattr(fleet, "Predicted", Predicted)
    with job.study("predicted") as model:
        order = fleet.predicted_order(job, model)
        assert len(tried) == 8 and list(order) == sorted(tried, key=true_seconds)
        model.add(candidate(next(tile for tile in legal_tiles("forward", PROBLEM, GPU) if tile not in tried), 1e-9))
        assert fleet.predicted_order(job, model) == order and len(tried) == 8


def test_two_gpus_share_a_search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A worker each, which locks its own; no tile is measured twice, and one of them holds the rematch."""
    used: dict[int, list[Any]] = {3: [], 5: []}
    both = threading.Event()

    class OnDevice:
        def __init__(self, make: Any) -> None:
            self.index, self.work = make.args[3], gpu_with_bad_kernels({})

        def __enter__(self) -> OnDevice:
            return self

        def __exit__(self, *error: object) -> None:
            return None

        def ask(self, request: Any) -> Any:
            with pytest.raises(UsageError), contention.device_lock(f"0000:{self.index:02}:00.0"):
                pass
            used[self.index].append(request)
            if self.index == 5:
                both.set()
            assert both.wait(60)
            time.sleep(0.02)
            return self.work(request)

        def close(self) -> None:
            return None

    class InThread:
        def __init__(self, count: int, work: Callable[[int], None]) -> None:
            self.threads = [threading.Thread(target=work, args=(n + 1,)) for n in range(count)]

        def __enter__(self) -> None:
            for thread in self.threads:
                thread.start()

        def __exit__(self, *error: object) -> None:
            for thread in self.threads:
                thread.join()

    monkeypatch.setattr(fleet, "Measurer", OnDevice)
    monkeypatch.setattr(fleet, "Helpers", InThread)
    monkeypatch.setattr(fleet, "device_identity", lambda index: f"0000:{index:02}:00.0")
    monkeypatch.setattr(fleet, "Measured", lambda *asked, judge, processes: Measured(*asked, pool=Now(), builder=Spec))
    monkeypatch.setattr(fleet, "predicted_order", lambda job, model: ())
    job = fleet.Job(kernel="forward", problem=PROBLEM, gpu=GPU, trials=24, storage=str(tmp_path / "j"), workers=2)
    winner = fleet.search_measured(job, (3, 5, 7), verify=lambda spec: "", progress=lambda candidate: None)
    tried = [[r.binary.spec.tile for r in requests if isinstance(r, Try)] for requests in used.values()]
    assert len(tried[0]) + len(tried[1]) == len({*tried[0], *tried[1]}) == len(winner.candidates) == 24
    assert min(map(len, tried)) > 2
    assert any(isinstance(r, Again) for r in used[3]) and not any(isinstance(r, Again) for r in used[5])
    assert winner.spec.tile == min((c.tile for c in winner.candidates), key=true_seconds)


@pytest.mark.parametrize(("workers", "storage"), [(0, "x"), (2, None)])
def test_workers_need_a_place_to_meet(workers: int, storage: str | None) -> None:
    with pytest.raises(UsageError, match=f"--workers {workers}: "):
        fleet.Job(kernel="forward", problem=PROBLEM, gpu=GPU, trials=1, workers=workers, storage=storage)


def test_no_more_workers_than_gpus(device: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--workers 2: 1 a100 can measure here, for a worker each"):
        tune.tune_kernel("forward", PROBLEM, GPU, tmp_path, trials=1, storage=str(tmp_path / "j"), workers=2)


def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "cores", lambda: 12)
    shares = [
        fleet.Job(kernel="forward", problem=PROBLEM, gpu=GPU, trials=1, workers=n, storage="x").processes
        for n in (1, 2, 5, 40)
    ]
    assert shares == [2, 6, 2, 1]


REAL = (*COMMAND[:5], "--pass", "forward", "--nq", "1024", "--batch", "1", "--trials")


def command_line(storage: Path, out: Path, trials: int, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "flashsmith.cli", *REAL, str(trials), "--storage", storage, "--out", out, *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def processes_below(pid: int) -> set[int]:
    children = [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return {*children}.union(*map(processes_below, children))


def told(storage: Path) -> int:
    return storage.read_text().count('"values":[') if storage.exists() else 0


def stop(storage: Path, out: Path, number: signal.Signals, trials: int = 6) -> tuple[int, str, float]:
    """Begin the command, send it a signal once it has told two trials: exit code, stderr, seconds until all ended."""
    running = command_line(storage, out, trials)
    while told(storage) < 2:
        assert running.poll() is None
        time.sleep(0.01)
    below, begin = processes_below(running.pid), time.monotonic()
    assert below
    running.send_signal(number)
    _, said = running.communicate(timeout=300)
    while any(map(alive, below)):
        assert time.monotonic() - begin < 10
        time.sleep(0.02)
    return running.returncode, said, time.monotonic() - begin


def test_a_killed_command_goes_on_where_it_stood(tmp_path: Path) -> None:
    """No process is left behind; the same command then leaves the record of an uninterrupted run, byte for byte; once
    more, and it does nothing; with more trials and two workers it goes further (BUG-35)."""
    straight = command_line(tmp_path / "straight.journal", tmp_path / "straight", 6)
    assert straight.wait(300) == 0, straight.stderr
    storage, out = tmp_path / "stopped.journal", tmp_path / "out"
    assert stop(storage, out, signal.SIGKILL)[0] == -9
    known = told(storage)
    assert 2 <= known < 6 and not list(out.glob("*.json"))
    again = command_line(storage, out, 6)
    assert f"holds 6 trials, {known} of them reused" in again.communicate(timeout=300)[0] and again.returncode == 0
    assert record_path(out, "a100").read_bytes() == record_path(tmp_path / "straight", "a100").read_bytes()
    third = command_line(storage, out, 6)
    assert "nothing to do; record unchanged" in third.communicate(timeout=300)[0] and third.returncode == 0
    further = command_line(storage, out, 9, "--workers", "2")
    assert "holds 9 trials, 6 of them reused" in further.communicate(timeout=300)[0] and further.returncode == 0


def test_a_command_that_is_stopped_says_how_to_go_on(tmp_path: Path) -> None:
    """Ctrl-C: exit code 130 within 5 s, no process left, and no trial RUNNING (BUG-32)."""
    storage = tmp_path / "a.journal"
    code, said, seconds = stop(storage, tmp_path / "out", signal.SIGINT, trials=60)
    assert code == 130 and seconds < 5
    assert re.search(
        rf"flashsmith: stopped; {storage} keeps the \d+ trials of forward bf16 d=64 on a100 so far\.", said
    )
    assert said.endswith("The same command goes on from there.\n")
    with open_study(str(storage), "forward", Problem(dtype="bf16", d=64, Nq=1024), GPU, "predicted") as study:
        assert len(study.book.candidates) == told(storage) >= 2
        states = {trial.state.name for trial in study.storage.get_all_trials(study._study)}
    assert states == {"COMPLETE", "FAIL"}


def test_a_broken_process_stops_the_search() -> None:
    """It is nobody's failure that no process starts; it does not fill the study with failed trials."""

    def ask(request: Any) -> Any:
        raise MeasuringBroken("the measuring process does not start")

    objective = partial(
        Measured, "forward", PROBLEM, GPU, SimpleNamespace(ask=ask, close=lambda: None), pool=Now(), builder=Spec
    )
    with pytest.raises(MeasuringBroken):
        choose("forward", PROBLEM, GPU, trials=5, objective=objective)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("by", "here", "indices"), [("auto", [2, 5], [2, 5]), ("auto", [], ()), ("predicted", [2], ())]
)
def test_times_are_measured_where_the_gpu_is(
    by: tune.By, here: list[int], indices: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashsmith.engines.driver.find_devices", lambda gpu: here)
    monkeypatch.setattr("flashsmith.engines.driver.why_no_cuda", lambda: "")
    assert tune.devices_for(GPU, by) == indices


def test_asking_for_measured_times_in_vain_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no a100 is here to measure on"):
        tune.devices_for(GPU, "measured")
    monkeypatch.setattr("flashsmith.engines.driver.find_devices", lambda gpu: [0])
    monkeypatch.setattr("flashsmith.engines.driver.why_no_cuda", lambda: "PyTorch is built without CUDA.")
    with pytest.raises(UsageError, match="built without CUDA"):
        tune.devices_for(GPU, "measured")
    assert tune.devices_for(GPU, "auto") == ()


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
