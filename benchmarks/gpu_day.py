"""Start a GPU day from a checkout, installed or not: python benchmarks/gpu_day.py [--out DIR] [--minutes 7] ...

A borrowed GPU machine may have no network to install from. Where `flashsmith` cannot be imported, a folder of links
shows this checkout to Python, and to every process that the day starts, as the package that an installation would make.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def link_package(folder: Path) -> None:
    """`folder`/flashsmith: codegen/ with templates/ and tuned/ beside its files, as pyproject.toml maps them."""
    package = folder / "flashsmith"
    package.mkdir()
    for entry in (*(ROOT / "codegen").iterdir(), ROOT / "templates", ROOT / "tuned"):
        (package / entry.name).symlink_to(entry)


def main() -> int:
    command = [sys.executable, "-m", "flashsmith.gpuday", *sys.argv[1:]]
    if find_spec("flashsmith") is not None:
        return subprocess.run(command, check=False).returncode
    with tempfile.TemporaryDirectory(prefix="flashsmith-checkout-") as folder:
        link_package(Path(folder))
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
