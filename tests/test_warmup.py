"""Compiling ahead: every kernel that a list of problems asks for, once, and what fails does not stop the rest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from flashsmith import warmup
from flashsmith.errors import BadProblem, CompileError, NoTunedKernel, UsageError
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.problem import Problem
from flashsmith.warmup import parse_problem, warm_up

A100, P = find_gpu("a100"), Problem(dtype="bf16", d=64)


def test_each_kernel_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two lengths share their kernels, and two masks share delta and convert; the second time all are on disk."""
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path))
    asked = [Problem(dtype="bf16", d=64, causal=causal, Nq=n) for causal in (False, True) for n in (512, 1024)]
    told: list[Any] = []
    done = warm_up(asked, ("forward", "backward"), A100, progress=told.append)
    assert [w.key.split("_")[0] for w in done].count("forward") == 2 and len({w.key for w in done}) == len(done)
    assert told == list(done) and not any(w.cached or w.failure for w in done)
    again = warm_up(asked, ("forward", "backward"), A100)
    assert [w.key for w in again] == [w.key for w in done] and all(w.cached for w in again)


def test_a_later_process_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler is not called again, wherever the process runs."""
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path))
    warm_up([P], ("forward",), A100)
    program = (
        "import flashsmith as fs; import flashsmith.compile as c; c._compile = None;"
        "print(fs.load_best(fs.Problem(dtype='bf16', d=64), 'forward', 'a100').binary.cached)"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, cwd="/",
                          env={**os.environ}, check=True)  # fmt: skip
    assert done.stdout.strip() == "True"


def test_one_failure_does_not_stop_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    real = warmup.compile_source

    def broken(source: Any) -> Any:
        if source.spec.kernel == "fused":
            raise CompileError("NVRTC refused fused:\n\nmore")
        return real(source)

    monkeypatch.setattr(warmup, "compile_source", broken)
    done = warm_up([P], ("forward", "backward"), A100)
    assert [(w.key.split("_")[0], w.failure) for w in done] == [
        ("forward", ""), ("delta", ""), ("fused", "NVRTC refused fused:"), ("convert", ""),
    ]  # fmt: skip


def test_a_kernel_that_fails_its_check_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate of a fresh winner, for what a record restores (BUG-38)."""
    monkeypatch.setattr(warmup, "_why_wrong", lambda binary, problem, gpu: f"dK of {binary.spec.kernel} is off")
    (done,) = warm_up([P], ("forward",), A100, check=True)
    assert done.failure == "dK of forward is off"
    monkeypatch.undo()
    (done,) = warm_up([P], ("forward",), A100, check=True)
    assert not done.failure


def test_strict_mode_compiles_no_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHSMITH_STRICT", "1")
    with pytest.raises(NoTunedKernel, match="FLASHSMITH_STRICT"):
        warm_up([P], ("forward",), A100)


def test_a_problem_from_text() -> None:
    found = parse_problem("dtype=fp16, d=128,causal=true,Hq=32,Hk=8,Nq=4096", P)
    assert found == Problem(dtype="fp16", d=128, causal=True, Hq=32, Hk=8, Nq=4096)
    assert parse_problem("", P) == P


@pytest.mark.parametrize(
    ("text", "error", "needle"),
    [
        ("D=64", UsageError, "'D' is not one of"),
        ("d=x", UsageError, "d='x' is not a number"),
        ("causal=2", UsageError, "0 or 1"),
        ("d=12", BadProblem, "d=12"),
        ("dtype=fp8", BadProblem, "fp8"),
        ("Hq=6,Hk=4", BadProblem, "6 query heads"),
        ("d", UsageError, "d=''"),
        ("scale=2", UsageError, "scale"),
    ],
)
def test_a_bad_problem_is_refused(text: str, error: type[Exception], needle: str) -> None:
    with pytest.raises(error, match=needle):
        parse_problem(text, P)


def test_json_of_a_warmed_kernel_is_plain() -> None:
    from dataclasses import asdict

    (done,) = warm_up([P], ("forward",), A100)
    assert json.loads(json.dumps(asdict(done)))["rung"] == "default"
