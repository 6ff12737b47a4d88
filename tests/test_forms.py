"""Which form of the backward serves, by records written by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from flashsmith import lookup, paths
from flashsmith.compile import compile_source
from flashsmith.errors import StaleRecord
from flashsmith.forms import MARGIN, Choice, streaming_ms
from flashsmith.load import backward_form, forward_form, load_best, load_pass, pass_form
from flashsmith.predict import predict
from flashsmith.render import render
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import KernelName
from flashsmith.spec.problem import Problem
from flashsmith.spec.record import write_record

from tests.records import record_of

A100 = find_gpu("a100")
PROBLEM = Problem(dtype="bf16", d=64, B=2, Nq=1024)
FUSED = record_of("fused", 0.1)
DELTA, CONVERT = (streaming_ms(kernel, FUSED, A100) for kernel in ("delta", "convert"))  # ms
FLOPS = PROBLEM.flops("backward")


@pytest.fixture(autouse=True)
def nothing_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A shipped folder of the test's own, and no warning said yet."""
    monkeypatch.setattr(lookup, "_warned", set())
    monkeypatch.setattr(paths, "shipped_tuned_dir", lambda: tmp_path / "shipped")
    yield tmp_path / "shipped"


def keep(folder: Path, fused: float, dkdv: float, dq: float, kind: str = "predicted", **fields: object) -> None:
    """Records of both forms, with these ms."""
    times: dict[KernelName, float] = {"fused": fused, "dkdv": dkdv, "dq": dq}
    for kernel, ms in times.items():
        write_record(folder, record_of(kernel, ms, kind, **fields))  # type: ignore[arg-type]


def form(folder: Path, problem: Problem = PROBLEM, gpu: str = "a100") -> Choice:
    return backward_form(problem, find_gpu(gpu), folder=folder)


def test_without_records_fused_serves(tmp_path: Path) -> None:
    assert form(tmp_path) == Choice(form="fused", reason="fused: no records of both forms to compare")
    write_record(tmp_path, FUSED)
    write_record(tmp_path, record_of("dkdv", 0.001))
    assert form(tmp_path).form == "fused" and "no records of both" in form(tmp_path).reason


def test_the_faster_form_serves_and_says_by_how_much(tmp_path: Path) -> None:
    """TFLOP/s of the whole pass, delta and convert included, when times are predicted."""
    keep(tmp_path, fused=0.2, dkdv=0.05, dq=0.05)
    split, fused = (FLOPS / ms / 1e9 for ms in (0.1 + DELTA, 0.2 + DELTA + CONVERT))
    reason = f"split: {split:.0f} against {fused:.0f} TFLOP/s, predicted for Nq=1024, Nk=1024 on a100"
    assert form(tmp_path) == Choice(form="split", reason=reason)
    assert list(load_pass(PROBLEM, "backward", "a100", folder=tmp_path)) == ["delta", "dkdv", "dq"]
    keep(tmp_path, fused=0.09, dkdv=0.05, dq=0.05)
    assert form(tmp_path).reason.startswith("fused: ") and form(tmp_path).form == "fused"
    assert list(load_pass(PROBLEM, "backward", "a100", folder=tmp_path)) == ["delta", "fused", "convert"]


@pytest.mark.parametrize(("gain", "served"), [(MARGIN - 0.001, "fused"), (MARGIN + 0.001, "split")])
def test_a_gain_within_the_margin_changes_nothing(tmp_path: Path, gain: float, served: str) -> None:
    split = 0.1 + DELTA
    keep(tmp_path, fused=(1 + gain) * split - DELTA - CONVERT, dkdv=0.06, dq=0.04)
    assert form(tmp_path).form == served
    assert ("split must gain more than 5%" in form(tmp_path).reason) == (served == "fused")


@pytest.mark.parametrize(("gain", "served"), [(MARGIN - 0.001, "fused"), (MARGIN + 0.001, "split")])
def test_measured_times_have_no_predicted_ones_added(tmp_path: Path, gain: float, served: str) -> None:
    """Neither delta's nor convert's, and the reason says that they are left out."""
    keep(tmp_path, fused=0.1 * (1 + gain), dkdv=0.06, dq=0.04, kind="measured")
    assert form(tmp_path).form == served
    assert "measured for Nq=1024" in form(tmp_path).reason and "delta and convert left out" in form(tmp_path).reason


