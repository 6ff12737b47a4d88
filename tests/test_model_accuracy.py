"""The tables of docs/model.md are what benchmarks/model_accuracy.py prints; measured tiles stand beside predictions."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from flashsmith.compile import version_text
from flashsmith.spec.problem import Problem
from flashsmith.spec.tile import ForwardTile

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import document  # noqa: E402
import measured_tiles  # noqa: E402
import model_accuracy  # noqa: E402
import published  # noqa: E402
import published_rows  # noqa: E402
from markdown_table import table  # noqa: E402

LINES = document.read(model_accuracy.DOCUMENT, model_accuracy.COMMAND).splitlines()


def rows_under(head: tuple[str, ...], after: tuple[str, ...] | None = None) -> list[list[str]]:
    """The cells of a table of the document: the first of this head, after that of another if one is named."""
    before = LINES.index(next(iter(table(after, ())))) if after else 0
    start = LINES.index(next(iter(table(head, ()))), before) + 2
    rows = []
    for line in LINES[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def line_of(cells: tuple[str, ...]) -> str:
    return list(table(("",), [cells]))[-1]


@pytest.fixture
def same_compilers() -> None:
    """Another compiler makes other machine code, and other rows."""
    said = LINES[0]
    if f"NVRTC {version_text()} " not in said:
        pytest.skip(f"the document's tables were made otherwise: {said}")


@pytest.mark.usefixtures("same_compilers")
def test_a_row_of_each_table_is_what_the_command_prints() -> None:
    for speed in (published.SPEEDS[1], published.SPEEDS[25]):  # A100 forward; one of another sm, backward, causal
        assert line_of(published_rows.compare_speed(speed)[1]) in LINES, speed
    assert line_of(published_rows.compare_tiles(published.COMMENTS[0])) in LINES


@pytest.mark.usefixtures("same_compilers")
def test_a_row_of_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    if not LINES[0].startswith(model_accuracy.versions()):
        pytest.skip(f"the document's tables were made otherwise: {LINES[0]}")
    assert line_of(published_rows.compare_triton(published.TRITON_SPEEDS[3])[1]) in LINES


def test_the_table_of_their_own_code_is_what_is_kept_of_it() -> None:
    """Line by line: nothing has to be compiled for it."""
    lines = list(model_accuracy.own_code_tables())
    start = LINES.index(lines[0])
    assert LINES[start : start + len(lines)] == lines


def test_every_published_figure_is_a_row_with_its_source() -> None:
    figures = [(s.gpu, f"{s.tflops:g}", s.source) for s in published.SPEEDS]
    assert [(row[0], row[8], row[10]) for row in rows_under(published_rows.SPEED_HEAD)] == figures
    assert [(row[0], row[10], row[12]) for row in rows_under(published_rows.OWN_HEAD)] == figures
    figures = [(s.gpu, f"{s.tflops:g}", s.source) for s in published.TRITON_SPEEDS]
    assert [(row[0], row[6], row[9]) for row in rows_under(published_rows.TRITON_HEAD)] == figures
    said = [comment.says for comment in published.COMMENTS]
    assert [row[4] for row in rows_under(published_rows.COMMENT_HEAD)] == said
    for name, source in published.SOURCES.items():
        assert f"- {name}: {source}" in LINES


@pytest.mark.parametrize(
    ("head", "predicted"),
    [(published_rows.OWN_HEAD, 9), (published_rows.SPEED_HEAD, 7)],
    ids=["own code", "our kernels"],
)
def test_means_follow_from_the_rows(head: tuple[str, ...], predicted: int) -> None:
    """`predicted` is the column of that name; what was published and the difference come after it."""
    compared = []
    for row in rows_under(head):
        tflops = float(row[predicted]) if row[predicted] else None
        one = published_rows.Compared(row[0], row[1], tflops, float(row[predicted + 1]))
        assert row[predicted + 2] == ("" if one.difference is None else f"{one.difference:+.0%}")
        compared.append(one)
    summary = rows_under(model_accuracy.SUMMARY_HEAD, after=head)
    assert [tuple(row) for row in summary] == model_accuracy.summary(compared)


def test_counts_follow_from_the_rows() -> None:
    assert model_accuracy.count_signs([row[-1] for row in rows_under(published_rows.COMMENT_HEAD)]) in LINES


# ---- measured tiles: the seconds below are made up, and of no GPU --------------------------------------------------

PROBLEM = Problem(dtype="bf16", d=64, Hq=8, Nq=1024)
FAST, SLOW = ForwardTile(Br=128, Bc=64, warps=4, q_steps=4), ForwardTile(Br=64, Bc=16, warps=4)


def line(tile: ForwardTile, **found: Any) -> dict[str, Any]:
    return {"key": "", "tile": asdict(tile), "problem": asdict(PROBLEM), **found}


def report(folder: Path, fast: float, slow: float) -> Path:
    """A report as `make gpu` writes it, with these seconds."""
    lines = [line(FAST, seconds=fast), line(SLOW, seconds=slow), line(FAST, failure="LaunchError: x")]
    parts = {
        "environment": {"status": "done", "found": {"gpu": "NVIDIA H200", "sms": 132, "sm": 90}},
        "tiles forward": {"status": "timeout", "found": lines},
        "tiles dq": {"status": "skipped", "found": None},
    }
    folder.mkdir()
    file = folder / "report.json"
    file.write_text(json.dumps({"parts": parts}))
    return file


def test_measured_tiles_stand_beside_their_predictions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two tiles of made-up times, one of which failed once as well."""
    file = report(tmp_path / "day", 1e-3, 2e-3)
    pairs = [measured_tiles.pair_of(kernel, each, gpu) for gpu, lines in [measured_tiles.read_report(file)]
             for kernel, each in lines]  # fmt: skip
    assert [pair.measured for pair in pairs] == [1e-3, 2e-3] and pairs[0].predicted < pairs[1].predicted
    assert model_accuracy.main(["--report", str(file)]) == 0
    out = capsys.readouterr().out
    assert "NVIDIA H200, 2 tiles measured" in out and "Br=64,Bc=16,warps=4" in out
    difference = pairs[1].predicted / 2e-3 - 1
    assert f"| {pairs[1].predicted * 1e3:.3f} | 2.000 | {difference:+.0%} |" in out
    assert "| forward | bf16 d=64 | 2 |" in out and "| 1.00 |" in out


def test_the_order_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every report below benchmarks/ is found; one in which the slow tile came out fast has a tau of -1."""
    monkeypatch.setattr(model_accuracy, "HERE", tmp_path)
    assert model_accuracy.main(["--report"]) == 0
    assert capsys.readouterr().out == "no measured report under benchmarks/\n"
    report(tmp_path / "day", 2e-3, 1e-3)
    assert model_accuracy.main(["--report"]) == 0
    assert "| -1.00 |" in capsys.readouterr().out


def test_kendall_tau() -> None:
    assert measured_tiles.kendall_tau([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(4 / 6)
    assert measured_tiles.kendall_tau([1, 2], [5, 5]) == 0
    assert measured_tiles.kendall_tau([1], [1]) is None
