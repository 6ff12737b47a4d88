"""Keep a process that measures: it may crash, hang or lose its GPU context, and only the candidate pays for it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from ..errors import FlashsmithError, LaunchError, MeasuringBroken, Rejected

Work = Callable[[Any], Any]  # answers one request; raises FlashsmithError for what is wrong with a candidate

TIMEOUT_S = 60.0  # for one request: a check and a timing take about two
START_S = 180.0  # to import PyTorch, open the device and compile companions
GONE_S = 5.0  # that a killed process may take to disappear
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Measurer:
    """The parent's side. `make` builds the work inside the process, once a start; both must be picklable.

    >>> with Measurer(make) as measurer:  # doctest: +SKIP
    ...     measurer.ask(request)
    """

    def __init__(self, make: Callable[[], Work], *, timeout_s: float = TIMEOUT_S, start_s: float = START_S) -> None:
        self._make, self._timeout_s, self._start_s = make, timeout_s, start_s
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self.starts = 0  # how often a process was needed

    def ask(self, request: object) -> Any:
        """The work's answer.

        Raises Rejected, its message starting with the class of failure, if the candidate is refused, kills the process
        or does not answer in time: the next request gets a fresh process. Raises MeasuringBroken if no process starts
        or if the work itself has a fault; its traceback is on stderr.
        """
        pipe = self._running()
        try:
            pipe.send(request)
            if not pipe.poll(self._timeout_s):
                self.close()
                raise Rejected(f"Timeout: no answer within {self._timeout_s:g} s; the measuring process was killed.")
            answer, failure = pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise self._lost() from error
        if failure:
            if failure.startswith(LaunchError.__name__):
                self.close()  # such an error can stay in the context and fail every launch after it
            raise Rejected(failure)
        return answer

    def close(self) -> None:
        """End the process, whatever it is doing. Raises MeasuringBroken if the system cannot."""
        process, self._process = self._process, None
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if process is None:
            return
        process.kill()  # SIGKILL: a process that waits for a kernel hears nothing else
        process.join(GONE_S)
        if process.is_alive():
            raise MeasuringBroken(
                f"the measuring process {process.pid} does not die: its kernel still holds the GPU. "
                "Wait for it or reset the GPU, then tune again."
            )
        process.close()

    def __enter__(self) -> Measurer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _running(self) -> Connection:
        if self._process is not None and self._pipe is not None and self._process.is_alive():
            return self._pipe
        self.close()
        spawn = multiprocessing.get_context("spawn")  # a forked child could not use CUDA
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_serve, args=(theirs, self._make, os.getpid()), daemon=True)
        process.start()
        theirs.close()  # so that the child's end is the only one, and its death ends the pipe
        self._process, self._pipe = process, ours
        self.starts += 1
        ready = False
        try:
            ready = ours.poll(self._start_s) and ours.recv() == "ready"
        except (EOFError, ConnectionError):
            process.join(GONE_S)
        if not ready:
            code = process.exitcode
            self.close()
            how = f"exit code {code}" if code is not None else f"not ready after {self._start_s:g} s"
            raise MeasuringBroken(f"the measuring process does not start ({how}); its own message is on stderr.")
        return ours

    def _lost(self) -> FlashsmithError:
        process = self._process
        code = None
        if process is not None:
            process.join(GONE_S)
            code = process.exitcode
        self.close()
        if code is not None and code < 0:
            return Rejected(f"Crash: the measuring process died of {_signal_name(-code)}.")
        if code == 1:  # an exception that is not about a candidate
            return MeasuringBroken("the measuring process failed; its traceback is on stderr.")
        return Rejected(f"Crash: the measuring process ended with exit code {code}.")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _serve(pipe: Connection, make: Callable[[], Work], parent: int) -> None:
    """The process: answer requests until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends this process
    if sys.platform == "linux":  # a hanging kernel must not outlive a parent that was killed
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    work = make()
    pipe.send("ready")
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        try:
            reply = (work(request), "")
        except FlashsmithError as error:
            reply = (None, f"{type(error).__name__}: {error}")
        pipe.send(reply)
