"""Run the parts of a GPU day, each in a process of its own with a limit, and keep what they found in one file."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..whole_file import write_whole
from .plan import Part, Status

REPORT = "report.json"
TAIL = 4000  # characters of a part's output that are kept: enough for a traceback
LEAST_S = 5.0  # a part with less time left than this is not started
SKIP = 3  # exit status of a part that says why it cannot run here

State = dict[str, Any]


def run_day(
    parts: Sequence[Part], folder: Path, minutes: float, *, fresh: bool = False,
    report: Callable[[State], None] = lambda state: None, clock: Callable[[], float] = time.monotonic,
) -> State:  # fmt: skip
    """The state after all parts that the time allows; it is on disk after each, and `report` is called then.

    A part that is done is not run again. One that fails, or runs out of its time, ends nothing but itself. Only the
    vital part, which describes the device, ends the day: when it is skipped, or finds another GPU than the state has.
    """
    state = read_state(folder)
    end = clock() + 60 * minutes
    done = state.setdefault("parts", {})
    if fresh:
        for part in parts:
            done.pop(part.name, None)
    for part in parts:
        before = done.get(part.name, {})
        if before.get("status") == "done" and not part.vital:
            print(f"{part.name}: done before", file=sys.stderr)
            continue
        left = end - clock()
        if left < LEAST_S:
            print(f"{part.name}: not started, the time is up; run again to do it", file=sys.stderr)
            continue
        found = run_part(part, min(part.seconds, left))
        print(f"{part.name}: {found['status']} in {found['seconds']} s {found['reason']}".rstrip(), file=sys.stderr)
        if part.vital and _is_another(before, found):
            print(f"{folder} holds a day on another GPU: name another folder, or --fresh", file=sys.stderr)
            break
        done[part.name] = found
        write_state(folder, state)
        report(state)
        if part.vital and found["status"] == "skipped":
            break
    return state


def run_part(part: Part, limit_s: float) -> State:
    """Status, reason, seconds, findings and the end of the output of one part. Nothing that it does is raised here."""
    reason = part.why_not()
    if reason:
        return _outcome("skipped", reason, 0.0, None, "")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="flashsmith-day-") as work:
        file, log = Path(work) / "found.json", Path(work) / "log"
        with log.open("wb") as output:
            try:
                process = subprocess.Popen(
                    part.command(file), stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                return _outcome("failed", f"it does not start: {error}", 0.0, None, "")
            status = _wait(process, limit_s)
        seconds, tail = time.monotonic() - start, log.read_bytes()[-TAIL:].decode(errors="replace")
        found = _findings(file)
    if status is None:
        return _outcome("timeout", f"killed after {limit_s:.0f} s; what it had found is kept", seconds, found, tail)
    if status == SKIP:
        return _outcome("skipped", _last_line(tail), seconds, found, "")
    if status:
        return _outcome("failed", f"exit status {status}: {_last_line(tail)}", seconds, found, tail)
    return _outcome("done", "", seconds, found, "")


def read_state(folder: Path) -> State:
    """The state that an earlier run left; empty if there is none, or if it cannot be read, which is said."""
    path = folder / REPORT
    try:
        state = json.loads(path.read_bytes())
        if not isinstance(state, dict) or not isinstance(state.get("parts"), dict):
            raise ValueError("it holds no parts")
        return state
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        kept = path.with_suffix(".damaged.json")
        with contextlib.suppress(OSError):
            path.rename(kept)
        print(f"{path} cannot be read ({error}): it is kept as {kept.name}, and the day starts anew", file=sys.stderr)
        return {}


def write_state(folder: Path, state: State) -> None:
    """Old file or new file, never half."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / REPORT, f"{json.dumps(state, indent=1)}\n".encode())


def _is_another(before: State, now: State) -> bool:
    """Whether two descriptions are of different GPUs: their times do not belong in one report."""
    then, found = before.get("found") or {}, now.get("found") or {}
    return bool(then.get("gpu") and found.get("gpu")) and then["gpu"] != found["gpu"]


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """The exit status; None if the process, and all that it started, had to be killed."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it started may outlive it
        process.wait()


def _findings(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None


def _outcome(status: Status, reason: str, seconds: float, found: Any, tail: str) -> State:
    return {"status": status, "reason": reason, "seconds": round(seconds, 1), "found": found, "output": tail}


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "no output"