@pytest.mark.parametrize("kernel", ["delta", "convert"])
def test_the_time_of_delta_and_convert_is_what_the_model_says(kernel: KernelName) -> None:
    spec = load_best(PROBLEM, kernel, "a100").spec
    assert spec.tile == FUSED.tile or kernel == "delta"
    found = predict(compile_source(render(spec)), PROBLEM, A100)
    assert streaming_ms(kernel, FUSED, A100) == pytest.approx(1e3 * found.seconds)


@pytest.mark.parametrize(
    "odd",
    [
        record_of("dq", 0.01, "measured"),
        record_of("dq", 0.01, Nq=2048),
        record_of("dq", 0.01, B=1),
        record_of("dq", 0.01, by="issue-model 3"),
        record_of("dq", 0.01, causal=True),
    ],
    ids=["kind", "lengths", "batch", "model", "mask"],
)
def test_what_is_not_compared(tmp_path: Path, odd: object) -> None:
    """Were the odd one counted, split would be far ahead."""
    for record in (record_of("fused", 1.0), record_of("dkdv", 0.01), odd):
        write_record(tmp_path, record)  # type: ignore[arg-type]
    assert form(tmp_path).form == "fused" and "no records of both forms" in form(tmp_path).reason


def test_measured_times_outrank_predicted_ones(tmp_path: Path) -> None:
    """Those of other lengths, too; among one kind the nearest decides."""
    keep(tmp_path, fused=0.1, dkdv=0.1, dq=0.1)
    assert form(tmp_path).form == "fused"
    keep(tmp_path, fused=9.0, dkdv=2.0, dq=2.0, kind="measured", Nq=8192)
    assert form(tmp_path).form == "split" and "measured for Nq=8192" in form(tmp_path).reason
    keep(tmp_path, fused=2.0, dkdv=2.0, dq=2.0, kind="measured", Nq=2048)
    assert form(tmp_path).form == "fused" and "measured for Nq=2048" in form(tmp_path).reason


def test_a_gpu_of_the_same_class_lends_its_times(tmp_path: Path) -> None:
    """With its own memory's rate for delta and convert: that of an A100 of 80 GB, for one of 40."""
    keep(tmp_path, fused=0.2, dkdv=0.05, dq=0.05)
    there, here = form(tmp_path, gpu="a100-40gb"), form(tmp_path)
    assert there == here and "on a100" in there.reason
    assert form(tmp_path, gpu="rtx3090").reason.endswith("to compare")


def test_a_gpu_speaks_for_itself_first(tmp_path: Path) -> None:
    """At other lengths, before one of its class at these."""
    keep(tmp_path, fused=1.0, dkdv=0.1, dq=0.1)
    assert form(tmp_path, gpu="a100-40gb").form == "split"
    keep(tmp_path, fused=1.0, dkdv=1.0, dq=1.0, gpu="a100-40gb", Nq=4096)
    assert form(tmp_path, gpu="a100-40gb").form == "fused" and form(tmp_path).form == "split"


def test_a_pair_may_lie_in_two_folders(tmp_path: Path, nothing_shipped: Path) -> None:
    keep(nothing_shipped, fused=0.1, dkdv=0.2, dq=0.2)
    assert form(tmp_path).form == "fused"
    write_record(tmp_path, record_of("dkdv", 0.01))
    assert form(tmp_path).form == "fused"  # 0.1 against 0.21
    write_record(tmp_path, record_of("dq", 0.01))
    assert form(tmp_path).form == "split"  # the user's go first


def test_a_stale_record_is_no_evidence(tmp_path: Path) -> None:
    keep(tmp_path, fused=1.0, dkdv=0.1, dq=0.1)
    write_record(tmp_path, replace(record_of("dq", 0.1), source_sha256="0" * 64))
    with pytest.warns(StaleRecord, match="dq_bf16"):
        assert form(tmp_path).form == "fused"


