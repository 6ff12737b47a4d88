"""Anybody's kernel from its cubin: the same time as ours by the other door, and one clear error for what is missing."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flashsmith.cli import main
from flashsmith.errors import CannotPredict, UsageError
from flashsmith.load import load_best
from flashsmith.predict import predict, sizes_of, work_of
from flashsmith.predict_cubin import Launch, predict_cubin
from flashsmith.run import grid
from flashsmith.sass.rates import PIPE_OF
from flashsmith.spec.gpu import GPUS, find_gpu
from flashsmith.spec.limits import smem_bytes
from flashsmith.spec.problem import Problem
from flashsmith.work import tile_flops

from tests.sass.cuda import SCALE, SPILLS, compile_cubin, compile_scores
from tests.sass.recorded import DATA

A100 = find_gpu("a100")
SCORES = Launch(blocks=864, threads=128, smem_bytes=2 * 64 * 144, tensor_flops=2.0 * 128 * 64 * 64 * 64 * 864)
HGMMA = r"""
extern "C" __global__ void __launch_bounds__(128) group(float* x, unsigned long long a, int n) {
  float c[4] = {};
  for (int i = 0; i < n; i++) {
    asm volatile("wgmma.fence.sync.aligned;\nwgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3}, %4, %4, 1, 1, 1, 0, 0;\nwgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "l"(a));
  }
  x[threadIdx.x] = c[0] + c[1] + c[2] + c[3];
}
"""


def scores() -> bytes:
    return compile_scores(80)


def test_our_own_kernel_takes_the_same_time_by_this_door() -> None:
    problem = Problem(dtype="bf16", d=64, B=2, Nq=8192)
    binary = load_best(problem, "forward", A100).binary
    spec, sizes = binary.spec, sizes_of(problem)
    launch = Launch(
        blocks=grid(spec, sizes), threads=spec.threads, smem_bytes=smem_bytes(spec),
        tensor_flops=work_of(spec, sizes).tensor_flops, rare_share=0.0,
    )  # fmt: skip
    got = predict_cubin(binary.cubin, launch, A100)
    assert got.function == "forward" and got.target == "sm_80" and got.mean_error == 0.06
    assert got.time.seconds == predict(binary, problem, A100).seconds
    tiles = problem.keys // spec.tile.Bc  # type: ignore[union-attr]
    outside = got.time.iterations * tile_flops(spec)
    assert tiles - 3 < got.time.iterations <= tiles and outside <= launch.tensor_flops / launch.blocks


def test_what_is_behind_a_branch_counts_as_told() -> None:
    cubin = compile_scores(80, rare=True)
    always, never = (predict_cubin(cubin, replace(SCORES, rare_share=share), A100) for share in (1.0, 0.0))
    assert always.rare_instructions == never.rare_instructions > 100
    assert always.time.seconds > 1.1 * never.time.seconds


@pytest.mark.parametrize(
    ("sm", "key", "runs"),
    [
        ("80", "a100", True), ("80", "rtx3090", True), ("80", "rtx4090", True), ("86", "rtx4090", True),
        ("86", "a100", False), ("89", "rtx3090", False), ("80", "h100-sxm", False), ("90", "a100", False),
        ("80", "orin", False), ("87", "orin", True), ("90a", "h200", True), ("100a", "b200", True),
        ("100", "rtx5090", False), ("103", "b200", False), ("120", "rtx5090", True),
    ],
)  # fmt: skip
def test_a_cubin_runs_where_cuda_says(sm: str, key: str, runs: bool) -> None:
    cubin = compile_cubin(SCALE, sm)[0]  # type: ignore[arg-type]
    launch = Launch(blocks=1000, threads=256, hbm_bytes=2e9)
    if runs:
        found = predict_cubin(cubin, launch, GPUS[key])
        assert found.target == f"sm_{sm}" and found.time.seconds == pytest.approx(2e9 / (0.85e9 * GPUS[key].hbm_gbs))
    else:
        with pytest.raises(UsageError, match=f"sm_{sm}.*{key} is sm_{GPUS[key].sm}.*Build it for sm_{GPUS[key].sm}"):
            predict_cubin(cubin, launch, GPUS[key])


def test_a_variant_runs_on_its_own_sm_only() -> None:
    with pytest.raises(UsageError, match=r"sm_100a.*its own sm only"):
        predict_cubin(compile_cubin(SCALE, "100a")[0], SCORES, GPUS["rtx5090"])  # type: ignore[arg-type]


def test_warpgroups_are_estimated_and_said_to_be() -> None:
    cubin = compile_cubin(HGMMA, "90a")[0]  # type: ignore[arg-type]
    found = predict_cubin(cubin, Launch(blocks=132, threads=128, tensor_flops=1e12), GPUS["h200"])
    assert found.mean_error is None and found.time.iterations > 1000


@pytest.mark.parametrize(
    ("cubin", "launch", "name", "says"),
    [
        (lambda: b"no cubin", SCORES, None, "expected a cubin"),
        (scores, replace(SCORES, tensor_flops=0.0), None, "scores computes on tensor cores.*--flops"),
        (lambda: compile_cubin(SCALE, 80)[0], SCORES, None, "scale has no tensor instructions.*--hbm-bytes"),
        (scores, SCORES, "other", "no function other: .*: scores"),
        (scores, replace(SCORES, smem_bytes=200000), None, "shared memory a block"),
        (lambda: compile_cubin(SCALE.replace("scale", "a") + SCALE.replace("scale", "b"), 80)[0], SCORES, None,
         "several functions: .*: [ab], [ab]"),
    ],
    ids=["no cubin", "no FLOPs", "no bytes", "no such function", "does not fit", "several functions"],
)  # fmt: skip
def test_what_is_missing_is_named(cubin: Callable[[], bytes], launch: Launch, name: str | None, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        predict_cubin(cubin(), launch, A100, name)


@pytest.mark.parametrize(
    "wrong", [{"blocks": 0}, {"threads": 100}, {"threads": 2048}, {"smem_bytes": -1}, {"tensor_flops": -1.0},
              {"rare_share": 2.0}], ids=str,
)  # fmt: skip
def test_impossible_launches_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Launch(**{"blocks": 1, "threads": 32, **wrong})


def test_an_unknown_opcode_is_no_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(PIPE_OF, "MUFU")
    with pytest.raises(CannotPredict, match="MUFU: no table has it"):
        predict_cubin(scores(), SCORES, A100)


# ---- the command -------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "scores.cubin"
    path.write_bytes(compile_scores(80))
    return str(path)


LAUNCH = ("--gpu", "a100", "--grid", "108,4,2", "--block", "128", "--smem", "18432")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["predict", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_command_says_what_it_knows(capsys: pytest.CaptureFixture[str], file: str) -> None:
    status, out, _ = run(capsys, "--cubin", file, *LAUNCH, "--flops", f"{SCORES.tensor_flops}")
    assert status == 0
    for word in (
        "scores, sm_80",
        "tensor ",
        "shared ",
        "spread",
        "blocks/SM",
        "iterations",
        "bound by",
        "predicted for a100",
    ):
        assert word in out
    assert out.rstrip().endswith("mean error 6%")
    assert "%" in out and "5%" not in out.splitlines()[-1]


def test_the_command_as_json(capsys: pytest.CaptureFixture[str], file: str) -> None:
    arguments = ("--cubin", file, "--function", "scores", *LAUNCH, "--flops", f"{SCORES.tensor_flops}", "--json")
    status, out, _ = run(capsys, *arguments)
    found = json.loads(out)
    expected = predict_cubin(compile_scores(80), SCORES, A100).time
    assert status == 0 and found["evidence"] == "predicted" and found["mean_error"] == 0.06
    assert found["seconds"] == expected.seconds and found["tflops"] == expected.tflops
    assert found["iterations"] == pytest.approx(64) and found["bound_by"] == expected.bound_by
    assert found["pipes"] == expected.pipes and found["blocks_per_sm"] == expected.blocks_per_sm


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        (("FILE", *LAUNCH), "--flops"),
        (("FILE", "--gpu", "a100", "--block", "128"), "--grid"),
        (("FILE", "--gpu", "a100", "--grid", "8"), "--block"),
        (("FILE", "--gpu", "a100", "--grid", "8,x", "--block", "128"), "--grid 8,x"),
        (("FILE", "--gpu", "a100", "--grid", "8", "--block", "100"), "100 threads"),
        (("FILE", "--gpu", "h200", "--grid", "8", "--block", "128", "--flops", "1e9"), "sm_80"),
        (("/nowhere.cubin", *LAUNCH), "/nowhere.cubin"),
        ((__file__, *LAUNCH), "expected a cubin"),
        (("FILE", *LAUNCH, "--d", "64"), "--d is for a pass of ours"),
    ],
    ids=[
        "no FLOPs",
        "no grid",
        "no block",
        "bad grid",
        "bad block",
        "wrong sm",
        "no file",
        "no cubin",
        "an option of ours",
    ],
)
def test_bad_requests_are_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], file: str, arguments: tuple[str, ...], needle: str
) -> None:
    status, out, err = run(capsys, "--cubin", *(file if word == "FILE" else word for word in arguments))
    assert status == 2 and needle in err and out == "" and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        ((), "predict what?"),
        (("forward", "--cubin", "x.cubin"), "predict what?"),
        (("forward", "--grid", "8"), "--grid"),
    ],
    ids=["neither", "both", "an option of a cubin"],
)
def test_a_pass_and_a_cubin_exclude_each_other(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], needle: str
) -> None:
    status, _, err = run(capsys, *arguments)
    assert status == 2 and needle in err


def test_a_streaming_kernel_and_a_recorded_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "k.cubin"
    path.write_bytes(compile_cubin(SPILLS, 80)[0])
    status, out, _ = run(
        capsys, "--cubin", str(path), "--gpu", "a100", "--grid", "8", "--block", "1024", "--hbm-bytes", "1e9"
    )
    assert status == 0 and "memory bandwidth" in out and "iterations" not in out
    path.write_bytes(lzma.decompress((DATA / "fused_d64_sm80.cubin.xz").read_bytes()))
    status, _, err = run(capsys, "--cubin", str(path), *LAUNCH)
    assert status == 2 and "fused" in err and "convert" in err


def test_a_pass_says_how_busy_each_pipe_is(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "forward", "--gpu", "a100", "--d", "64")
    (shares,) = (text for text in out.splitlines() if text.startswith("forward pipes: tensor "))
    assert status == 0 and "shared " in shares and "mean error of the model 6%" in out
