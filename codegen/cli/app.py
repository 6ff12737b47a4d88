"""Run a command; turn errors into one line and an exit status."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module

import typer

from ..errors import FlashsmithError, LowerRung, StaleRecord, UsageError

COMMANDS = (
    "gpus", "render", "compile", "check", "predict", "tune", "bench", "list", "explain", "warmup", "memory",
    "export",
)  # fmt: skip

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Generate, read, check, time and tune exact attention kernels; no GPU needed.",
)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; errors become one line on stderr and an exit status."""
    for command in COMMANDS:  # each adds itself to `app`
        import_module(f".{command}", __package__)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _one_line
            for category in (LowerRung, StaleRecord):  # each is said once by whoever says it
                warnings.simplefilter("always", category)
            app(arguments)
    except SystemExit as end:  # how the parser ends, after its own message if the request was bad
        return end.code if isinstance(end.code, int) else 1
    except UsageError as error:
        print(f"flashsmith: {error}", file=sys.stderr)
        return 2
    except FlashsmithError as error:
        print(f"flashsmith: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("flashsmith: stopped", file=sys.stderr)
        return 130
    return 0


def _one_line(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: object = None,
    line: object = None,
) -> None:
    """A warning as a line on stderr: whom it concerns is the user, not a line of our code."""
    print(f"flashsmith: {message}", file=sys.stderr)
