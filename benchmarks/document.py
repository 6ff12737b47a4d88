"""Put what a command prints into a document, where that command's name stands."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
END = "<!-- end -->\n"


def begin(command: str) -> str:
    """The line before the part of a document that `command` makes."""
    return f"<!-- {command} -->\n"


def write(document: Path, command: str, text: str) -> None:
    """Replace the part that `command` makes. Raises SystemExit if the document has none."""
    before, _, rest = document.read_text().partition(begin(command))
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{document} lacks the lines {begin(command).strip()} and {END.strip()}")
    document.write_text(f"{before}{begin(command)}{text}{END}{after}")


def give(document: Path, command: str, text: str, *, write_it: bool) -> None:
    """Into the document, or to stdout. Raises SystemExit as `write` does."""
    if write_it:
        write(document, command, text)
    else:
        print(text, end="")


def read(document: Path, command: str) -> str:
    """The part that `command` makes; empty if the document has none."""
    return document.read_text().partition(begin(command))[2].partition(END)[0]
