"""Every folder that flashsmith reads or writes, once."""

from __future__ import annotations

import os
import stat
from importlib.resources import files
from pathlib import Path
from types import ModuleType

from .errors import UsageError


def cache_dir() -> Path:
    """Compiled kernels: FLASHSMITH_CACHE_DIR, or the user's cache folder. Made private to the user (mode 0700).

    Raises UsageError if it is a link, belongs to somebody else, or others may write to it.
    """
    folder = os.environ.get("FLASHSMITH_CACHE_DIR")
    return _private(Path(folder) if folder else _platformdirs().user_cache_path("flashsmith"))


def user_tuned_dir() -> Path:
    """Records that `tune` wrote here: FLASHSMITH_TUNED_DIR, or the user's data folder. Not made by asking for it."""
    folder = os.environ.get("FLASHSMITH_TUNED_DIR")
    return Path(folder) if folder else _platformdirs().user_data_path("flashsmith") / "tuned"


def user_studies_dir() -> Path:
    """Journals of searches: FLASHSMITH_STUDIES_DIR, or the user's data folder. Not made by asking for it."""
    folder = os.environ.get("FLASHSMITH_STUDIES_DIR")
    return Path(folder) if folder else _platformdirs().user_data_path("flashsmith") / "studies"


def shipped_tuned_dir() -> Path:
    """Records that the package ships, or those of FLASHSMITH_SHIPPED_DIR in their place; never written to."""
    folder = os.environ.get("FLASHSMITH_SHIPPED_DIR")
    return Path(folder) if folder else Path(str(files("flashsmith.tuned")))


def _platformdirs() -> ModuleType:
    """Imported only when it has to answer: a borrowed machine may lack it, and names its folders by the variables."""
    import platformdirs

    return platformdirs


def _private(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = folder.lstat()
    way_out = "Set FLASHSMITH_CACHE_DIR to a folder of your own."
    if stat.S_ISLNK(info.st_mode):
        raise UsageError(f"the kernel cache {folder} is a symbolic link; a cubin from it could be anybody's. {way_out}")
    if hasattr(os, "getuid") and info.st_uid != os.getuid():
        raise UsageError(f"the kernel cache {folder} belongs to user {info.st_uid}, not to {os.getuid()}. {way_out}")
    if info.st_mode & 0o022:
        raise UsageError(
            f"others may write to the kernel cache {folder} (mode {stat.S_IMODE(info.st_mode):o}). {way_out}"
        )
    return folder
