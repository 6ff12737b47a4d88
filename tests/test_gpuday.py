"""A GPU day on the CPU: parts that work, fail, hang, die or cannot run; resuming; what the report holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flashsmith.gpuday import machine, work
from flashsmith.gpuday.__main__ import main
from flashsmith.gpuday.plan import MINUTES, Part, parts
from flashsmith.gpuday.report import SECTIONS, markdown, write_markdown
from flashsmith.gpuday.runner import read_state, run_day, run_part
from flashsmith.gpuday.tiles import PROBLEMS, random_tiles
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import KernelName, KernelSpec
from flashsmith.spec.limits import why_illegal

ROOT = Path(__file__).parents[1]


def python(program: str, found: Any = None) -> Callable[[Path], list[str]]:
    """A command that writes `found` and then runs a program."""
    head = f"import json, os, sys, time; F = {found!r}; F is None or open(sys.argv[1], 'w').write(json.dumps(F));"
    return lambda file: [sys.executable, "-c", head + program, str(file)]


def part(name: str, program: str = "", found: Any = None, seconds: float = 20, **options: Any) -> Part:
    return Part(name=name, seconds=seconds, command=python(program, found), **options)


GOOD = part("good", found={"x": 1})
PLAN = (
    GOOD,
    part("raises", "raise ValueError('no such thing')", found=[1]),
    part("exits", "sys.exit('two tests failed')"),
    part("dies", "os.kill(os.getpid(), 11)", found=[2]),
    part("hangs", "time.sleep(60)", found=[1, 2, 3], seconds=1.5),
    part("cannot", "print('no such tool here'); sys.exit(3)"),
    part("unwanted", "open('/tmp/never', 'w')", why_not=lambda: "optuna is not installed here"),
    Part(name="missing", seconds=5, command=lambda file: ["/no/such/program"]),
    part("garbage", "open(sys.argv[1], 'w').write('{')"),
    part("last", found={"y": 2}),
)


def test_no_part_ends_the_day(tmp_path: Path) -> None:
    """Whatever a part does, those after it run; what it had found is kept, and why it ended is said."""
    reports: list[int] = []
    state = run_day(PLAN, tmp_path, 5, report=lambda state: reports.append(len(state["parts"])))
    found = state["parts"]
    assert {name: p["status"] for name, p in found.items()} == {
        "good": "done", "raises": "failed", "exits": "failed", "dies": "failed", "hangs": "timeout",
        "cannot": "skipped", "unwanted": "skipped", "missing": "failed", "garbage": "done", "last": "done",
    }  # fmt: skip
    assert found["good"]["found"] == {"x": 1} and found["last"]["found"] == {"y": 2}
    assert found["raises"]["found"] == [1] and "ValueError: no such thing" in found["raises"]["reason"]
    assert "Traceback" in found["raises"]["output"]
    assert "two tests failed" in found["exits"]["reason"]
    assert "exit status -11" in found["dies"]["reason"]
    assert found["hangs"]["found"] == [1, 2, 3] and "killed after 2 s" in found["hangs"]["reason"]
    assert found["cannot"]["reason"] == "no such tool here"
    assert found["unwanted"]["reason"] == "optuna is not installed here" and found["unwanted"]["seconds"] == 0
    assert "does not start" in found["missing"]["reason"] and found["garbage"]["found"] is None
    assert reports == list(range(1, 11)) and read_state(tmp_path) == state


def test_what_a_killed_part_started_is_killed_too(tmp_path: Path) -> None:
    """A measuring process that outlives its part would disturb every time after it."""
    pid = tmp_path / "pid"
    child = f"import subprocess; p = subprocess.Popen(['sleep', '60']); open({str(pid)!r}, 'w').write(str(p.pid));"
    assert run_part(part("parent", child + "time.sleep(60)"), 1.5)["status"] == "timeout"
    deadline = time.monotonic() + 5
    while _alive(int(pid.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(int(pid.read_text()))


def _alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False


def test_a_day_is_resumed(tmp_path: Path) -> None:
    """What is done is not run again; what failed, hung or could not run is; --fresh runs all."""
    count = tmp_path / "count"
    counted = part("counted", f"open({str(count)!r}, 'a').write('x')")
    run_day([counted, part("second", "sys.exit(1)")], tmp_path, 5)
    state = run_day([counted, part("second", found=5)], tmp_path, 5)
    assert count.read_text() == "x" and state["parts"]["second"] == {**state["parts"]["second"], "status": "done"}
    run_day([counted], tmp_path, 5, fresh=True)
    assert count.read_text() == "xx" and "second" in read_state(tmp_path)["parts"]


def test_time_that_is_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A part with no time left is not started, and has no outcome: the next run does it."""
    now = [0.0]

    def tick() -> float:
        now[0] += 20
        return now[0]

    state = run_day([GOOD, part("late", found=1)], tmp_path, 0.5, clock=tick)
    assert list(state["parts"]) == ["good"] and "late: not started" in capsys.readouterr().err
    assert run_day([GOOD, part("late", found=1)], tmp_path, 5)["parts"]["late"]["status"] == "done"


