"""Which kernel serves a problem, and how the answer says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from flashsmith.errors import BadProblem, UnknownGpu
from flashsmith.load import load_best, load_pass, source_sha256
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import KernelSpec
from flashsmith.spec.limits import why_illegal
from flashsmith.spec.problem import Problem
from flashsmith.spec.record import Evidence, Record, write_record
from flashsmith.spec.tile import ForwardTile

PROBLEM = Problem(dtype="bf16", d=64, causal=True, Nq=4096)
TILE = ForwardTile(Br=64, Bc=32, warps=4)  # legal everywhere, and no GPU's default


def record(gpu: str = "a100", tile: ForwardTile = TILE, Nq: int = 4096) -> Record:
    sm = find_gpu(gpu).sm
    return Record(
        gpu=gpu, sm=sm, kernel="forward", dtype="bf16", d=64, causal=True, B=1, Hq=16, Hk=16, Nq=Nq, Nk=Nq, tile=tile,
        evidence=Evidence(kind="predicted", time_ms=1.0, tflops=200.0, spread=0.02, by="issue-model 1", trials=9),
        source_sha256=source_sha256(KernelSpec.of("forward", PROBLEM, tile, sm)), nvrtc="13.5",
    )  # fmt: skip


def test_the_record_just_written_is_served(tmp_path: Path) -> None:
    write_record(tmp_path, record())
    loaded = load_best(PROBLEM, "forward", "a100", tmp_path)
    assert (loaded.rung, loaded.tile) == ("record", TILE)
    assert loaded.evidence is not None and loaded.evidence.kind == "predicted"
    assert "forward_bf16_d64_causal_sm80_Br64_Bc32" in loaded.source.text
    assert loaded.binary.cubin[:4] == b"\x7fELF"


def test_the_nearest_length_of_the_same_gpu(tmp_path: Path) -> None:
    other = ForwardTile(Br=64, Bc=48, warps=4)
    write_record(tmp_path, record(Nq=512))
    write_record(tmp_path, record(Nq=16384, tile=other))
    assert load_best(replace(PROBLEM, Nq=700, Nk=None), "forward", "a100", tmp_path).tile == TILE
    loaded = load_best(replace(PROBLEM, Nq=9000, Nk=None), "forward", "a100", tmp_path)
    assert (loaded.rung, loaded.tile) == ("near length", other) and "Nq=16384" in loaded.found


def test_a_gpu_of_the_same_class(tmp_path: Path) -> None:
    write_record(tmp_path, record("a100"))
    assert load_best(PROBLEM, "forward", "a100-40gb", tmp_path).rung == "same class"
    assert load_best(PROBLEM, "forward", "rtx3090", tmp_path).rung == "default"


def test_a_default_says_where_it_looked(tmp_path: Path) -> None:
    loaded = load_best(PROBLEM, "forward", "a100", tmp_path)
    assert loaded.rung == "default" and loaded.evidence is None
    assert loaded.tile == default_tile("forward", PROBLEM, find_gpu("a100"))
    assert str(tmp_path / "a100.json") in loaded.found


@pytest.mark.parametrize("change", [{"dtype": "fp16"}, {"d": 72}, {"causal": False}], ids=["dtype", "d", "mask"])
def test_what_is_never_approximated(tmp_path: Path, change: dict[str, object]) -> None:
    write_record(tmp_path, record())
    assert load_best(replace(PROBLEM, **change), "forward", "a100", tmp_path).rung == "default"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [{"source_sha256": "0" * 64}, {"tile": ForwardTile(Br=256, Bc=256, warps=4)}],
    ids=["stale text", "illegal tile"],
)
def test_a_record_of_another_world_is_passed_over(tmp_path: Path, change: dict[str, object]) -> None:
    write_record(tmp_path, replace(record(), **change))  # type: ignore[arg-type]
    assert load_best(PROBLEM, "forward", "a100", tmp_path).rung == "default"


def test_convert_follows_fused() -> None:
    for gpu in ("a100", "rtx4090", "h100-sxm"):
        loaded = load_pass(PROBLEM, "backward", gpu)
        assert list(loaded) == ["delta", "fused", "convert"]
        assert loaded["convert"].tile == loaded["fused"].tile
    assert list(load_pass(PROBLEM, "backward", "a100", deterministic=True)) == ["delta", "dkdv", "dq"]


def test_refusals_come_before_any_work() -> None:
    with pytest.raises(UnknownGpu, match="geforce9800"):
        load_best(PROBLEM, "forward", "geforce9800")
    with pytest.raises(BadProblem, match="d=12"):
        load_best(Problem(dtype="bf16", d=12), "forward", "a100")


def test_every_gpu_is_served_for_every_head_dim() -> None:
    """The last rung always holds: a default tile exists for every kernel, dtype, d and GPU."""
    from flashsmith.spec.gpu import GPUS
    from flashsmith.spec.kernel import KERNELS

    for gpu in (gpu for gpu in GPUS.values() if gpu.served):
        for d in range(8, 257, 8):
            for causal in (False, True):
                problem = Problem(dtype="bf16" if d % 16 else "fp16", d=d, causal=causal)
                for kernel in KERNELS:
                    spec = KernelSpec.of(kernel, problem, default_tile(kernel, problem, gpu), gpu.sm)
                    assert why_illegal(spec, gpu) is None, (gpu.key, spec.key)
