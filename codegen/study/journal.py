"""Keep Optuna's journal file whole, whoever is killed while writing to it."""

from __future__ import annotations

import os
from pathlib import Path

from filelock import FileLock
from optuna.storages.journal import JournalFileOpenLock

BLOCK = 1 << 16


class JournalLock(JournalFileOpenLock):
    """The right to append to a journal, in place of Optuna's: the system takes it back from a process that dies.

    Who gets it finds the file ending with a whole line: half a line is what a killed writer left. No reader has taken
    it for an operation, and behind it no line could be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = FileLock(f"{path}.flock")  # Optuna's own dashboard takes a file .lock for an abandoned link

    def acquire(self) -> bool:
        """Wait for the lock; then mend the file."""
        self._lock.acquire()
        cut_half_line(self._path)
        return True

    def release(self) -> None:
        """Let the next one write."""
        self._lock.release()


def cut_half_line(path: Path) -> None:
    """Cut what stands behind the file's last line feed."""
    with open(path, "rb+") as file:
        end = start = file.seek(0, os.SEEK_END)
        while start:
            block = min(start, BLOCK)
            start -= block
            file.seek(start)
            newline = file.read(block).rfind(b"\n")
            if newline >= 0:
                start += newline + 1
                break
        if start < end:
            file.truncate(start)
