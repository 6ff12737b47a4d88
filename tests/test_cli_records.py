"""list and explain: what is known of a kernel's speed, and why it serves."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flashsmith import lookup, paths
from flashsmith.cli.plot_search import draw_search
from flashsmith.errors import UsageError
from flashsmith.spec.record import write_record
from flashsmith.spec.search import Search, TimedTile
from flashsmith.spec.tile import ForwardTile

from tests.records import record_of
from tests.spec.test_record import RECORD
from tests.test_cli import run, run_json

D64 = ("--gpu", "a100", "--d", "64")
TILE, SECOND = ForwardTile(Br=64, Bc=32, warps=4), ForwardTile(Br=64, Bc=48, warps=4)
SEARCH = Search(
    seed=5, failed=2, pruned=3, default=None, runner_up=TimedTile(tile=SECOND, time_ms=1.25),
    curve=((1, 3.0), (17, 1.0)),
)  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder; nothing is shipped, and nothing was warned of yet."""
    monkeypatch.setattr(lookup, "_warned", set())
    monkeypatch.setattr(paths, "shipped_tuned_dir", lambda: tmp_path / "shipped")
    monkeypatch.setenv("FLASHSMITH_TUNED_DIR", str(tmp_path))
    return tmp_path


def test_a_table_for_each_kind_of_evidence(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    write_record(folder, record_of("forward", 1.25))
    write_record(folder, record_of("fused", 2.5, "measured"))
    status, out, _ = run(capsys, "list")
    measured, predicted = out.index("measured ms"), out.index("predicted ms")
    assert status == 0 and measured < out.index("2.500") < predicted < out.index("1.250")
    assert "NVIDIA A100, driver 580.65" in out and "issue-model 2" in out and "hidden" not in out


def test_what_does_not_serve_is_marked(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    write_record(folder, record_of("forward", 1.0))
    write_record(folder / "shipped", record_of("forward", 2.0))
    write_record(folder, replace(record_of("forward", 3.0, Nq=2048), source_sha256="0" * 64))
    status, out, _ = run(capsys, "list")
    lines = {ms: line for line in out.splitlines() for ms in ("1.000", "2.000", "3.000") if f" {ms} " in line}
    assert status == 0 and "hidden" in lines["2.000"] and "stale" in lines["3.000"]
    assert "hidden" not in lines["1.000"] and "stale" not in lines["1.000"]
    assert f"hidden, 1 of 3: by one in {folder / 'a100.json'}" in out
    assert "stale, 1 of 3: source_sha256 is that of another text" in out
    found: Any = run_json(capsys, "list")
    assert [(r["evidence"]["time_ms"], r["state"]) for r in found] == [(1.0, "serves"), (2.0, "hidden"), (3.0, "stale")]
    assert found[1]["path"] == str(folder / "shipped/a100.json") and found[0]["why"] == ""


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ((), 7), (("--gpu", "rtx4090"), 1), (("--gpu", "NVIDIA A100-SXM4-80GB"), 6), (("--kernel", "dq"), 1),
        (("--d", "128"), 1), (("--dtype", "fp16"), 1), (("--causal",), 1), (("--no-causal",), 6),
        (("--no-causal", "--d", "64", "--dtype", "bf16", "--kernel", "forward"), 2), (("--d", "72"), 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_filters(capsys: pytest.CaptureFixture[str], folder: Path, options: tuple[str, ...], count: int) -> None:
    changes: tuple[dict[str, Any], ...] = (
        {}, {"gpu": "rtx4090"}, {"d": 128}, {"dtype": "fp16"}, {"causal": True}, {"Nq": 2048},
    )  # fmt: skip
    for change in changes:
        write_record(folder, record_of("forward" if "gpu" not in change else "fused", 1.0, **change))
    write_record(folder, record_of("dq", 1.0))
    assert len(run_json(capsys, "list", *options)) == count  # type: ignore[arg-type]
    status, out, _ = run(capsys, "list", *options)
    assert status == 0 and (count > 0 or "no such records in" in out)


def test_explain_names_every_file(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """Without a record, with a near one, with a stale one: what was found where, and what serves."""
    status, out, _ = run(capsys, "explain", "forward", *D64, "--causal")
    assert status == 0 and str(folder / "a100.json") in out and "served by default" in out
    assert "nothing was timed" in out and "search" not in out and "runner-up" not in out and "(record)" not in out
    write_record(folder, record_of("forward", 1.0, causal=True, Nq=512, tile=TILE))
    status, out, _ = run(capsys, "explain", "forward", *D64, "--causal", "--nq", "4096")
    assert status == 0 and "the nearest is Nq=512" in out and "served by near length: Br=64,Bc=32" in out
    assert "predicted by issue-model 2 for B=2, 16 heads over 16, Nq=512, Nk=512: 1.000 ms" in out
    assert "search: 9 trials; the record keeps no more of them" in out
    write_record(folder, RECORD)  # of another text
    status, out, err = run(capsys, "explain", "forward", "--gpu", "a100", "--d", "128", "--causal")
    assert status == 0 and "source_sha256 is that of another text" in out and "is passed over" in err


@pytest.mark.parametrize("kind", ["measured", "predicted"])
def test_explain_keeps_times_of_two_kinds_apart(capsys: pytest.CaptureFixture[str], folder: Path, kind: Any) -> None:
    """A column for the record's times, named by their kind, and one for what the model says now."""
    write_record(folder, record_of("forward", 1.0, kind, tile=TILE, search=SEARCH, trials=24))
    status, out, _ = run(capsys, "explain", "forward", *D64, "--nq", "1024", "--batch", "2")
    lines = out.splitlines()
    (header,) = (line for line in lines if "predicted ms (now)" in line)
    assert status == 0 and f"{kind} ms (record)" in header
    assert [name in header for name in ("blocks/SM", "spills in loop", "tensor", "shared")] == [True] * 4
    end = header.index(f"{kind} ms (record)") + len(f"{kind} ms (record)")
    column = {line.split()[0]: line[:end].split()[-1] for line in lines[lines.index(header) + 1 :][:3]}
    assert column == {"served": "1.000", "runner-up": "1.250", "default": "-"}
    assert sum(line.startswith(("served: ", "runner-up: ", "default: ")) for line in lines) == 3  # what bounds each
    assert any(line.startswith("predicted now, beside what serves: ") for line in lines)
    told = "search: 24 trials, 2 failed, 3 turned down by the model, seed 5"
    curve = lines[next(n for n, line in enumerate(lines) if line.startswith(told)) :]
    assert curve[1].split() == ["trial", "best", kind, "ms"]
    assert [line.split() for line in curve[2:4]] == [["1", "3.000"], ["17", "1.000"]]


def test_explain_as_json_has_everything(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    write_record(folder, record_of("forward", 1.0, "measured", tile=TILE, search=SEARCH))
    found: Any = run_json(capsys, "explain", "forward", *D64, "--nq", "1024")
    assert found["served"]["rung"] == "record" and found["looked"][0]["serves"] is True
    assert found["record"]["search"]["curve"] == [[1, 3.0], [17, 1.0]] and found["form"]["form"] == "whole"
    assert [(c["roles"], c["recorded_ms"], c["recorded_kind"]) for c in found["contenders"]] == [
        (["served"], 1.0, "measured"), (["runner-up"], 1.25, "measured"), (["default"], None, None),
    ]  # fmt: skip
    assert all(c["predicted"]["bound_by"] and c["predicted"]["pipes"]["tensor"] for c in found["contenders"])
    assert set(found["predicted_against_served"]) == {"runner-up", "default"} and "where they lie" in found["inputs"]


def test_explain_says_which_form_of_the_backward_serves(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    status, out, _ = run(capsys, "explain", "delta", *D64)
    assert status == 0 and "served by default: warps=8" in out
    assert "backward form: fused: no records of both forms to compare" in out
    for kernel, ms in {"fused": 3.0, "dkdv": 0.5, "dq": 0.5}.items():
        write_record(folder, record_of(kernel, ms, "measured"))  # type: ignore[arg-type]
    status, out, _ = run(capsys, "explain", "dq", *D64, "--nq", "1024")
    assert status == 0 and "backward form: split: " in out and "measured for Nq=1024, Nk=1024 on a100" in out
    found: Any = run_json(capsys, "explain", "convert", *D64, "--nq", "1024")
    assert found["form"]["form"] == "split" and found["record"] is None
    assert "takes the tile of fused" in run(capsys, "explain", "convert", *D64, "--nq", "1024")[1]


def test_other_commands_take_the_form_that_serves(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """Unless they are asked for a kernel of the other one."""
    for kernel, ms in {"fused": 3.0, "dkdv": 0.5, "dq": 0.5}.items():
        write_record(folder, record_of(kernel, ms, Nq=8192))  # type: ignore[arg-type]

    def kernels(*options: str) -> list[str]:
        found: Any = run_json(capsys, "predict", "backward", *D64, *options)
        return [each["kernel"] for each in found["kernels"]]

    assert kernels() == ["delta", "dkdv", "dq"] == kernels("--kernel", "dq")
    assert kernels("--kernel", "fused") == ["delta", "fused", "convert"]
    status, _, err = run(capsys, "predict", "backward", *D64, "--deterministic", "--kernel", "fused")
    assert status == 2 and "fused is not part of this pass" in err


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_search_is_drawn(capsys: pytest.CaptureFixture[str], folder: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    search = replace(SEARCH, default=TimedTile(tile=SECOND, time_ms=2.0))
    record = record_of("forward", 1.0, "measured", tile=TILE, search=search, trials=24)
    write_record(folder, record)
    file = folder / f"search{suffix}"
    status, out, _ = run(capsys, "explain", "forward", *D64, "--nq", "1024", "--plot", str(file))
    assert status == 0 and "seed 5" in out
    if suffix == ".svg":  # matplotlib draws glyphs, and writes what they spell in comments
        assert ElementTree.parse(file).getroot().tag.endswith("svg")
        assert all(word in file.read_text() for word in ("measured ms", "trial", "default tile"))
    with pytest.raises(UsageError, match="--plot"):
        draw_search(record, search, folder / "nowhere" / f"x{suffix}")


def test_a_plot_without_matplotlib_is_one_line(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, err = run(capsys, "explain", "forward", *D64, "--plot", str(folder / "x.svg"))
    assert (status, out) == (2, "") and "pip install 'flashsmith[plot]'" in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("stride", "words"), [("64", "where they lie"), ("68", "copied first"), ("72", "where they lie")]
)
def test_explain_says_which_inputs_are_copied(capsys: pytest.CaptureFixture[str], stride: str, words: str) -> None:
    """Rows of 136 bytes do not all start on 16: cp.async cannot reach them."""
    status, out, _ = run(capsys, "explain", "forward", *D64, "--row-stride", stride)
    assert status == 0 and words in out
    assert run(capsys, "explain", "forward", *D64, "--row-stride", "8")[0] == 2
