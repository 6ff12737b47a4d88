"""Every command that prints a predicted time says how far to believe it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_cli import run

SMALL = ("--gpu", "a100", "--d", "64", "--nq", "512", "--heads", "1", "--batch", "1")


@pytest.mark.parametrize(
    "command",
    [
        ("predict", "forward", *SMALL),
        ("bench", "--gpu", "a100", "--d", "64", "--n", "512", "--pass", "forward"),
        ("tune", *SMALL, "--pass", "forward", "--trials", "2"),
        ("list",),  # what tune has found
        ("explain", "forward", *SMALL),
    ],
    ids=lambda command: command[0],
)
def test_the_error_stands_beside_a_prediction(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, *command)
    assert status == 0 and "predicted" in out and "mean error of the model 6%" in out, out
    if command[0] in ("bench", "tune", "list"):  # where times stand beside each other
        assert "less than 5% say nothing" in out


@pytest.fixture(autouse=True, scope="module")
def one_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of these tests: what one tunes, the next lists."""
    folder: Path = tmp_path_factory.mktemp("honesty")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHSMITH_TUNED_DIR", str(folder))
        yield  # type: ignore[misc]
