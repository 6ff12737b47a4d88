"""What every test stands on: a kernel cache of the run's own, no records and studies but its own, golden files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden with what is rendered now")


@pytest.fixture(scope="session", autouse=True)
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One kernel cache for all workers of a run, or that which FLASHSMITH_TEST_KERNELS names; nothing of the user's."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHSMITH_CACHE_DIR", os.environ.get("FLASHSMITH_TEST_KERNELS") or str(shared / "kernels"))
        patch.setenv("FLASHSMITH_TUNED_DIR", str(base / "tuned"))
        patch.setenv("FLASHSMITH_SHIPPED_DIR", str(base / "shipped"))
        patch.setenv("FLASHSMITH_STUDIES_DIR", str(base / "studies"))
        yield


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> object:
    """Compare text with a golden file, or rewrite the file under --update-golden."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_text(text)
        assert text == path.read_text(), f"{name} changed: read the difference, then run with --update-golden"

    return compare
