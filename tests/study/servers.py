"""Start a real PostgreSQL and a real Redis for the tests: nobody's but ours, nothing of them is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

START_S = 30.0  # that a server may take to answer


@contextmanager
def postgresql() -> Iterator[str]:
    """The URL of an empty database, served on a socket in a folder of its own. Skips the test where there is none."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin")) or [
        Path(path).parent for path in [shutil.which("postgres")] if path
    ]
    if not found:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    with _folder() as folder:
        become: list[str] = []
        if os.getuid() == 0:  # it refuses to be run by root
            shutil.chown(folder, "nobody")
            become = ["setpriv", "--reuid=nobody", "--clear-groups"]
        data = folder / "data"
        make = [str(found[-1] / "initdb"), "-D", str(data), "-U", "flashsmith", "-A", "trust", "--no-sync"]
        subprocess.run([*become, *make], check=True, stdout=subprocess.DEVNULL, cwd=folder)
        options = ["-D", str(data), "-k", str(folder), "-c", "listen_addresses=", "-c", "fsync=off"]
        url = f"postgresql://flashsmith@/postgres?host={folder}"
        with _serving([*become, str(found[-1] / "postgres"), *options], folder):
            _until(lambda: _postgresql_answers(url))
            yield url


@contextmanager
def redis() -> Iterator[str]:
    """The URL of an empty server, without its database's number. Skips the test if it is not installed."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("Redis is not installed: apt-get install redis-server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (
        _folder() as folder,
        _serving([program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)], folder),
    ):
        _until(lambda: _redis_answers(port))
        yield f"redis://127.0.0.1:{port}"


@contextmanager
def _folder() -> Iterator[Path]:
    """Outside of pytest's, which nobody else may enter."""
    folder = Path(tempfile.mkdtemp(prefix="flashsmith-test-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _serving(command: list[str], folder: Path) -> Iterator[None]:
    with open(folder / "log", "wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        yield
    finally:
        server.send_signal(signal.SIGINT)  # PostgreSQL does not wait for its clients then
        server.wait(START_S)


def _until(answers: Callable[[], bool]) -> None:
    end = time.monotonic() + START_S
    while not answers():
        assert time.monotonic() < end, "the server does not answer"
        time.sleep(0.05)


def _postgresql_answers(url: str) -> bool:
    import psycopg

    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True


def _redis_answers(port: int) -> bool:
    from redis import Redis
    from redis.exceptions import RedisError

    try:
        with Redis(port=port) as client:
            return bool(client.ping())
    except RedisError:
        return False
