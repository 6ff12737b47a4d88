"""A journal whose writers are killed in the middle of a line, or with the lock in hand."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from flashsmith.objective import Candidate
from flashsmith.spec.tile import RowTile
from flashsmith.study import Study
from flashsmith.study.journal import JournalLock, cut_half_line
from flashsmith.study.owner import this_process
from flashsmith.study.storage import open_storage

from tests.study import crew

SPACE = [RowTile(warps=warps) for warps in range(1, 9)]  # tiles of one field: short lines, quickly cut everywhere


def try_tiles(path: Path, count: int) -> list[Candidate]:
    """Search until the study has `count` tiles; all of its candidates."""
    with Study(open_storage(str(path)), "cut", "delta", SPACE, where="a test") as study:
        while claim := study.ask(count, lambda known, running: next(t for t in SPACE if t not in study.book)):
            study.tell(claim, Candidate(claim.tile, crew.predicted(crew.true_seconds(claim.tile))))
        return study.book.candidates


def test_a_journal_cut_anywhere_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every byte of the last five lines, a whole trial and more: what was told before is there, and the rest is
    tried again (BUG-35)."""
    whole = tmp_path / "whole.journal"
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr("flashsmith.study.study.Heart", lambda beat, every_s: SimpleNamespace(stop=lambda: None))
    with monkeypatch.context() as patch:
        patch.setattr("flashsmith.study.study.this_process", lambda: {**this_process(), "born": 0})  # dead by now
        expected = try_tiles(whole, 3)
    text = whole.read_bytes()
    lines = text.splitlines(keepends=True)
    start = len(text) - sum(map(len, lines[-5:]))
    assert [b'"op_code":4' in line for line in lines[-5:]].count(True) == 1
    for end in range(start, len(text) + 1):
        path = tmp_path / f"{end}.journal"
        path.write_bytes(text[:end])
        assert try_tiles(path, 3) == expected
        assert path.read_bytes().endswith(b"\n")
        path.unlink()


@pytest.mark.parametrize(
    ("text", "left"),
    [(b"", b""), (b"a\n", b"a\n"), (b"a\nb", b"a\n"), (b"half", b""), (b"a\n" + b"x" * 200_000, b"a\n"),
     (b"x" * 200_000, b""), (b"a\n" + b"\0" * 70_000, b"a\n")],
)  # fmt: skip
def test_half_a_line_is_cut(text: bytes, left: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(text)
    cut_half_line(path)
    assert path.read_bytes() == left


def hold(path: Path, held: Path) -> None:
    JournalLock(path).acquire()
    held.touch()
    time.sleep(60)


def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    """Optuna's own is a link, which stays for 30 seconds."""
    path, held = tmp_path / "journal", tmp_path / "held"
    path.touch()
    process = crew.PROCESSES.Process(target=hold, args=(path, held))
    process.start()
    while not held.exists():
        time.sleep(0.01)
    begin = time.monotonic()
    os.kill(process.pid or 0, signal.SIGKILL)
    lock = JournalLock(path)
    lock.acquire()
    lock.release()
    assert time.monotonic() - begin < 5
    process.join()
