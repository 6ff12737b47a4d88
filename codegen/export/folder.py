"""Write the files of an export into a folder: each whole or not at all, and none in the place of somebody else's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..spec.kernel import KERNELS
from ..whole_file import write_whole
from .cuda import MARK
from .launches import FILE, MADE_BY


def write_files(folder: Path, files: Mapping[str, bytes], *, force: bool = False) -> list[Path]:
    """Write `files` by name, and return where. A file of an earlier export that it takes the place of is replaced.

    Raises UsageError if the folder holds files that no export made, or the description of another pass, unless `force`;
    and if it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        before = _described(folder / FILE)
        replaced = _cubins(before) if FILE in files else frozenset()
        if not force:
            _refuse_foreign(folder, files, before)
        for name, data in files.items():
            write_whole(folder / name, data)
        for name in replaced - set(files):  # a cubin that the description named before, and does not now
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"-o {folder}: {error.strerror}. Name a folder that can be written.") from error
    return [folder / name for name in files]


def _refuse_foreign(folder: Path, files: Mapping[str, bytes], before: Mapping[str, Any]) -> None:
    foreign = sorted(p.name for p in folder.iterdir() if p.name not in _cubins(before) and not _made_by_us(p))
    if foreign:
        files_of_others = "a file" if len(foreign) == 1 else f"{len(foreign)} files"
        raise UsageError(
            f"-o {folder} holds {files_of_others} that no export made ({foreign[0]}). "
            "Name a folder of its own, or write there all the same with --force."
        )
    if FILE in files and before and before.get("name") != json.loads(files[FILE])["name"]:
        raise UsageError(
            f"-o {folder} holds the machine code of {before.get('name')}. "
            "Name another folder, or replace it with --force."
        )


def _made_by_us(path: Path) -> bool:
    if path.name == FILE:
        return bool(_described(path))
    if path.suffix not in (".cu", ".h") or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MARK)) == MARK.encode()


def _described(path: Path) -> dict[str, Any]:
    """What a description of ours says; empty if there is none."""
    try:
        read = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return read if isinstance(read, dict) and read.get("made_by") == MADE_BY else {}


def _cubins(described: Mapping[str, Any]) -> frozenset[str]:
    """The files of machine code that a description names."""
    named = {launch.get("cubin") for launch in described.get("launches", ())}
    return frozenset(f"{kernel}.cubin" for kernel in KERNELS if f"{kernel}.cubin" in named)