def test_a_limit_is_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashsmith.gpuday.runner.LEAST_S", 0.5)
    state = run_day([part("long", "time.sleep(60)", seconds=600)], tmp_path, 0.02)
    assert state["parts"]["long"]["status"] == "timeout" and state["parts"]["long"]["seconds"] < 15


def test_without_a_device_the_day_ends_at_once(tmp_path: Path) -> None:
    vital = part("environment", "print('no CUDA device is here'); sys.exit(3)", vital=True)
    assert list(run_day([vital, GOOD], tmp_path, 5)["parts"]) == ["environment"]


def test_two_gpus_do_not_share_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def on(gpu: str) -> Part:
        return part("environment", found={"gpu": gpu}, vital=True)

    run_day([on("NVIDIA H200"), GOOD], tmp_path, 5)
    state = run_day([on("NVIDIA L4"), GOOD, part("more", found=1)], tmp_path, 5)
    assert "another GPU" in capsys.readouterr().err
    assert state["parts"]["environment"]["found"] == {"gpu": "NVIDIA H200"} and "more" not in state["parts"]
    assert run_day([on("NVIDIA H200"), part("more", found=1)], tmp_path, 5)["parts"]["more"]["status"] == "done"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"parts": 3}', b"\xff"])
def test_a_damaged_state_is_kept_and_started_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "report.json").write_bytes(content)
    assert run_day([GOOD], tmp_path, 5)["parts"]["good"]["status"] == "done"
    assert (tmp_path / "report.damaged.json").read_bytes() == content


def test_the_plan_of_a_day(tmp_path: Path) -> None:
    """Correctness first, tuning before the bench; every command is a part that `work` knows; four bf16 problems."""
    plan = parts(tmp_path)
    names = [p.name for p in plan]
    assert names[:2] == ["environment", "tests"] and len(set(names)) == len(names) and plan[0].vital
    assert names.index("tune d64 causal") < names.index("bench d128")
    assert sum(name.startswith("bench ") for name in names) == 4 and MINUTES <= 7
    for each in plan:
        command = each.command(tmp_path / "found.json")
        assert command[:3] == [sys.executable, "-m", "flashsmith.gpuday.work"] and command[4] in work.PARTS
        assert each.name.split()[0] in SECTIONS
    assert sum(p.seconds for p in plan if p.name.startswith("tune")) <= 180


