"""The bench: rows that say what they are, backends that may fail, and a plot that never mixes evidence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from flashsmith import bench
from flashsmith.backends import FLEX, backends
from flashsmith.bench import OURS, Row, bench_measured, bench_predicted, peak_tflops, problems, series
from flashsmith.cli.plot import check_plot, draw
from flashsmith.errors import UsageError
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.problem import Problem
from torch import Tensor

A100 = find_gpu("a100")


class FakeClock:
    """Runs what it times, and says that each call took as long as it was told."""

    def __init__(self, seconds: float) -> None:
        self.each, self.counts = seconds, list[int]()

    def seconds(self, launch: Callable[[], None], count: int) -> list[float]:
        launch()
        self.counts.append(count)
        return [self.each * (1 + 0.01 * n) for n in range(count)]

    def clear(self, tensor: object) -> None:
        raise NotImplementedError


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def too_large(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 128.00 GiB.\nmore")


def test_problems_hold_the_tokens() -> None:
    for d, heads in ((64, 32), (128, 16), (256, 8)):
        for problem in problems("bf16", d, True):
            assert problem.B * problem.Nq == 16384 and problem.Hq == heads and problem.causal


def test_peaks_are_those_of_the_fastest_instruction() -> None:
    assert peak_tflops(A100) == pytest.approx(312, rel=0.01)
    assert peak_tflops(find_gpu("h100-sxm")) == pytest.approx(989, rel=0.05)
    assert peak_tflops(find_gpu("rtx4090")) == pytest.approx(165, rel=0.01)


def test_measured_rows_stand_side_by_side() -> None:
    """Each backend of each pass, in one run; one that fails says why, and the others are timed."""
    clock = FakeClock(2e-3)
    asked = tuple(replace(p, B=1, Hq=2, Hk=2) for p in problems("bf16", 64, True, (64, 128)))
    served = {OURS: sdpa, "torch math": too_large, "other": sdpa}
    rows = list(bench_measured(asked, ("forward", "backward"), A100, clock, served, "cpu"))
    assert [(r.n, r.which, r.backend) for r in rows[:6]] == [
        (64, which, name) for which in ("forward", "backward") for name in served
    ]
    for row in rows:
        assert row.evidence == "measured"
        if row.backend == "torch math":
            assert row.seconds is None and row.note.startswith("OutOfMemoryError: CUDA out of memory")
            assert "more" not in row.note
            continue
        assert row.seconds is not None and row.low is not None and row.high is not None and row.tflops is not None
        assert row.low <= row.seconds <= row.high
        problem = next(p for p in asked if p.Nq == row.n)
        assert row.tflops == pytest.approx(problem.flops(row.which) / row.seconds / 1e12)
        assert row.peak_share == pytest.approx(row.tflops / peak_tflops(A100))


@pytest.mark.parametrize(("seconds", "count"), [(1e-6, 50), (2e-3, 30), (1.0, 5)])
def test_slow_calls_are_timed_less_often(seconds: float, count: int) -> None:
    clock = FakeClock(seconds)
    assert len(bench.timed(lambda: None, clock)) == pytest.approx(count, abs=1)
    assert clock.counts[0] == bench.FIRST


def test_a_backward_is_really_a_backward() -> None:
    """The forward is made before; each timed call makes all three gradients again."""
    ran: list[str] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            ran.append("forward")
            return q + k + v

        @staticmethod
        def backward(ctx: object, dO: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
            ran.append("backward")
            return dO, dO, dO

    attend = lambda q, k, v, causal: Watched.apply(q, k, v)  # noqa: E731
    call = bench._call(Problem(dtype="bf16", d=64, Hq=1, Nq=8), "backward", attend, "cpu")
    call()
    call()
    assert ran == ["forward", "backward", "backward"]


def test_the_backends_agree_where_they_run() -> None:
    """On the CPU: ours, math, and whatever else PyTorch runs here."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 48, 64).to(torch.bfloat16) for _ in range(3))
    want = sdpa(q.double(), k.double(), v.double(), True)
    served = backends()
    assert next(iter(served)) == OURS and len(served) == 6 and FLEX in served
    for name in (OURS, "torch math"):
        assert (served[name](q, k, v, True).double() - want).abs().max() < 0.02


def test_predicted_rows() -> None:
    rows = list(bench_predicted(problems("bf16", 64, False, (1024,)), ("forward", "backward"), A100))
    assert [(r.which, r.backend, r.evidence, r.samples) for r in rows] == [
        ("forward", OURS, "predicted", 0), ("backward", OURS, "predicted", 0),
    ]  # fmt: skip
    assert all(r.tflops and 20 < r.tflops < 312 for r in rows)


def row(n: int, backend: str, evidence: str, tflops: float | None) -> Row:
    return Row(
        which="forward", dtype="bf16", d=64, causal=False, n=n, backend=backend, evidence=evidence,  # type: ignore[arg-type]
        seconds=None if tflops is None else 1e-3, tflops=tflops,
    )  # fmt: skip


def test_a_line_of_a_plot_has_one_kind_of_evidence() -> None:
    rows = [
        row(1024, OURS, "measured", 2.0), row(512, OURS, "measured", 1.0), row(512, OURS, "predicted", 9.0),
        row(512, "torch math", "measured", None),
    ]  # fmt: skip
    assert series(rows) == {(OURS, "measured"): [(512, 1.0), (1024, 2.0)], (OURS, "predicted"): [(512, 9.0)]}


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_plot_is_drawn(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"bench{suffix}"
    rows = [row(512, OURS, "measured", 1.0), row(512, OURS, "predicted", 2.0), row(512, "torch math", "measured", 0.5)]
    draw(rows, A100, file)
    data = file.read_bytes()
    assert data[:4] == b"\x89PNG" if suffix == ".png" else b"<svg" in data
    with pytest.raises(UsageError, match="--plot"):
        draw(rows, A100, tmp_path / "nowhere" / f"x{suffix}")


def test_a_bad_plot_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"\.png or \.svg"):
        check_plot(tmp_path / "x.pdf")
    with pytest.raises(UsageError, match="no folder"):
        check_plot(tmp_path / "nowhere" / "x.png")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"pip install 'flashsmith\[plot\]'"):
        check_plot(tmp_path / "x.png")
