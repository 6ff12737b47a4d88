"""Every command runs, prints its result on stdout, and fails with one clear line and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from flashsmith.cli import main

D64 = ("--gpu", "a100", "--d", "64")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of a command."""
    status = main(list(arguments))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> object:
    status, out, _ = run(capsys, *arguments, "--json")
    assert status == 0
    return json.loads(out)


def test_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "gpus")
    assert status == 0 and "rtx4090" in out and "fp16 only" in out
    listed = run_json(capsys, "gpus")
    assert isinstance(listed, list) and len(listed) == 14 and listed[1]["key"] == "a100"


@pytest.mark.parametrize("kernel", ["forward", "partial", "combine", "delta", "fused", "convert", "dkdv", "dq"])
def test_render_prints_the_kernel(capsys: pytest.CaptureFixture[str], kernel: str) -> None:
    status, out, _ = run(capsys, "render", kernel, *D64, "--causal")
    assert status == 0 and out.startswith(f"// {kernel}_bf16_d64") and f" {kernel}(" in out


def test_render_prints_what_serves_these_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "render", "partial", *D64, "--nq", "1", "--heads", "8", "--kv-heads", "2")
    assert status == 0 and "_Br16_" in out.splitlines()[0] and out.splitlines()[0].endswith("_pack1")


def test_render_takes_a_tile(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "render", "forward", *D64, "--tile", "Br=64,Bc=32")
    assert status == 0 and "Br64_Bc32" in out.splitlines()[0]


def test_render_shows_what_another_tile_changes(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "render", "forward", *D64, "--tile", "Bc=64", "--diff", "Bc=32")
    assert status == 0 and "-constexpr int Bc = 64;" in out and "+constexpr int Bc = 32;" in out


def test_emit_ptx_and_sass(capsys: pytest.CaptureFixture[str]) -> None:
    status, ptx, _ = run(capsys, "render", "delta", *D64, "--emit", "ptx")
    assert status == 0 and ".visible .entry delta(" in ptx
    status, sass, _ = run(capsys, "render", "delta", *D64, "--emit", "sass")
    lines = sass.splitlines()
    assert status == 0 and any(line.endswith("EXIT") or " EXIT" in line for line in lines)
    source = next(n for n, line in enumerate(lines) if "sum += o0 * g0 + o1 * g1;" in line)
    assert any("FFMA" in line for line in lines[source : source + 8])  # the machine code stands under its source line


def test_emit_cubin_is_what_nvdisasm_reads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from flashsmith.sass import disassemble

    file = tmp_path / "forward.cubin"
    status, out, _ = run(capsys, "render", "forward", *D64, "--emit", "cubin", "-o", str(file))
    assert status == 0 and out == ""
    assert "forward" in disassemble(file.read_bytes()).functions


def test_compile_reports_what_a_tuner_needs(capsys: pytest.CaptureFixture[str]) -> None:
    facts = run_json(capsys, "compile", "forward", *D64)
    assert isinstance(facts, dict)
    wanted = {"kernel", "tile", "threads", "registers", "spill_bytes", "smem_bytes", "blocks_per_sm", "seconds"}
    assert wanted <= set(facts) and facts["spill_bytes"] == 0 and facts["registers"] <= 255
    status, out, _ = run(capsys, "compile", "forward", *D64)
    assert status == 0 and "registers" in out


