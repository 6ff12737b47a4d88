"""Processes that work for another: they end with it, and it does not end with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from flashsmith.errors import Rejected, UsageError
from flashsmith.workers import Helpers, Pool

from tests.measuring.test_process import alive


def double(n: int) -> int:
    return 2 * n


def die(once: str) -> str:
    """Kill this process; the second time, if `once` is a file, live."""
    if once and Path(once).exists():
        return "alive"
    if once:
        Path(once).touch()
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


def refuse(n: int) -> int:
    raise UsageError("not this")


def note(folder: str, n: int) -> None:
    """The second one would go on for a minute; if it is interrupted, it has time to clear up."""
    Path(folder, str(n)).write_text(str(os.getpid()))
    try:
        time.sleep(60 if n == 2 else 0)
    finally:
        Path(folder, f"{n} is done").touch()


def complain(n: int) -> None:
    raise UsageError("no GPU for this one")


def test_a_process_that_is_killed_costs_no_task(tmp_path: Path) -> None:
    """Its task is done once more, and so is all that its pool was doing; a task that kills again is rejected."""
    pool = Pool(2)
    try:
        unlucky = pool.submit(die, str(tmp_path / "once"))
        others = [pool.submit(double, n) for n in range(3)]
        assert unlucky.result() == "alive"
        assert [task.result() for task in others] == [0, 2, 4]
        deadly, later = pool.submit(die, ""), pool.submit(double, 5)
        with pytest.raises(Rejected, match=r"^Crash: the process that compiled it died, and so did another one"):
            deadly.result()
        assert later.result() == 10 and pool.submit(double, 6).result() == 12
        with pytest.raises(UsageError, match="not this"):
            pool.submit(refuse, 1).result()
    finally:
        pool.close()


def test_closing_a_pool_ends_what_it_does(tmp_path: Path) -> None:
    pool = Pool(2)
    for n in (1, 2):
        pool.submit(note, str(tmp_path), n)
    while not all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in ("1", "2")):
        time.sleep(0.02)
    pool.close()
    end = time.monotonic() + 10
    while any(alive(int((tmp_path / name).read_text())) for name in ("1", "2")):
        assert time.monotonic() < end
        time.sleep(0.02)


PARENT = """
import os, time
from flashsmith.workers import Pool
from tests.test_workers import note
if __name__ == "__main__":
    pool = Pool(2)
    for n in (1, 2):
        pool.submit(note, {folder!r}, n)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_its_parent(number: signal.Signals, tmp_path: Path) -> None:
    """Neither the one that waits for work nor the one that works."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(folder=str(tmp_path)))
    parent = subprocess.Popen([sys.executable, script], env={**os.environ, "PYTHONPATH": os.getcwd()})
    files = [tmp_path / "1", tmp_path / "2"]
    while not all(file.exists() and file.read_text() for file in files):
        assert parent.poll() is None
        time.sleep(0.02)
    children = [int(file.read_text()) for file in files]
    parent.send_signal(number)
    parent.wait(10)
    end = time.monotonic() + 10
    while any(map(alive, children)):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_helpers_end_with_the_work_that_they_help(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Interrupted, not killed, if it failed; one that cannot begin says why in one line."""
    with pytest.raises(KeyboardInterrupt), Helpers(2, partial(note, str(tmp_path))):
        while not (tmp_path / "2").exists() or not (tmp_path / "2").read_text():
            time.sleep(0.02)
        raise KeyboardInterrupt
    assert not alive(int((tmp_path / "2").read_text())) and (tmp_path / "2 is done").exists()
    with Helpers(1, complain):
        pass
    assert "flashsmith: worker 1 ended: no GPU for this one" in capfd.readouterr().err
