"""Open the storage that a URL names: a journal file, PostgreSQL or Redis."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage, RDBStorage, get_storage
from optuna.storages.journal import BaseJournalBackend, JournalFileBackend, JournalRedisBackend

from .. import paths
from ..errors import UsageError
from ..spec.gpu import Gpu
from .journal import JournalLock

SERVED = "Name a file (a journal), postgresql://USER@HOST/DATABASE or redis://HOST:6379/0."
OPENING = 0x666C6173  # PostgreSQL's number of the lock under which its tables are made: any, as long as it is ours
POSTGRESQL = {"postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}  # the driver that `fleet` installs


def default_storage(gpu: Gpu) -> str:
    """A journal in the user's data folder for each GPU, as there is a file of records for each.

    One for all would be read from its beginning by every search; one for each study could not be looked at together.
    """
    return str(paths.user_studies_dir() / f"{gpu.key}.journal")


def open_storage(url: str | None) -> BaseStorage:
    """The storage; in this process's memory if None. Raises UsageError: not served, not installed, out of reach."""
    if url is None:
        return InMemoryStorage()
    scheme = urlsplit(url).scheme if "://" in url else ""
    base = scheme.partition("+")[0]
    if not scheme:
        return _journal(Path(url))
    if base in POSTGRESQL:
        return _postgresql(url, POSTGRESQL.get(scheme, scheme))
    if base in ("redis", "rediss"):
        return _redis(url)
    why = "many workers on one SQLite file lock each other out" if base == "sqlite" else f"{scheme}:// is unknown"
    raise UsageError(f"--storage {shown(url)}: {why}. {SERVED}")


def storage_errors() -> tuple[type[Exception], ...]:
    """What the libraries below Optuna raise when a storage cannot be read or written."""
    return (OSError, StorageInternalError, *_named("sqlalchemy.exc", "SQLAlchemyError"),
            *_named("redis.exceptions", "RedisError"))  # fmt: skip


def _named(module: str, name: str) -> tuple[type[Exception], ...]:
    """A class of a module if that is loaded: what is not cannot have raised anything."""
    return (getattr(sys.modules[module], name),) if module in sys.modules else ()


def shown(url: str) -> str:
    """The URL without its password."""
    parts = urlsplit(url)
    if "://" not in url or parts.password is None:
        return url
    return parts._replace(netloc=parts.netloc.replace(f":{parts.password}@", ":***@")).geturl()


def _journal(path: Path) -> BaseStorage:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab+") as file:
            file.seek(0)
            foreign = file.read(1) not in (b"", b"{")
    except OSError as error:
        raise UsageError(f"--storage {path}: it cannot be written ({error.strerror}). {SERVED}") from error
    if foreign:
        raise UsageError(f"--storage {path}: the file is there and no journal. {SERVED}")
    try:
        return JournalStorage(JournalFileBackend(str(path), JournalLock(path)))
    except ValueError as error:  # a line in the middle that no killed writer left
        raise UsageError(
            f"--storage {path}: the journal is damaged ({error}). Move it away, or name another."
        ) from error


def _postgresql(url: str, driver: str) -> BaseStorage:
    _need(driver.partition("+")[2], url)
    import sqlalchemy
    from sqlalchemy.exc import SQLAlchemyError

    full = f"{driver}://{url.partition('://')[2]}"
    try:
        engine = sqlalchemy.create_engine(full)
        with engine.begin() as connection:  # workers that start together would make the same tables
            connection.execute(sqlalchemy.text(f"SELECT pg_advisory_xact_lock({OPENING})"))
            storage = RDBStorage(full, engine_kwargs={"pool_pre_ping": True})
        engine.dispose()
    except SQLAlchemyError as error:
        raise _out_of_reach(url, error) from error
    return get_storage(storage)  # with Optuna's cache of finished trials


def _redis(url: str) -> BaseStorage:
    _need("redis", url)
    from redis.exceptions import RedisError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            return JournalStorage(_Plain(JournalRedisBackend(url)))
    except (RedisError, ValueError) as error:
        raise _out_of_reach(url, error) from error


class _Plain(BaseJournalBackend):
    """A journal without its snapshots: those are pickles, and whoever can write to the server would run code here."""

    def __init__(self, backend: BaseJournalBackend) -> None:
        self._backend = backend

    def read_logs(self, log_number_from: int) -> Iterable[dict[str, Any]]:
        return self._backend.read_logs(log_number_from)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        self._backend.append_logs(logs)


def _need(module: str, url: str) -> None:
    if find_spec(module) is None:
        raise UsageError(
            f"--storage {shown(url)} needs {module}, which is not installed: pip install 'flashsmith[fleet]'. "
            "A file name needs nothing more."
        )


def _out_of_reach(url: str, error: Exception) -> UsageError:
    reason = str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
    password = urlsplit(url).password
    return UsageError(f"--storage {shown(url)}: {reason.replace(password, '***') if password else reason}")
