"""The records in tuned/: complete, of today's kernels, and what the search would find again."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import pytest
from flashsmith import paths
from flashsmith.compile import compile_source, version_text
from flashsmith.load import load_best, source_sha256
from flashsmith.predict import model_of, predict
from flashsmith.render import render
from flashsmith.spec.gpu import GPUS, find_gpu
from flashsmith.spec.kernel import KernelName
from flashsmith.spec.limits import why_illegal, why_no_dtype
from flashsmith.spec.problem import Problem
from flashsmith.spec.record import Record, read_records, record_path

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import ship_records

SHIPPED = [gpu.key for gpu in GPUS.values() if why_no_dtype("bf16", gpu) is None]


@pytest.fixture(autouse=True)
def with_shipped_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests run without them."""
    monkeypatch.delenv("FLASHSMITH_SHIPPED_DIR")


def shipped(gpu: str) -> tuple[Record, ...]:
    return read_records(record_path(paths.shipped_tuned_dir(), gpu))


@pytest.mark.parametrize("gpu", SHIPPED)
def test_every_kernel_has_a_record_of_todays_text(gpu: str) -> None:
    """One for each kernel, dtype, head dimension and mask; legal, predicted by today's model, by today's compiler."""
    cells = product(ship_records.DTYPES, ship_records.HEAD_DIMS, (False, True))
    problems = [Problem(dtype=dtype, d=d, causal=causal, Nq=8192) for dtype, d, causal in cells]
    asked = {
        (kernel, problem.dtype, problem.d, problem.causal)
        for problem in problems
        for kernel in ship_records.kernels(problem, GPUS[gpu])
        if ship_records.fits(kernel, problem, GPUS[gpu])
    }
    records = shipped(gpu)
    assert {(r.kernel, r.dtype, r.d, r.causal) for r in records} == asked and len(records) == len(asked)
    for record in records:
        assert (record.gpu, record.evidence.kind, record.evidence.by) == (gpu, "predicted", model_of(record.kernel))
        assert (record.source_sha256, record.nvrtc) == (source_sha256(record.spec), version_text())
        assert why_illegal(record.spec, GPUS[gpu]) is None
        search = record.search
        assert search is not None and search.curve[-1][1] == record.evidence.time_ms
        assert search.default is None or search.default.time_ms >= record.evidence.time_ms


@pytest.mark.parametrize(
    ("gpu", "kernel", "d"),
    [("a100", "forward", 128), ("h200", "fused", 64), ("rtx4090", "dq", 96), ("orin", "dkdv", 192)],
)
def test_a_record_says_what_is_predicted_now(gpu: str, kernel: KernelName, d: int) -> None:
    record = next(r for r in shipped(gpu) if (r.kernel, r.d, r.dtype, r.causal) == (kernel, d, "fp16", True))
    problem = Problem(dtype="fp16", d=d, causal=True, B=record.B, Hq=record.Hq, Nq=record.Nq)
    found = predict(compile_source(render(record.spec)), problem, find_gpu(gpu))
    assert round(found.seconds * 1e3, 5) == record.evidence.time_ms and found.spills_in_loop == 0
    assert load_best(problem, kernel, gpu).tile == record.tile


def test_a_search_finds_the_same_record_again() -> None:
    """From its seed, to the last byte: the small space of fused on 99 KB at d = 256, which 8 trials nearly use up."""
    problem, gpu = Problem(dtype="bf16", d=256, B=2, Hq=16, Nq=8192), find_gpu("a10")
    record = next(r for r in shipped("a10") if (r.kernel, r.d, r.dtype, r.causal) == ("fused", 256, "bf16", False))
    before = next(r for r in shipped("a100") if (r.kernel, r.d, r.dtype, r.causal) == ("fused", 256, "bf16", False))
    again = ship_records.search("fused", problem, gpu, ship_records.best_of(before), trials=8, seed=0)
    assert again == record


def test_classes_hold_every_gpu_of_bf16_once() -> None:
    """And only parts whose SMs are alike: what is best on one may be looked at on the other."""
    classes = ship_records.classes()
    assert sorted(gpu.key for members in classes for gpu in members) == sorted(SHIPPED)
    for members in classes:
        assert len({(gpu.sm, gpu.tensor_flops_clk, gpu.smem_sm_kb, gpu.l2_bytes_clk) for gpu in members}) == 1
