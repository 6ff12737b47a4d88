"""Records on disk: whole or absent, nothing lost, damage named once and never overwritten."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flashsmith.errors import BadRecord, UsageError
from flashsmith.spec.record import Evidence, Record, read_records, record_path, write_record
from flashsmith.spec.search import Search, TimedTile
from flashsmith.spec.tile import ForwardTile

WRITE = """
import sys
from dataclasses import replace
from pathlib import Path
from flashsmith.spec.record import write_record
from tests.spec.test_record import RECORD
for n in range(int(sys.argv[2]), int(sys.argv[3])):
    write_record(Path(sys.argv[1]), replace(RECORD, Nq=n))
"""

RECORD = Record(
    gpu="a100", sm=80, kernel="forward", dtype="bf16", d=128, causal=True, B=2, Hq=16, Hk=16, Nq=8192, Nk=8192,
    tile=ForwardTile(Br=128, Bc=64, warps=4, lazy=True),
    evidence=Evidence(kind="predicted", time_ms=1.5, tflops=210.0, spread=0.03, by="issue-model 1", trials=24),
    source_sha256="0" * 64, nvrtc="13.5",
)  # fmt: skip


SEARCH = Search(
    seed=3, failed=2, pruned=1, default=TimedTile(tile=ForwardTile(Br=128, Bc=32, warps=4), time_ms=2.0),
    runner_up=TimedTile(tile=ForwardTile(Br=64, Bc=64, warps=4), time_ms=1.6), curve=((1, 2.0), (7, 1.5)),
)  # fmt: skip

# As files were written before they kept anything of a search.
OLD = """{
 "schema": 1,
 "records": [
  {
   "gpu": "a100", "sm": 80, "kernel": "forward", "dtype": "bf16", "d": 128, "causal": true,
   "B": 2, "Hq": 16, "Hk": 16, "Nq": 8192, "Nk": 8192,
   "tile": {"Br": 128, "Bc": 64, "warps": 4, "q_steps": 0, "lazy": true, "min_blocks": 1},
   "evidence": {
    "kind": "predicted", "time_ms": 1.5, "tflops": 210.0, "spread": 0.03, "by": "issue-model 1", "trials": 24,
    "samples": 0
   },
   "source_sha256": "%s",
   "nvrtc": "13.5"
  }
 ]
}
""" % ("0" * 64)


def writer(folder: Path, first: int, last: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen([sys.executable, "-c", WRITE, str(folder), str(first), str(last)], env=environment)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    assert read_records(record_path(tmp_path, "a100")) == ()
    path = write_record(tmp_path, RECORD)
    assert path == tmp_path / "a100.json" and read_records(path) == (RECORD,)


@pytest.mark.parametrize(
    "search",
    [SEARCH, replace(SEARCH, default=None, runner_up=None, curve=())],
    ids=["all of it", "a search that kept little"],
)
def test_a_search_is_read_back(tmp_path: Path, search: Search) -> None:
    record = replace(RECORD, search=search)
    assert read_records(write_record(tmp_path, record)) == (record,)


def test_files_from_before_searches_were_kept(tmp_path: Path) -> None:
    """They read as they did; written again, they say no word of a search that nobody knows."""
    path = record_path(tmp_path, "a100")
    path.write_text(OLD)
    assert read_records(path) == (RECORD,)
    write_record(tmp_path, replace(RECORD, Nq=512))
    assert read_records(path) == (replace(RECORD, Nq=512), RECORD) and "search" not in path.read_text()


def test_a_record_takes_a_line_for_each_of_its_parts(tmp_path: Path) -> None:
    """A difference of two files shows which record changed, and which part of it."""
    write_record(tmp_path, replace(RECORD, Nq=512))
    before = write_record(tmp_path, replace(RECORD, search=SEARCH)).read_text().splitlines()
    tile = ForwardTile(Br=64, Bc=32, warps=4)
    after = write_record(tmp_path, replace(RECORD, search=SEARCH, tile=tile)).read_text().splitlines()
    assert len(before) == len(after) == 2 + 3 + 4
    assert [new for old, new in zip(before, after, strict=True) if old != new] == [
        ' "tile": {"Br": 64, "Bc": 32, "warps": 4, "q_steps": 0, "lazy": false, "min_blocks": 1, "order": 1, '
        '"ascending": false, "packed": false},'
    ]


SEARCHES: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"seed": "3"}, "seed is '3'"),
    "time": ({"runner_up": {"tile": {"Br": 64, "Bc": 64, "warps": 4}, "time_ms": None}}, "time_ms is None"),
    "tile": ({"default": {"tile": {"Br": "64", "Bc": 64, "warps": 4}, "time_ms": 1.0}}, "Br is '64'"),
    "other tile": ({"default": {"tile": {"warps": 4, "stages": 2}, "time_ms": 1.0}}, "stages"),
    "curve": ({"curve": [[1, 2.0], [True, 1.0]]}, r"curve has \[True, 1.0\]"),
    "points": ({"curve": [[1, 2.0, 3.0]]}, "too many values"),
    "unknown": ({"sampler": "TPE"}, "sampler"),
}


@pytest.mark.parametrize("case", SEARCHES)
def test_a_search_that_breaks_the_schema_is_named(tmp_path: Path, case: str) -> None:
    changed, named = SEARCHES[case]
    path = write_record(tmp_path, replace(RECORD, search=SEARCH))
    document = json.loads(path.read_text())
    document["records"][0]["search"].update(changed)
    path.write_text(json.dumps(document))
    with pytest.warns(UserWarning, match=named):
        assert read_records(path) == ()


def test_a_time_of_nothing_is_damage(tmp_path: Path) -> None:
    """Speeds are quotients by it."""
    path = write_record(tmp_path, replace(RECORD, evidence=replace(RECORD.evidence, time_ms=0.0)))
    with pytest.warns(UserWarning, match=r"time_ms is 0\.0"):
        assert read_records(path) == ()


def test_a_record_replaces_only_its_own_place(tmp_path: Path) -> None:
    other = replace(RECORD, d=64, Nq=512)
    better = replace(RECORD, tile=ForwardTile(Br=64, Bc=32, warps=4))
    for record in (RECORD, other, better):
        path = write_record(tmp_path, record)
    assert read_records(path) == (other, better)


def test_the_file_says_the_same_whatever_the_order(tmp_path: Path) -> None:
    records = [replace(RECORD, Nq=n) for n in (512, 8192, 1024)]
    for record in records:
        write_record(tmp_path / "one", record)
    for record in reversed(records):
        write_record(tmp_path / "two", record)
    assert (tmp_path / "one/a100.json").read_bytes() == (tmp_path / "two/a100.json").read_bytes()


@pytest.mark.parametrize(
    "content",
    [b"", b'{"schema": 1, "records": [{"gpu"', b"\xff\xfe\x00", b"[]", b'{"schema": 1, "records": [{"tflops": NaN}]}',
     b'{"schema": 99, "records": []}', b'{"schema": 1}', b'{"schema": 1, "records": [{"kernel": "forward"}]}'],
    ids=["empty", "truncated", "bytes", "list", "nan", "schema", "no records", "fields"],
)  # fmt: skip
def test_damage_counts_as_missing_and_stays(tmp_path: Path, content: bytes) -> None:
    path = record_path(tmp_path, "a100")
    path.write_bytes(content)
    with pytest.warns(UserWarning, match=r"a100\.json"):
        assert read_records(path) == ()
    with pytest.raises(BadRecord):
        write_record(tmp_path, RECORD)
    assert path.read_bytes() == content


def test_every_truncation_is_damage(tmp_path: Path) -> None:
    whole = write_record(tmp_path, RECORD).read_bytes()
    path = record_path(tmp_path, "a100")
    for length in range(0, len(whole.rstrip()), 37):
        path.write_bytes(whole[:length])
        with pytest.warns(UserWarning):
            assert read_records(path) == ()


def test_unknown_and_missing_fields_are_named(tmp_path: Path) -> None:
    path = write_record(tmp_path, RECORD)
    document = json.loads(path.read_text())
    document["records"][0]["tile"]["swizzle"] = 3
    path.write_text(json.dumps(document))
    with pytest.warns(UserWarning, match="swizzle"):
        assert read_records(path) == ()


def test_a_field_that_an_older_record_lacks_has_its_default(tmp_path: Path) -> None:
    """Records from before a field was made stay good: its default is what their text had."""
    path = write_record(tmp_path, RECORD)
    document = json.loads(path.read_text())
    for name in ("order", "ascending"):
        del document["records"][0]["tile"][name]
    path.write_text(json.dumps(document))
    assert read_records(path) == (RECORD,)


@pytest.mark.parametrize(("name", "value"), [("order", 3), ("order", True), ("ascending", 1)])
def test_a_value_that_a_field_does_not_have_is_damage(tmp_path: Path, name: str, value: object) -> None:
    path = write_record(tmp_path, RECORD)
    document = json.loads(path.read_text())
    document["records"][0]["tile"][name] = value
    path.write_text(json.dumps(document))
    with pytest.warns(UserWarning, match=name):
        assert read_records(path) == ()


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    """Four processes, ten records each, one file."""
    writers = [writer(tmp_path, 10 * k + 1, 10 * k + 11) for k in range(4)]
    assert [process.wait(timeout=60) for process in writers] == [0] * 4
    assert {record.Nq for record in read_records(record_path(tmp_path, "a100"))} == set(range(1, 41))


def test_a_killed_writer_leaves_a_whole_file(tmp_path: Path) -> None:
    for k in range(5):
        process = writer(tmp_path, 1000 * k, 1000 * k + 1000)
        while not (tmp_path / "a100.json").exists():
            pass
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.1 + 0.03 * k)
        process.kill()
        process.wait()
        assert read_records(record_path(tmp_path, "a100"))


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--out"):
        write_record(tmp_path / "file" / "folder", RECORD)
