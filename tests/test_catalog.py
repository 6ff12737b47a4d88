"""The list of records says of each whether a load takes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flashsmith.catalog import catalog
from flashsmith.load import load_best
from flashsmith.spec.gpu import GPUS
from flashsmith.spec.kernel import KernelName
from flashsmith.spec.problem import Problem
from flashsmith.spec.record import write_record
from flashsmith.spec.tile import ForwardTile

from tests.records import record_of

OTHER = ForwardTile(Br=64, Bc=32, warps=4)


def test_of_two_folders_the_first_serves(tmp_path: Path) -> None:
    """As load_best finds it; a stale record hides nothing."""
    mine, shipped = tmp_path / "mine", tmp_path / "shipped"
    write_record(mine, record_of("forward", 1.0))
    write_record(shipped, record_of("forward", 0.5, "measured", tile=OTHER))
    write_record(mine, replace(record_of("forward", 1.0, Nq=2048), source_sha256="0" * 64))
    write_record(shipped, record_of("forward", 2.0, Nq=2048))
    found = catalog((mine, shipped))
    assert [(e.record.Nq, e.path.parent.name, e.state) for e in found] == [
        (1024, "mine", "serves"), (1024, "shipped", "hidden"), (2048, "mine", "stale"), (2048, "shipped", "serves"),
    ]  # fmt: skip
    assert str(mine / "a100.json") in found[1].why and "source_sha256" in found[2].why
    served = load_best(Problem(dtype="bf16", d=64, B=2, Nq=1024), "forward", "a100", mine)
    assert served.record == found[0].record


def test_of_one_file_the_first_of_its_lengths_serves(tmp_path: Path) -> None:
    """Records of other batches and heads are for the same lengths, and a load asks for no more."""
    for B, tile in ((2, OTHER), (1, None)):
        write_record(tmp_path, record_of("forward", 1.0, B=B, tile=tile))
    found = catalog((tmp_path,))
    assert [(e.record.B, e.state) for e in found] == [(1, "serves"), (2, "hidden")]
    served = load_best(Problem(dtype="bf16", d=64, B=2, Nq=1024), "forward", "a100", tmp_path)
    assert served.record == found[0].record


def test_a_record_in_a_file_of_another_gpu_is_stale(tmp_path: Path) -> None:
    path = write_record(tmp_path, record_of("forward", 1.0, gpu="rtx4090"))
    path.rename(tmp_path / "l4.json")
    (entry,) = catalog((tmp_path,))
    assert entry.state == "stale" and entry.why == "gpu is rtx4090, in a file of l4"


def test_many_are_sorted(tmp_path: Path) -> None:
    """By GPU as in the table of GPUs, kernel as in a pass, problem, lengths; numbers as numbers."""
    kernels: tuple[KernelName, ...] = ("dq", "fused", "forward")
    for gpu in ("rtx4090", "a100"):
        for kernel in kernels:
            for d in (128, 64):
                for causal in (True, False):
                    for Nq in (16384, 1024, 512, 8192):
                        write_record(tmp_path, record_of(kernel, 1.0, gpu=gpu, d=d, causal=causal, Nq=Nq))
    found = catalog((tmp_path,))
    assert len(found) == 96
    assert list(dict.fromkeys(e.record.gpu for e in found)) == [k for k in GPUS if k in ("a100", "rtx4090")]
    assert list(dict.fromkeys(e.record.kernel for e in found)) == ["forward", "fused", "dq"]
    first = [(e.record.d, e.record.causal, e.record.Nq) for e in found[:16]]
    assert first == sorted(first) and len(set(first)) == 16
    assert {e.record.gpu for e in catalog((tmp_path,), ("rtx4090",))} == {"rtx4090"}


def test_kernels_of_warpgroups_are_listed_behind_the_others(tmp_path: Path) -> None:
    for kernel in ("dq90", "forward90", "dq", "forward"):
        write_record(tmp_path, record_of(kernel, 1.0, gpu="h100-sxm"))  # type: ignore[arg-type]
    assert [e.record.kernel for e in catalog((tmp_path,))] == ["forward", "dq", "forward90", "dq90"]
