"""Which kernel serves a problem, and how the answer says so."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flashsmith import lookup
from flashsmith.errors import BadProblem, LowerRung, NoTunedKernel, StaleRecord, UnknownGpu, UsageError
from flashsmith.load import ladder, load_best, load_pass, source_sha256
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import FUSED, FUSED90, KernelSpec
from flashsmith.spec.limits import why_illegal
from flashsmith.spec.problem import Problem
from flashsmith.spec.record import Evidence, Record, write_record
from flashsmith.spec.tile import HEAD_BY_HEAD, ForwardTile

pytestmark = pytest.mark.filterwarnings("ignore::flashsmith.errors.LowerRung")

PROBLEM = Problem(dtype="bf16", d=64, causal=True, Nq=4096)
TILE = ForwardTile(Br=64, Bc=32, warps=4)  # legal everywhere, and no GPU's default


@pytest.fixture(autouse=True)
def nothing_warned_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own for each test, as far as warnings go."""
    monkeypatch.setattr(lookup, "_warned", set())


def told(category: type[Warning], problem: Problem, gpu: str, folder: Path) -> list[str]:
    """The warnings of one kind that a load gives."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        load_best(problem, "forward", gpu, folder)
    return [str(w.message) for w in seen if issubclass(w.category, category)]


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


def test_a_tile_for_many_rows_serves_no_single_query(tmp_path: Path) -> None:
    """Nor the other way round, however near the lengths; but what was found for exactly these lengths does."""
    decode = replace(PROBLEM, Nq=1, Nk=4096)
    write_record(tmp_path, record(Nq=4096))
    loaded = load_best(decode, "forward", "a100", tmp_path)
    assert (loaded.rung, loaded.tile) == ("default", default_tile("forward", decode, find_gpu("a100")))
    step = next(step for step in ladder(decode, "forward", find_gpu("a100"), tmp_path) if step.rung == "near length")
    assert "Br=64, and for Nq=1 rows are right in blocks of Br=16" in step.why
    of_one = ForwardTile(Br=16, Bc=48, warps=1)
    write_record(tmp_path, replace(record(tile=of_one), Nq=1, Nk=2048))
    assert load_best(decode, "forward", "a100", tmp_path).tile == of_one
    assert load_best(replace(decode, Nq=17), "forward", "a100", tmp_path).rung == "default"
    assert load_best(replace(decode, Nq=65), "forward", "a100", tmp_path).tile == TILE
    assert load_best(replace(decode, Hq=16, Hk=2), "forward", "a100", tmp_path).tile.packed  # type: ignore[union-attr]
    write_record(tmp_path, replace(record(), Nq=1, Nk=4096))
    assert load_best(decode, "forward", "a100", tmp_path).tile == TILE


def test_heads_are_packed_only_where_they_share_keys(tmp_path: Path) -> None:
    decode = replace(PROBLEM, Nq=1, Nk=4096)
    packed = ForwardTile(Br=16, Bc=48, warps=1, packed=True)
    write_record(tmp_path, replace(record(tile=packed), Nq=1, Nk=4096))
    assert load_best(replace(decode, Hk=2), "forward", "a100", tmp_path).tile == packed
    assert not load_best(decode, "forward", "a100", tmp_path).tile.packed  # type: ignore[union-attr]


def test_partial_takes_the_tile_of_forward(tmp_path: Path) -> None:
    """But for what it does not know: another order, another direction."""
    write_record(tmp_path, record(tile=replace(TILE, order=HEAD_BY_HEAD, ascending=True)))
    loaded = load_best(PROBLEM, "partial", "a100", tmp_path)
    assert (loaded.rung, loaded.tile, loaded.spec.kernel) == ("record", TILE, "partial")
    assert load_best(PROBLEM, "combine", "a100", tmp_path).found == "combine is not tuned"


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


FOREIGN: dict[str, tuple[Any, str]] = {
    "gpu": ("h100-sxm", "gpu is h100-sxm, in a file of a100"),
    "sm": (90, "sm is 90, and a100 has 80"),
    "source_sha256": ("0" * 64, "source_sha256 is that of another text"),
    "nvrtc": ("11.8", r"nvrtc is 11\.8, and \d+\.\d+ compiles here"),
    "tile": ({"Br": 256, "Bc": 256, "warps": 4}, "tile is not legal: "),
}


@pytest.mark.parametrize("field", FOREIGN)
def test_a_stale_or_foreign_record_is_refused_by_field(tmp_path: Path, field: str) -> None:
    """One field of a good record changed: the default serves, the field is named once, the file stays (BUG-38)."""
    path = write_record(tmp_path, record())
    document = json.loads(path.read_text())
    changed, reason = FOREIGN[field]
    document["records"][0][field] = {**document["records"][0][field], **changed} if field == "tile" else changed
    path.write_text(json.dumps(document))
    before = path.read_bytes()
    with pytest.warns(StaleRecord, match=reason):
        assert load_best(PROBLEM, "forward", "a100", tmp_path).rung == "default"
    assert told(StaleRecord, PROBLEM, "a100", tmp_path) == []
    assert path.read_bytes() == before


@pytest.mark.parametrize(("field", "value"), [("dtype", "fp16"), ("d", 72), ("causal", False)], ids=str)
def test_a_record_relabelled_serves_neither_problem(tmp_path: Path, field: str, value: Any) -> None:
    """Its text is that of the old label: the new one finds it stale, the old one does not find it (BUG-38)."""
    path = write_record(tmp_path, record())
    document = json.loads(path.read_text())
    document["records"][0][field] = value
    path.write_text(json.dumps(document))
    assert load_best(PROBLEM, "forward", "a100", tmp_path).rung == "default"
    with pytest.warns(StaleRecord, match="source_sha256"):
        assert load_best(replace(PROBLEM, **{field: value}), "forward", "a100", tmp_path).rung == "default"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"schema": 99}, "schema 99"),
        ({"extra": 1}, "extra"),
        ({"nvrtc": None}, "nvrtc is None"),
        ({"Nq": "4096"}, "Nq is '4096'"),
        ({"causal": 1}, "causal is 1"),
        ({"kernel": "backward"}, "backward"),
        ({"dtype": "fp8"}, "dtype is 'fp8'"),
    ],
    ids=str,
)
def test_a_file_that_breaks_the_schema_counts_as_missing(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    """The field is named; a second look at the same file says nothing more (BUG-38, BUG-40)."""
    path = write_record(tmp_path, record())
    document = json.loads(path.read_text())
    (document if "schema" in change else document["records"][0]).update(change)
    path.write_text(json.dumps(document))
    with pytest.warns(UserWarning, match=named):
        assert load_best(PROBLEM, "forward", "a100", tmp_path).rung == "default"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_best(PROBLEM, "forward", "a100", tmp_path).rung == "default"


def test_a_field_that_is_gone_is_named(tmp_path: Path) -> None:
    path = write_record(tmp_path, record())
    document = json.loads(path.read_text())
    del document["records"][0]["source_sha256"]
    path.write_text(json.dumps(document))
    with pytest.warns(UserWarning, match="source_sha256"):
        assert load_best(PROBLEM, "forward", "a100", tmp_path).rung == "default"


def test_a_file_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a100.json").mkdir()
    with pytest.warns(UserWarning, match="cannot be read"):
        assert load_best(PROBLEM, "forward", "a100", tmp_path).rung == "default"


def test_a_lower_rung_is_said_once(tmp_path: Path) -> None:
    """One warning for a GPU, a problem and a rung, with the exact path looked for (BUG-37)."""
    (said,) = told(LowerRung, PROBLEM, "a100", tmp_path)
    assert str(tmp_path / "a100.json") in said and "flashsmith tune --gpu a100 --dtype bf16 --d 64 --causal" in said
    assert told(LowerRung, PROBLEM, "a100", tmp_path) == []
    assert told(LowerRung, replace(PROBLEM, Nq=700, Nk=None), "a100", tmp_path) == []  # lengths change at every step
    assert len(told(LowerRung, replace(PROBLEM, d=72), "a100", tmp_path)) == 1
    write_record(tmp_path, record(Nq=512))
    (near,) = told(LowerRung, PROBLEM, "a100", tmp_path)
    assert "(near length)" in near
    assert told(LowerRung, replace(PROBLEM, Nq=512, Nk=None), "a100", tmp_path) == []  # exact: nothing to say


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FLASHSMITH_STRICT", "1")
    yield


def test_strict_mode_serves_an_exact_record_or_nothing(tmp_path: Path, strict: None) -> None:
    with pytest.raises(NoTunedKernel, match=r"a100\.json has no record .*FLASHSMITH_STRICT=1.*flashsmith tune"):
        load_best(PROBLEM, "forward", "a100", tmp_path)
    write_record(tmp_path, record(Nq=512))
    with pytest.raises(NoTunedKernel):  # a near length
        load_best(PROBLEM, "forward", "a100", tmp_path)
    with pytest.raises(NoTunedKernel):  # the same class
        load_best(replace(PROBLEM, Nq=512, Nk=None), "forward", "a100-40gb", tmp_path)
    write_record(tmp_path, record())
    assert load_best(PROBLEM, "forward", "a100", tmp_path).rung == "record"
    assert load_best(PROBLEM, "delta", "a100", tmp_path).rung == "default"  # nothing of it is tuned


def test_strict_mode_is_on_or_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHSMITH_STRICT", "0")
    assert load_best(PROBLEM, "forward", "a100", tmp_path).rung == "default"
    monkeypatch.setenv("FLASHSMITH_STRICT", "yes")
    with pytest.raises(UsageError, match="'yes'"):
        load_best(PROBLEM, "forward", "a100", tmp_path)


def test_the_ladder_says_what_each_file_held(tmp_path: Path) -> None:
    write_record(tmp_path, record(Nq=512))
    steps = list(ladder(PROBLEM, "forward", find_gpu("a100"), tmp_path))
    assert [(s.rung, s.path.name) for s in steps[::2]] == [
        ("record", "a100.json"), ("near length", "a100.json"), ("same class", "a100-40gb.json"),
    ]  # fmt: skip
    assert steps[0].record is None and "the nearest is Nq=512" in steps[0].why
    assert steps[2].record is not None and steps[4].why == "no records"


def test_convert_follows_fused() -> None:
    for gpu, names in (("a100", FUSED), ("rtx4090", FUSED), ("h100-sxm", FUSED90)):
        loaded = load_pass(PROBLEM, "backward", gpu)
        assert tuple(loaded) == names
        assert loaded[names[2]].tile == loaded[names[1]].tile
    assert list(load_pass(PROBLEM, "backward", "a100", deterministic=True)) == ["delta", "dkdv", "dq"]


def test_refusals_come_before_any_work() -> None:
    with pytest.raises(UnknownGpu, match="geforce9800"):
        load_best(PROBLEM, "forward", "geforce9800")
    with pytest.raises(BadProblem, match="d=12"):
        load_best(Problem(dtype="bf16", d=12), "forward", "a100")


def test_every_gpu_of_bf16_is_served_for_every_head_dim() -> None:
    """The last rung always holds: every kernel, dtype, d and GPU has a default tile; test_turing.py has the T4."""
    from flashsmith.spec.gpu import GPUS
    from flashsmith.spec.kernel import KERNELS
    from flashsmith.spec.limits import why_no_dtype

    for gpu in (gpu for gpu in GPUS.values() if why_no_dtype("bf16", gpu) is None):
        for d in range(8, 257, 8):
            for causal in (False, True):
                problem = Problem(dtype="bf16" if d % 16 else "fp16", d=d, causal=causal)
                for kernel in KERNELS:
                    spec = KernelSpec.of(kernel, problem, default_tile(kernel, problem, gpu), gpu.sm)
                    assert why_illegal(spec, gpu) is None, (gpu.key, spec.key)
