"""Who counts as dead, and when."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from flashsmith.study.beats import Heart, Watch
from flashsmith.study.owner import is_gone, this_process

ELSEWHERE = {"host": "other", "pid": 1, "born": 1, "kernel": "another machine"}


def test_a_process_knows_itself_and_the_dead() -> None:
    assert not is_gone(this_process())
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    owner = {**this_process(), "pid": child.pid, "born": int(fields[19])}
    assert not is_gone(owner)
    child.kill()
    while not is_gone(owner):  # a zombie until it is waited for: gone already
        time.sleep(0.01)
    child.wait()
    assert is_gone(owner)


def test_a_number_that_is_used_again_is_another_process() -> None:
    assert is_gone({**this_process(), "born": this_process()["born"] - 1})


def test_what_cannot_be_seen_is_not_gone() -> None:
    """Of another machine or container, its number says nothing here."""
    assert not is_gone({**ELSEWHERE, "pid": 99999999})


def test_a_beat_that_stands_still_ends_in_death() -> None:
    """By the watcher's own clock, from when it first saw the beat; a worker that beats slowly lives (BUG-35)."""
    now = 1000.0
    watch = Watch(60.0, clock=lambda: now)
    for beat in range(5):
        assert not watch.abandoned(7, ELSEWHERE, beat)
        now += 59.0
        assert not watch.abandoned(7, ELSEWHERE, beat)
    now += 2.0
    assert watch.abandoned(7, ELSEWHERE, 4)
    assert not watch.abandoned(7, ELSEWHERE, 5)
    assert not watch.abandoned(8, ELSEWHERE, 0)  # another trial


def test_a_worker_that_is_alive_but_silent_is_given_up() -> None:
    """Stopped by SIGSTOP, say: its process is there."""
    now = 0.0
    watch = Watch(10.0, clock=lambda: now)
    owner: dict[str, Any] = this_process()
    assert owner["pid"] == os.getpid() and not watch.abandoned(1, owner, 0)
    now = 11.0
    assert watch.abandoned(1, owner, 0)


def test_a_heart_beats_until_it_is_stopped() -> None:
    beats: list[float] = []
    heart = Heart(lambda: beats.append(time.monotonic()), 0.01)
    while len(beats) < 3:
        time.sleep(0.005)
    heart.stop()
    count = len(beats)
    time.sleep(0.05)
    assert len(beats) == count
