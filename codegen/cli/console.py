"""Print lines and tables on stdout: whole when it is a file or a pipe, fitted when it is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

WIDE = 240  # columns of a table that goes to a file or a pipe: nothing is cut


def print_lines(*lines: object) -> None:
    """Text and tables, one under the other."""
    console = Console(highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else WIDE)
    for line in lines:
        console.print(line)


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    """An empty table; the columns named in `right` are set to the right."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    return made
