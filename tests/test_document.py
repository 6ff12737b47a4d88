"""What a command prints stands in a document between its name and an end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import document


def test_a_part_is_put_between_its_marks_and_found_there(tmp_path: Path) -> None:
    file = tmp_path / "model.md"
    file.write_text("before\n<!-- make table -->\nold\n<!-- end -->\nafter\n<!-- make other -->\n<!-- end -->\n")
    document.write(file, "make table", "new\n")
    assert file.read_text() == (
        "before\n<!-- make table -->\nnew\n<!-- end -->\nafter\n<!-- make other -->\n<!-- end -->\n"
    )
    assert document.read(file, "make table") == "new\n" and document.read(file, "make other") == ""


def test_without_marks_nothing_is_written(tmp_path: Path) -> None:
    file = tmp_path / "model.md"
    file.write_text("no marks\n")
    with pytest.raises(SystemExit, match="lacks the lines <!-- make table -->"):
        document.write(file, "make table", "new\n")
    assert file.read_text() == "no marks\n" and document.read(file, "make table") == ""
