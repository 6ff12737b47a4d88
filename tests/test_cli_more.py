"""The commands for people who measure: memory, bench, warmup; warnings and errors of all."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from flashsmith import lookup
from flashsmith.cli import main

from tests.test_cli import run, run_json

D64 = ("--gpu", "a100", "--d", "64")


@pytest.fixture(autouse=True)
def nothing_warned_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "_warned", set())


def test_memory_prints_the_ledger(capsys: pytest.CaptureFixture[str]) -> None:
    """The figures of one head and of 32, beside what the emulator counted."""
    status, out, _ = run(capsys, "memory", "--n", "32768", "--heads", "32", "--d", "128", "--dtype", "fp16")
    assert status == 0
    for expected in ("2.147 GB", "68.72 GB", "256 KB", "counted on the emulator", "exactly O, m and l", "h200", "t4"):
        assert expected in out
    found: Any = run_json(capsys, "memory", "--n", "8192", "--heads", "4", "--batch", "2", "--gpu", "NVIDIA A10")
    assert found["bytes"]["P"] == 2 * 4 * 8192**2 * 2 and list(found["fits"]) == ["a10"]
    assert [c["agrees"] for c in found["counted"]] == [True, True] and found["measured"] == []


def test_memory_without_counting(capsys: pytest.CaptureFixture[str]) -> None:
    found: Any = run_json(capsys, "memory", "--gpu", "t4", "--no-count", "--kv-heads", "8")
    assert found["counted"] == [] and found["bytes"]["k"] * 4 == found["bytes"]["q"]


def test_memory_that_disagrees_is_an_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashsmith.footprint.Counted.agrees", False)
    status, out, _ = run(capsys, "memory", "--gpu", "a100", "--d", "64")
    assert status == 1 and "WRONG" in out


def test_bench_predicts_without_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A table that says predicted, the same as JSON, and a plot that says it as well."""
    pytest.importorskip("matplotlib")
    file = tmp_path / "bench.svg"
    status, out, _ = run(capsys, "bench", *D64, "--n", "512,1024", "--pass", "forward", "--plot", str(file))
    assert status == 0 and "forward bf16 d=64 on a100, predicted: TFLOP/s, % of 312" in out and "measured" not in out
    assert ElementTree.parse(file).getroot().tag.endswith("svg") and b"flashsmith, predicted" in _text(file)
    found: Any = run_json(capsys, "bench", *D64, "--n", "512", "--causal")
    assert [(r["which"], r["evidence"], r["n"]) for r in found["rows"]] == [
        ("forward", "predicted", 512), ("backward", "predicted", 512),
    ]  # fmt: skip


def _text(file: Path) -> bytes:
    """matplotlib draws glyphs, and writes what they spell in comments."""
    return file.read_bytes()


def test_warmup_compiles_a_list(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path))
    problems = ("d=64,causal=1", "d=72")
    status, out, err = run(capsys, "warmup", *problems, "--gpu", "a100", "--pass", "forward")
    assert status == 0 and "forward_bf16_d64_causal" in out and "forward_bf16_d72" in out
    assert out.count("compiled") == 2 and err.count("compiled in") == 2
    found: Any = run_json(capsys, "warmup", *problems, "--gpu", "a100", "--pass", "forward")
    assert [w["cached"] for w in found] == [True, True] and len(list(tmp_path.glob("forward*"))) == 2
    found = run_json(capsys, "warmup", *D64, "--pass", "backward", "--deterministic")
    assert [w["key"].split("_")[0] for w in found] == ["delta", "dkdv", "dq"]


def test_a_lower_rung_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, err = run(capsys, "render", "forward", *D64)
    assert status == 0 and out.startswith("// forward_bf16_d64")
    (line,) = err.strip().splitlines()
    assert line.startswith("flashsmith: ") and "a100.json has no record" in line


def test_strict_mode_is_exit_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHSMITH_STRICT", "1")
    status, out, err = run(capsys, "render", "forward", *D64)
    assert (status, out) == (1, "") and "FLASHSMITH_STRICT=1" in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        (("memory", "--gpu", "geforce9800"), "geforce9800"),
        (("memory", "--d", "12"), "d=12"),
        (("memory", "--n", "-1"), "Nq=-1"),
        (("memory", "--heads", "6", "--kv-heads", "4"), "6 query heads"),
        (("memory", "--n", "many"), "--n"),
        (("memory", "--gpu", "a100", "--no-count", "--measure"), "none is here"),
        (("bench", "--gpu", "t4"), "fp16 on t4"),
        (("bench", *D64, "--n", "512,x"), "512,x"),
        (("bench", *D64, "--n", "0"), "--n 0"),
        (("bench", *D64, "--plot", "x.pdf"), "x.pdf"),
        (("bench", *D64, "--plot", "/nowhere/x.png"), "/nowhere"),
        (("bench", *D64, "--pass", "sideways"), "sideways"),
        (("warmup", "d=12", "--gpu", "a100"), "d=12"),
        (("warmup", "Br=64", "--gpu", "a100"), "'Br'"),
        (("warmup", "--gpu", "a100", "--dtype", "fp8"), "fp8"),
        (("explain", "backwards", "--gpu", "a100"), "backwards"),
        (("explain", "forward", "--gpu", "../a100"), "../a100"),
        (("explain", "forward", *D64, "--plot", "x.pdf"), "x.pdf"),
        (("explain", "forward", *D64, "--plot", "x.svg"), "flashsmith tune makes one"),
        (("explain", "convert", *D64, "--plot", "x.svg"), "no search of convert is kept"),
        (("list", "--d", "12"), "d=12"),
        (("list", "--dtype", "fp8"), "fp8"),
        (("list", "--gpu", "geforce9800"), "geforce9800"),
        (("list", "--kernel", "backward"), "backward"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_clear_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], needle: str
) -> None:
    status, out, err = run(capsys, *arguments)
    assert status == 2 and needle in err and "Traceback" not in err and out == ""


def test_every_verb_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    from flashsmith.cli.app import COMMANDS

    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f" {command} " in out for command in COMMANDS)
    for command in COMMANDS:
        assert main([command, "--help"]) == 0
        assert "--json" in capsys.readouterr().out
    assert json.dumps(COMMANDS)