@pytest.mark.parametrize("arguments", [("forward",), ("backward",), ("backward", "--deterministic")], ids=" ".join)
def test_check(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    lengths = ("--nq", "33", "--nk", "70", "--heads", "4", "--kv-heads", "2")
    status, out, _ = run(capsys, "check", *arguments, *D64, *lengths)
    assert status == 0 and out.rstrip().endswith("ok")
    verdict = run_json(capsys, "check", *arguments, *D64, *lengths)
    assert isinstance(verdict, dict) and verdict["ok"] and verdict["engine"] == "emulator"


FEW = ("--nq", "1", "--nk", "700", "--heads", "4", "--kv-heads", "1")


def test_the_forward_of_warpgroups_is_compiled_and_checked(capsys: pytest.CaptureFixture[str]) -> None:
    """By name, on the part that has them; elsewhere the reason is said."""
    asked = ("--gpu", "h100-sxm", "--d", "64", "--tile", "Br=128,Bc=64,p_smem=0")
    facts = run_json(capsys, "compile", "forward90", *asked)
    assert isinstance(facts, dict) and (facts["registers"], facts["spill_bytes"], facts["blocks_per_sm"]) == (168, 0, 1)
    status, out, _ = run(capsys, "check", "forward", "--kernel", "forward90", *asked, "--nq", "70", "--heads", "1")
    assert status == 0 and "forward90_bf16_d64_sm90_Br128_Bc64" in out
    status, _, err = run(capsys, "render", "forward90", *D64)
    assert status != 0 and "no forward90 tile fits a100" in err and "sm_90a" in err


def test_the_forward_of_warpgroups_is_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    """By its own model, which names itself; what bounds it is its schedule, and its peak that of wgmma."""
    asked = ("forward", "--kernel", "forward90", "--gpu", "h200", "--d", "64")
    found = run_json(capsys, "predict", *asked)
    assert isinstance(found, dict)
    (kernel,) = found["kernels"]
    assert kernel["by"].startswith("warpgroup-model") and kernel["blocks_per_sm"] == 1
    assert 0.2 < kernel["pipes"]["tensor"] < 0.9 and 300 < found["tflops"] < 700
    status, out, _ = run(capsys, "predict", *asked)
    assert status == 0 and "of its wgmma peak" in out and "the order of the warpgroups' work" in out


@pytest.mark.parametrize(("d", "first"), [("64", "dkdv90_bf16"), ("136", "dkdv90_wide_bf16")])
def test_the_split_backward_of_warpgroups_is_checked(capsys: pytest.CaptureFixture[str], d: str, first: str) -> None:
    """By the name of one of its kernels; which the others are, the head dimension says."""
    asked = ("--kernel", "dq90", "--gpu", "h100-sxm", "--d", d, "--nq", "70", "--heads", "1", "--causal")
    status, out, _ = run(capsys, "check", "backward", *asked)
    assert status == 0 and first in out and "dq90_bf16" in out


def test_what_the_forward_of_warpgroups_has_not_yet_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = ("forward", "--kernel", "forward90", "--gpu", "h100-sxm", "--d", "64")
    status, _, err = run(capsys, "export", *asked, "-o", str(tmp_path / "made"))
    assert status == 2 and "takes tensor maps" in err and "Use forward." in err and not (tmp_path / "made").exists()


def test_few_queries_are_checked_by_parts(capsys: pytest.CaptureFixture[str]) -> None:
    for kernel, ran in ((), 2), (("--kernel", "forward"), 1):
        verdict = run_json(capsys, "check", "forward", *D64, "--causal", *FEW, *kernel)
        assert isinstance(verdict, dict) and verdict["ok"] and len(verdict["kernels"]) == ran
        assert all("pack1" in key for key in verdict["kernels"] if "combine" not in key)


def test_few_queries_are_predicted_and_explained_by_parts(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "predict", "forward", *D64, *FEW)
    assert isinstance(found, dict) and found["parts"] > 1
    assert [kernel["kernel"] for kernel in found["kernels"]] == ["partial", "combine"]
    whole = run_json(capsys, "predict", "forward", *D64, *FEW, "--kernel", "forward")
    assert isinstance(whole, dict) and (whole["parts"], len(whole["kernels"])) == (1, 1)
    status, out, _ = run(capsys, "predict", "forward", *D64, *FEW)
    assert status == 0 and f"the keys are cut into {found['parts']} parts" in out
    status, out, _ = run(capsys, "explain", "forward", *D64, *FEW)
    assert status == 0 and f"forward form: parts: {found['parts']} of up to" in out


def test_an_edited_source_stands_in(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A correct edit passes, a wrong one is found, a broken one shows its line."""
    _, text, _ = run(capsys, "render", "forward", *D64)
    file = tmp_path / "mine.cu"
    file.write_text(text.replace("// forward_bf16", "// my own forward_bf16"))
    assert run(capsys, "check", "forward", *D64, "--nq", "40", "--source", str(file))[0] == 0
    assert run(capsys, "compile", "forward", *D64, "--source", str(file))[0] == 0
    file.write_text(text.replace("ex2.approx.ftz.f32", "lg2.approx.ftz.f32"))
    status, out, _ = run(capsys, "check", "forward", *D64, "--nq", "40", "--source", str(file))
    assert status == 1 and "WRONG" in out
    file.write_text(text.replace("float ex2(float x)", "float ex2(flaot x)"))
    status, _, err = run(capsys, "compile", "forward", *D64, "--source", str(file))
    assert status == 1 and "flaot" in err and "> " in err


def test_predict(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "predict", "forward", *D64, "--nq", "4096")
    assert status == 0 and "predicted:" in out and "TFLOP/s on a100" in out
    prediction = run_json(capsys, "predict", "backward", *D64, "--nq", "4096", "--deterministic")
    assert isinstance(prediction, dict) and prediction["evidence"] == "predicted"
    assert [kernel["kernel"] for kernel in prediction["kernels"]] == ["delta", "dkdv", "dq"]


def test_tune_then_list_then_load(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A search of three tiles; the record is listed, loaded, and rendered."""
    from flashsmith.load import load_best
    from flashsmith.spec.problem import Problem

    arguments = ("--pass", "forward", "--trials", "3", "--nq", "1024", "--out", str(tmp_path))
    status, out, err = run(capsys, "tune", *D64, *arguments)
    assert status == 0 and str(tmp_path / "a100.json") in out and "flashsmith render forward" in out
    assert "3/3" in err
    listed = run_json(capsys, "list", "--out", str(tmp_path))
    assert isinstance(listed, list) and len(listed) == 1 and listed[0]["evidence"]["kind"] == "predicted"
    problem = Problem(dtype="bf16", d=64, B=2, Nq=1024)
    loaded = load_best(problem, "forward", "a100", tmp_path)
    assert loaded.rung == "record" and loaded.binary.registers > 0
    first = (tmp_path / "a100.json").read_bytes()
    assert run(capsys, "tune", *D64, *arguments)[0] == 0
    assert (tmp_path / "a100.json").read_bytes() == first


def test_list_without_records(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, _ = run(capsys, "list", "--out", str(tmp_path))
    assert status == 0 and "no records" in out


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        (("tune", "--gpu", "geforce9800", "--d", "64"), "geforce9800"),
        (("tune", "--gpu", "t4", "--d", "64"), "fp16 on t4"),
        (("tune", "--gpu", "a100", "--d", "12"), "d=12"),
        (("tune", "--gpu", "a100", "--d", "64", "--trials", "0"), "--trials 0"),
        (("tune", "--gpu", "a100", "--d", "64", "--dtype", "fp8"), "fp8"),
        (("tune", "--gpu", "a100", "--d", "64", "--out", "/dev/null/folder"), "/dev/null/folder"),
        (("render", "forward", "--gpu", "a100", "--tile", "Br=100"), "100"),
        (("render", "forward", "--gpu", "a100", "--tile", "Bx=1"), "Bx"),
        (("render", "backwards", "--gpu", "a100"), "backwards"),
        (("render", "forward", "--gpu", "a100", "-o", "/dev/null/x"), "/dev/null/x"),
        (("check", "forward", "--gpu", "a100", "--heads", "6", "--kv-heads", "4"), "6 query heads"),
        (("check", "forward", "--gpu", "a100", "--source", "/nowhere.cu"), "/nowhere.cu"),
        (("check", "forward", "--gpu", "a100", "--kernel", "dq"), "dq"),
        (("nonsense",), "nonsense"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_clear_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], needle: str
) -> None:
    status, out, err = run(capsys, *arguments)
    assert status == 2 and needle in err and "Traceback" not in err and out == ""


def test_it_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "flashsmith.cli", "gpus", "--json"]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    assert len(json.loads(process.stdout)) == 14
    bad = subprocess.run([*command[:3], "tune", "--gpu", "nothing"], capture_output=True, text=True, check=False)
    assert bad.returncode == 2 and len(bad.stderr.strip().splitlines()) == 1
