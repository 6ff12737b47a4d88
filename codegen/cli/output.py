"""Write results: JSON, text, bytes, to stdout or to a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from ..errors import UsageError
from . import show


def write_text(text: str, language: str, output: Path | None) -> None:
    if output is None:
        show.code(text, language)
    else:
        _write(output, text.encode())


def write_bytes(data: bytes, output: Path | None) -> None:
    if output is not None:
        _write(output, data)
    elif sys.stdout.isatty():
        raise UsageError("a cubin is no text: name a file with -o, or redirect stdout.")
    else:
        sys.stdout.buffer.write(data)


def _write(output: Path, data: bytes) -> None:
    try:
        output.write_bytes(data)
    except OSError as error:
        raise UsageError(f"-o {output}: {error.strerror}") from error


def print_json(value: object) -> None:
    print(json.dumps(value, indent=1, default=_plain))


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else str(value)
