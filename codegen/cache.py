"""Keep compiled kernels on disk: one folder each, whole or absent, readable by people and by cuobjdump."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

from filelock import FileLock

SCHEMA = 1  # of build.json; raise it when the meaning of an entry changes


class Entry:
    """The folder `<key>-<digest>`: kernel.cu, kernel.cubin, kernel.ptx and build.json, which names their hashes.

    A folder appears by one rename, so that a reader sees all of it or nothing, whoever is killed meanwhile.
    """

    def __init__(self, root: Path, key: str, digest: str) -> None:
        self.root = root
        self.folder = root / f"{key}-{digest[:16]}"

    def lock(self) -> FileLock:
        """Held while compiling: one process compiles, the others find its result. The system frees it on kill."""
        locks = self.root / "locks"
        locks.mkdir(mode=0o700, exist_ok=True)
        return FileLock(locks / f"{self.folder.name[-16:]}.lock")

    def read(self) -> tuple[dict[str, bytes], dict[str, Any]] | None:
        """(files, build facts), or None if absent or damaged; damage is named once in a warning."""
        try:
            build = json.loads((self.folder / "build.json").read_bytes())
            contents = {name: (self.folder / name).read_bytes() for name in build["sha256"]}
        except FileNotFoundError:
            if self.folder.exists():
                self._warn("a file is missing")
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._warn(f"{type(error).__name__}: {error}")
            return None
        for name, data in contents.items():
            if _sha256(data) != build["sha256"][name]:
                self._warn(f"{name} is not what build.json says")
                return None
        return contents, build

    def write(self, contents: dict[str, bytes], facts: dict[str, Any]) -> None:
        """Publish the entry, in place of a damaged one if there is one."""
        build = {"schema": SCHEMA, **facts, "sha256": {name: _sha256(data) for name, data in contents.items()}}
        fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=self.root))
        try:
            for name, data in contents.items():
                (fresh / name).write_bytes(data)
            (fresh / "build.json").write_text(json.dumps(build, indent=1, sort_keys=True) + "\n")
            if self.folder.exists() or self.folder.is_symlink():
                os.rename(self.folder, fresh / "old")
            os.rename(fresh, self.folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(self.folder / "old", ignore_errors=True)

    def _warn(self, why: str) -> None:
        warnings.warn(f"cache entry {self.folder} is damaged ({why}); it is compiled again.", stacklevel=4)


def digest_of(*parts: str) -> str:
    """Hash of everything that a compiled kernel depends on."""
    return _sha256("\0".join((str(SCHEMA), *parts)).encode())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