def test_deterministic_is_split_whatever_the_records_say(tmp_path: Path) -> None:
    keep(tmp_path, fused=0.01, dkdv=0.1, dq=0.1)
    asked = backward_form(PROBLEM, A100, deterministic=True, folder=tmp_path)
    assert asked == Choice(form="split", reason="split: deterministic gradients were asked for")
    assert list(load_pass(PROBLEM, "backward", "a100", deterministic=True, folder=tmp_path)) == ["delta", "dkdv", "dq"]


# ---- two families ------------------------------------------------------------------------------------------------

H100 = "h100-sxm"
WIDE = replace(PROBLEM, d=192)


def hopper(folder: Path, kind: str = "predicted", **ms: float) -> None:
    """Records for an H100, of kernels by name."""
    for kernel, time in ms.items():
        write_record(folder, record_of(kernel, time, kind, gpu=H100))  # type: ignore[arg-type]


def test_on_sm_90_kernels_of_warpgroups_come_first(tmp_path: Path) -> None:
    """Where nothing was timed, and they can serve; few rows, fp32 and other parts have the other family."""
    gpu = find_gpu(H100)
    assert forward_form(PROBLEM, gpu, tmp_path).form == "whole90" and form(tmp_path, gpu=H100).form == "fused90"
    assert form(tmp_path, WIDE, H100).form == "fused" and forward_form(WIDE, gpu, tmp_path).form == "whole90"
    assert backward_form(PROBLEM, gpu, deterministic=True, folder=tmp_path).form == "split90"
    assert backward_form(WIDE, gpu, deterministic=True, folder=tmp_path).form == "split90_wide"
    others = [replace(PROBLEM, dtype="fp32"), replace(PROBLEM, B=16, Nq=64), replace(PROBLEM, Nk=0)]
    assert [forward_form(other, gpu, tmp_path).form for other in others] == ["whole"] * 3
    assert (
        forward_form(PROBLEM, A100, tmp_path).form == "whole" == forward_form(PROBLEM, find_gpu("b200"), tmp_path).form
    )
    assert pass_form(PROBLEM, "forward", gpu, folder=tmp_path, maps=False).form == "whole"
    assert pass_form(PROBLEM, "backward", gpu, folder=tmp_path, maps=False).form == "fused"
    assert pass_form(PROBLEM, "backward", gpu, True, folder=tmp_path, maps=False).form == "split"


def test_families_are_compared_each_by_its_own_model(tmp_path: Path) -> None:
    gpu = find_gpu(H100)
    hopper(tmp_path, forward=0.1, forward90=0.09)
    assert forward_form(PROBLEM, gpu, tmp_path).form == "whole90"
    hopper(tmp_path, forward=0.08)
    found = forward_form(PROBLEM, gpu, tmp_path)
    assert found.form == "whole" and "against" in found.reason and "predicted for Nq=1024" in found.reason
    write_record(tmp_path, record_of("forward90", 0.09, gpu=H100, by="warpgroup-model 0"))  # a model of yesterday
    assert forward_form(PROBLEM, gpu, tmp_path).form == "whole90"


def test_of_four_forms_the_fastest_serves_and_the_others_are_named(tmp_path: Path) -> None:
    hopper(tmp_path, fused=1.0, dkdv=0.4, dq=0.4, fused90=0.5, dkdv90=0.3, dq90=0.1)
    found = form(tmp_path, gpu=H100)
    assert found.form == "split90" and all(name in found.reason for name in ("(fused90)", "(fused)", "(split)"))
    hopper(tmp_path, "measured", fused=0.2, dkdv=0.4, dq=0.4, fused90=0.5, dkdv90=0.3, dq90=0.1)
    found = form(tmp_path, gpu=H100)
    assert found.form == "fused" and "measured" in found.reason
    assert found.reason.endswith(", delta, convert and convert90 left out")


def test_evidence_on_all_forms_goes_before_measured_times_of_some(tmp_path: Path) -> None:
    """Who has measured the old kernels only does not lose the new ones."""
    hopper(tmp_path, fused=1.0, dkdv=0.4, dq=0.4, fused90=0.5, dkdv90=0.3, dq90=0.4)
    for kernel in ("fused", "dkdv", "dq"):
        write_record(tmp_path, record_of(kernel, 0.1, "measured", gpu=H100, Nq=2048))  # type: ignore[arg-type]
    assert form(tmp_path, gpu=H100).form == "fused90"