def test_the_day_on_this_machine(tmp_path: Path) -> None:
    """The real command, from a folder of its own. Without a GPU it says so and ends."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_day.py"), "--out", "day"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "no CUDA device is here" in done.stderr
    assert "| environment | skipped |" in (tmp_path / "day" / "report.md").read_text()


def test_a_checkout_runs_without_an_installation(tmp_path: Path) -> None:
    """Links show the checkout as the package; no finder of an editable installation is asked."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import gpu_day

    gpu_day.link_package(tmp_path)
    program = (
        "import sys; sys.meta_path = [m for m in sys.meta_path if 'editable' not in repr(m).lower()];"
        "import flashsmith as fs; from flashsmith.gpuday.plan import parts; from flashsmith.gpuday.machine import ROOT;"
        "print(fs.__file__, fs.load_best(fs.Problem(dtype='bf16', d=64), 'forward', 'a100').source.text[:10], ROOT)"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd="/")  # fmt: skip
    assert done.stdout.split() == [str(tmp_path / "flashsmith" / "__init__.py"), "//", "forward", str(ROOT)]


def test_the_runner_imports_little() -> None:
    """No PyTorch, CuPy, Optuna or platformdirs in the process that watches the others."""
    program = "import flashsmith.gpuday.__main__, sys; print([m for m in %r if m in sys.modules])"
    heavy = ("torch", "cupy", "optuna", "platformdirs", "numpy", "typer", "matplotlib")
    done = subprocess.run([sys.executable, "-c", program % (heavy,)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_only_some_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("flashsmith.gpuday.__main__.parts", lambda folder: PLAN)
    monkeypatch.setenv("FLASHSMITH_TUNED_DIR", "")
    assert main(["--out", str(tmp_path), "--only", "good,last"]) == 0
    assert list(read_state(tmp_path)["parts"]) == ["good", "last"]
    assert main(["--out", str(tmp_path), "--only", "raises"]) == 1
    assert str(tmp_path / "report.md") in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        main(["--minutes", "soon"])
    assert end.value.code == 2


@pytest.mark.parametrize("kernel", ["forward", "fused", "dkdv", "dq"])
def test_random_tiles_are_legal_and_different(kernel: KernelName) -> None:
    gpu = find_gpu("h200")
    for problem in PROBLEMS:
        tiles = random_tiles(kernel, problem, gpu, 30)
        assert len(tiles) == len(set(tiles)) == 30 and tiles == random_tiles(kernel, problem, gpu, 30)
        assert all(why_illegal(KernelSpec.of(kernel, problem, tile, gpu.sm), gpu) is None for tile in tiles)


def test_the_work_of_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is found is on disk as it comes; a missing package is a reason, an error is an error."""
    file = tmp_path / "found.json"
    monkeypatch.setattr(work, "_need_a_gpu", lambda: None)

    def finds(tell: work.Tell, word: str) -> None:
        tell([word])
        assert json.loads(file.read_text()) == [word]
        tell([word, word])

    def lacks(tell: work.Tell) -> None:
        raise ModuleNotFoundError("No module named 'optuna'", name="optuna")

    monkeypatch.setitem(work.PARTS, "finds", finds)
    monkeypatch.setitem(work.PARTS, "lacks", lacks)
    assert work.main([str(file), "finds", "a"]) == 0 and json.loads(file.read_text()) == ["a", "a"]
    assert work.main([str(file), "lacks"]) == 3
    assert capsys.readouterr().out.splitlines()[-1] == "optuna is not installed here"


def test_junit_is_read(tmp_path: Path) -> None:
    file = tmp_path / "tests.xml"
    file.write_text(
        '<testsuites><testsuite><testcase classname="a" name="one" time="1.5"/>'
        '<testcase classname="a" name="two" time="0.5"><failure message="off by 1">trace</failure></testcase>'
        '<testcase classname="a" name="three"><skipped message="two GPUs"/></testcase></testsuite></testsuites>'
    )
    assert machine.parse_junit(file) == {
        "passed": 1, "failed": [{"test": "a::two", "why": "off by 1"}],
        "skipped": [{"test": "a::three", "why": "two GPUs"}], "seconds": 2.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("output", "status", "errors"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0, 0),
        ("========= ERROR SUMMARY: 3 errors", 9, 3),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)", 9, 2),
        ("Error: Device not supported.", 1, None),
    ],
)
def test_a_sanitizer_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, status: int, errors: int | None
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\necho '{output}'\nexit {status}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if errors is None:
        with pytest.raises(work.CannotRun, match="Device not supported"):
            list(machine.run_sanitizers())
        return
    assert [(r["tool"], r["errors"]) for r in machine.run_sanitizers()] == [(t, errors) for t in machine.SANITIZERS]


def test_no_sanitizer_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(machine, "SANITIZER_PATHS", ())
    with pytest.raises(work.CannotRun, match="not installed"):
        list(machine.run_sanitizers())


def outcome(found: Any, status: str = "done", reason: str = "") -> dict[str, Any]:
    return {"status": status, "reason": reason, "seconds": 1.0, "found": found, "output": ""}


def bench_row(n: int, which: str, backend: str, tflops: float | None, note: str = "") -> dict[str, Any]:
    return {
        "which": which, "dtype": "bf16", "d": 128, "causal": True, "n": n, "backend": backend, "evidence": "measured",
        "seconds": tflops and 1e-3, "tflops": tflops, "peak_share": tflops and tflops / 1000, "note": note,
    }  # fmt: skip


def test_the_report_holds_every_finding(tmp_path: Path) -> None:
    tile = {"Br": 128, "Bc": 64}
    evidence = {"kind": "measured", "time_ms": 1.25, "tflops": 400.0, "trials": 8}
    line = {"key": "forward_x", "problem": {"d": 64, "causal": False}, "tile": tile}
    kept = {"n": 8192, "peak": 2e9, "kept": 1e9, "failed": "", "computed": {"P": 5e8, "written": 1e7}}
    state = {"parts": {
        "environment": outcome({"gpu": "NVIDIA H200", "copy_gb_s": 4300.04}),
        "tests": outcome({"passed": 9, "failed": [{"test": "t::x", "why": "off|by"}], "skipped": []}, "failed", "1"),
        "tune d128": outcome([{"kernel": "forward", "tile": tile, "evidence": evidence}]),
        "tune d64": outcome(None, "skipped", "optuna is not installed here"),
        "bench d128 causal": outcome([
            bench_row(512, "forward", "flashsmith", 300.0), bench_row(512, "forward", "torch math", None, "OOM: 1 GiB"),
            bench_row(512, "backward", "flashsmith", 200.0),
        ]),
        "tiles forward": outcome([{**line, "seconds": 2e-3}, {**line, "seconds": 4e-3}, {**line, "failure": "x"}]),
        "memory": outcome([{"way": "standard", **kept}, {"way": "flash", **kept}]),
        "sanitizer": outcome([{"tool": "memcheck", "errors": 0}], "timeout", "killed after 60 s"),
    }}  # fmt: skip
    text = markdown(state)
    for expected in (
        "| environment | done |", "| gpu | NVIDIA H200 |", "4300.0", "9 passed, 1 failed", "- FAILED t::x: off|by",
        "| forward | Br=128, Bc=64 | 1.2500 | 400 | measured | 8 |",
        "| tune d64 | skipped | 1 | optuna is not installed here |",
        "forward bf16 d=128 causal, measured", "| 512 | 300.0 (30%) | - |", "- torch math, N=512: OOM: 1 GiB",
        "| 512 | 200.0 (20%) |", "2 tiles measured, 1 not", "| d=64 | 2 | 2.000 | forward_x | 3.000 |",
        "| standard | 8192 | 2.000 | 1.000 | 0.500 |", "| flash | 8192 | 2.000 | 1.000 | 0.010 |",
        "| memcheck | 0 |", "| sanitizer | timeout | 1 | killed after 60 s |",
    ):  # fmt: skip
        assert expected in text, expected
    write_markdown(tmp_path, state)
    assert (tmp_path / "report.md").read_text() == text and len(list(tmp_path.iterdir())) == 1


def test_a_report_of_nothing() -> None:
    assert markdown({}).startswith("# A day on a GPU")
