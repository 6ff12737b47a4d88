"""The storages that studies are tried on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.study import servers

NUMBERS = count()


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    with servers.postgresql() as url:
        yield url


@pytest.fixture(scope="session")
def redis() -> Iterator[str]:
    with servers.redis() as url:
        yield url


@pytest.fixture(params=["journal", "postgresql", "redis"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[int], str]]:
    """The URL of storage number n: it has no studies but, maybe, those of other numbers."""
    if request.param == "journal":
        yield lambda n: str(tmp_path / f"{n}.journal")
    elif request.param == "postgresql":
        import psycopg

        url, name = request.getfixturevalue("postgresql"), f"test_{next(NUMBERS)}"
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        yield lambda n: url.replace("/postgres?", f"/{name}?")
    else:
        from redis import Redis

        url = request.getfixturevalue("redis")
        yield lambda n: f"{url}/{n % 16}"
        with Redis.from_url(url) as client:
            client.flushall()
