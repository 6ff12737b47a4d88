"""Which storages are served, and what is said of the others."""

from __future__ import annotations

import json
import os
import pickle
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from flashsmith.cli import main
from flashsmith.errors import StorageLost, UsageError
from flashsmith.objective import Candidate
from flashsmith.spec.gpu import find_gpu
from flashsmith.study import dashboard, default_storage, shown
from flashsmith.study.storage import open_storage

from tests.study import crew, servers
from tests.study.test_study import next_of


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("sqlite:///studies.db", "many workers on one SQLite file lock each other out"),
        ("sqlite+pysqlite:///studies.db", "lock each other out"),
        ("mysql://me:secret@host/db", r"mysql://me:\*\*\*@host/db: mysql:// is unknown"),
        ("/dev/null/studies", r"it cannot be written \("),
        ("/", r"it cannot be written \(Is a directory"),
        (__file__, "the file is there and no journal"),
    ],
    ids=["sqlite", "sqlite with a driver", "mysql", "no folder", "a folder", "another file"],
)
def test_a_storage_that_is_not_served_names_those_that_are(url: str, reason: str) -> None:
    """One line, no traceback (BUG-34)."""
    with pytest.raises(UsageError, match=reason) as error:
        open_storage(url)
    assert all(name in str(error.value) for name in ("a journal", "postgresql://", "redis://")), error.value
    assert "secret" not in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "redis"])
def test_a_server_that_is_not_there(scheme: str) -> None:
    with pytest.raises(UsageError, match=r"(?i)refused") as error:
        open_storage(f"{scheme}://me:secret@127.0.0.1:1/0")
    assert "secret" not in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("scheme", "module"), [("postgresql", "psycopg"), ("redis", "redis")])
def test_a_driver_that_is_not_installed(scheme: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashsmith.study.storage.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=rf"needs {module}, which is not installed: pip install 'flashsmith\[fleet\]'"):
        open_storage(f"{scheme}://host/0")


def test_a_damaged_journal_is_named(tmp_path: Path) -> None:
    """In the middle, where no killed writer leaves half a line."""
    path = tmp_path / "a.journal"
    with crew.open_at(str(path)) as study:
        study.ask(3, next_of(study))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], lines[1][:40] + b"\n", *lines[2:]]))
    with pytest.raises(UsageError, match="the journal is damaged"):
        open_storage(str(path))


def test_passwords_are_not_shown() -> None:
    assert shown("redis://:s3cret@host:6379/0") == "redis://:***@host:6379/0"
    assert shown("postgresql://me@host/db") == "postgresql://me@host/db"
    assert shown("studies/a100.journal") == "studies/a100.journal"


def test_a_journal_for_each_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHSMITH_STUDIES_DIR", str(tmp_path))
    assert default_storage(find_gpu("h100-sxm")) == str(tmp_path / "h100-sxm.journal")


def test_a_server_that_goes_away_is_named() -> None:
    """What it holds is lost only if it loses it; the claim is given back by its death."""
    with servers.redis() as url:
        study = crew.open_at(f"{url}/0")
        claim = study.ask(3, next_of(study))
        assert claim
    with pytest.raises(StorageLost, match=r"redis://127\.0\.0\.1:\d+/0 fails .*the same command goes on from there"):
        study.tell(claim, Candidate(claim.tile, crew.predicted(1.0)))
    study.close()


class Trap:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_on_a_server_is_not_opened(redis: str, tmp_path: Path) -> None:
    """Optuna would keep its snapshots so, and whoever can write there would run code here (BUG-41)."""
    from redis import Redis

    sprung = tmp_path / "sprung"
    with Redis.from_url(f"{redis}/15") as client:
        client.set(":snapshot", pickle.dumps(Trap(sprung)))
        with crew.open_at(f"{redis}/15") as study:
            assert len(study.book) == 0
        client.flushdb()
    assert not sprung.exists()


def test_the_dashboard_shows_the_studies(tmp_path: Path) -> None:
    url, told = str(tmp_path / "a.journal"), threading.Event()
    with crew.open_at(url, "the name of a study") as study:
        claim = study.ask(3, next_of(study))
        assert claim
        study.tell(claim, Candidate(claim.tile, crew.predicted(1.0)))
    address: list[str] = []

    def ready(at: str) -> None:
        address.append(at)
        told.set()

    threading.Thread(target=dashboard.serve, args=(url, ready, 0), daemon=True).start()
    assert told.wait(60) and address[0].startswith("http://127.0.0.1:")
    with urllib.request.urlopen(f"{address[0]}api/studies", timeout=60) as answer:
        found = json.load(answer)
    assert [each["study_name"] for each in found["study_summaries"]] == ["the name of a study"]


def test_a_dashboard_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("flashsmith.study.dashboard.find_spec", lambda name: None)
    assert main(["tune", "--gpu", "a100", "--dashboard"]) == 2
    said = capsys.readouterr().err
    assert "pip install 'flashsmith[dashboard]'" in said and said.count("\n") == 1
