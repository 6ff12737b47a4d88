"""Work in other processes that never outlive this one, and that may be killed without ending it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import connection
from threading import Thread
from types import TracebackType
from typing import Any, Generic, TypeVar

from .errors import FlashsmithError, Rejected

SPAWN = multiprocessing.get_context("spawn")  # a forked child could not use CUDA, and would inherit locks and threads
GONE_S = 5.0  # that a process may take to end by itself

T = TypeVar("T")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Pool:
    """Processes that do tasks. A process may die: what it did is tried once more, alone in a new one."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._until, self._closed = SPAWN.Pipe(duplex=False)  # the processes wait for the end of it, and end
        self._executor = _executor(count, self._until)

    def submit(self, work: Callable[..., T], *arguments: Any) -> Task[T]:
        """Begin `work(*arguments)`; all of it must be picklable."""
        try:
            future = self._executor.submit(work, *arguments)
        except BrokenExecutor:
            self._executor = _executor(self._count, self._until)
            future = self._executor.submit(work, *arguments)
        return Task(future, work, arguments)

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        self._closed.close()
        self._executor.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Task(Generic[T]):
    """What a pool does, or has done."""

    future: Future[T]
    work: Callable[..., T]
    arguments: tuple[Any, ...]

    def result(self) -> T:
        """Wait for it. Raises what the work raises; Rejected if its process died, and the next one too.

        A process that dies breaks all that its pool was doing, so that nobody knows whose fault it was.
        """
        try:
            return self.future.result()
        except BrokenExecutor:
            with _executor(1) as alone:
                try:
                    return alone.submit(self.work, *self.arguments).result()
                except BrokenExecutor as error:
                    raise Rejected("Crash: the process that compiled it died, and so did another one.") from error


def _executor(count: int, until: connection.Connection | None = None) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(count, mp_context=SPAWN, initializer=end_with_parent, initargs=(until,))


def end_with_parent(until: connection.Connection | None = None) -> None:
    """Let this process end as soon as the one that started it has ended, or has closed its end of `until`.

    However that ended. Ctrl-C is left to it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError("end_with_parent() is for processes that multiprocessing started")
    ends: list[Any] = [parent.sentinel, *([until] if until else [])]

    def watch() -> None:
        connection.wait(ends)
        os._exit(1)

    Thread(target=watch, name="parent watch", daemon=True).start()


class Helpers:
    """Processes that each run `work(n)`, n from 1 to `count`, beside this one.

    They are interrupted, as by Ctrl-C, if this one has failed, or if they have not ended soon after it.
    """

    def __init__(self, count: int, work: Callable[[int], object]) -> None:
        self._processes = [SPAWN.Process(target=_help, args=(work, n)) for n in range(1, count + 1)]

    def __enter__(self) -> Helpers:
        for process in self._processes:
            process.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.join(0 if kind else GONE_S)
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(GONE_S)
            if process.is_alive():
                process.kill()
                process.join()


def _help(work: Callable[[int], Any], n: int) -> None:
    end_with_parent()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        work(n)
    except FlashsmithError as error:
        sys.exit(f"flashsmith: worker {n} ended: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
