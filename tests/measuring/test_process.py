"""The measuring process may die in every way; the search that asked it goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from flashsmith.errors import MeasuringBroken, Rejected
from flashsmith.measuring.process import Measurer

from tests.measuring import works

GONE_S = 3.0  # after a timeout


@pytest.fixture
def measurer() -> Iterator[Measurer]:
    with Measurer(works.obedient) as made:
        yield made


def alive(pid: int) -> bool:
    """A zombie is not: it holds nothing, and waits for its new parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_one_process_answers_many_requests(measurer: Measurer) -> None:
    answers = [measurer.ask(("echo", n)) for n in range(3)]
    assert len({pid for pid, _, _ in answers}) == 1 and answers[0][0] != os.getpid()
    assert [answer[1:] for answer in answers] == [(1, 0), (2, 1), (3, 2)]
    assert measurer.starts == 1


def test_what_a_candidate_does_to_its_process_costs_only_the_candidate(measurer: Measurer) -> None:
    """Each failure with its reason; a wrong result keeps the process, what may poison a context does not (BUG-29)."""
    cases = [
        (("crash", signal.SIGSEGV), "Crash: the measuring process died of SIGSEGV", True),
        (("crash", signal.SIGABRT), "Crash: the measuring process died of SIGABRT", True),
        (("exit", 7), "Crash: the measuring process ended with exit code 7", True),
        (("launch error", 0), "LaunchError: an illegal memory access", True),
        (("wrong", 0), "WrongResult: dK is off by", False),
    ]
    pid, _, _ = measurer.ask(("echo", 0))
    for request, reason, fresh in cases:
        with pytest.raises(Rejected, match=f"^{reason}"):
            measurer.ask(request)
        now, _, value = measurer.ask(("echo", 5))
        assert value == 5 and (now != pid) is fresh
        pid = now
    assert measurer.starts == 5


def test_a_hanging_candidate_is_killed(measurer: Measurer) -> None:
    """It sleeps forever and ignores SIGTERM: gone within the timeout and 3 s, and no orphan is left (BUG-32)."""
    pid, _, _ = measurer.ask(("echo", 0))
    measurer._timeout_s, start = 1.0, time.monotonic()
    with pytest.raises(Rejected, match=r"^Timeout: no answer within 1 s"):
        measurer.ask(("hang", 0))
    assert time.monotonic() - start < 1.0 + GONE_S
    assert not alive(pid)
    measurer._timeout_s = 60.0
    assert measurer.ask(("echo", 1))[0] != pid


def test_closing_ends_a_process_that_is_busy() -> None:
    with Measurer(works.obedient, timeout_s=0.2) as measurer:
        pid, _, _ = measurer.ask(("echo", 0))
        with pytest.raises(Rejected, match="Timeout"):
            measurer.ask(("hang", 0))
    assert not alive(pid)


def test_a_fault_of_the_work_itself_stops_the_run(measurer: Measurer, capfd: pytest.CaptureFixture[str]) -> None:
    """It is no candidate's failure, and its traceback is not lost."""
    with pytest.raises(MeasuringBroken, match="its traceback is on stderr"):
        measurer.ask(("bug", 0))
    assert "a mistake of the work's own" in capfd.readouterr().err


def test_a_process_that_does_not_start_is_no_candidates_fault() -> None:
    with Measurer(works.stillborn) as measurer, pytest.raises(MeasuringBroken, match="exit code 1"):
        measurer.ask(("echo", 0))
    with Measurer(works.slow_to_start, start_s=1.5) as measurer:
        with pytest.raises(MeasuringBroken, match=r"not ready after 1.5 s"):
            measurer.ask(("echo", 0))
        assert measurer._process is None


PARENT = """
from flashsmith.measuring.process import Measurer
from tests.measuring import works
if __name__ == "__main__":
    measurer = Measurer(works.obedient)
    print(measurer.ask(("echo", 0))[0], flush=True)
    try:
        measurer.ask(("hang", 0))
    finally:
        measurer.close()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "SIGKILL"])
def test_no_orphan_outlives_its_parent(number: signal.Signals, tmp_path: Path) -> None:
    """A parent that is stopped in the middle of a hang ends and takes the process along within 5 s (BUG-32)."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                              env=environment)  # fmt: skip
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(0.2)
    parent.send_signal(number)
    assert parent.wait(60) != 0  # at once, where the machine is not overloaded
    start = time.monotonic()
    while alive(child) and time.monotonic() - start < 5:
        time.sleep(0.05)
    assert not alive(child)
    parent.stdout.close()
