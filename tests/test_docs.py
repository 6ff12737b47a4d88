"""What the documents say of the project is true of it."""

from __future__ import annotations

import re
from pathlib import Path

from flashsmith.cli.app import COMMANDS
from flashsmith.spec.gpu import GPUS

ROOT = Path(__file__).parents[1]


def test_reported_failures_name_tests_that_exist() -> None:
    """Every row's tests exist and name the number; every number that a test names has a row."""
    rows = re.findall(r"^\| (BUG-\d+) \|.*\| (`.*`) \|$", (ROOT / "docs/reported_failures.md").read_text(), re.M)
    assert len(rows) > 30
    for number, tests in rows:
        for name in re.findall(r"`(.*?)`", tests):
            assert int(number[4:]) in numbers((ROOT / "tests" / name).read_text()), (number, name)
    named = {n for path in (ROOT / "tests").rglob("*.py") for n in numbers(path.read_text())}
    assert named <= {int(number[4:]) for number, _ in rows}


def numbers(text: str) -> set[int]:
    """The numbers that a text names: BUG-29 to BUG-33, BUG-15, 16 and 17."""
    found: set[int] = set()
    for first, more in re.findall(r"BUG-(\d+)((?:(?:, | and | to )(?:BUG-)?\d+)*)", text):
        last = int(first)
        found.add(last)
        for word, number in re.findall(r"(, | and | to )(?:BUG-)?(\d+)", more):
            found |= set(range(last, int(number) + 1)) if word == " to " else {int(number)}
            last = int(number)
    return found


def test_the_readme_names_commands_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    assert set(re.findall(r"^flashsmith ([a-z]+)", text, re.M)) <= set(COMMANDS)
    assert set(re.findall(r"--gpu ([a-z0-9-]+)", text)) <= set(GPUS)
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"make ([a-z]+)", text)) <= targets


def test_links_lead_somewhere() -> None:
    for document in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("tests/*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), (document.name, target)
