"""python -m flashsmith.gpuday"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from .plan import MINUTES, parts
from .report import write_markdown
from .runner import run_day


def main(arguments: list[str] | None = None) -> int:
    """Run the day. Exit status 0 if every part is done or cannot run here; 1 if one failed, or is left over."""
    parser = argparse.ArgumentParser(
        prog="flashsmith.gpuday", description="Everything that needs a GPU, in one report."
    )
    parser.add_argument("--out", type=Path, default=Path("gpuday"), help="folder of report.json, report.md and tuned/")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all parts together")
    parser.add_argument("--only", default="", help="parts whose names start so, with commas between")
    parser.add_argument("--fresh", action="store_true", help="run parts again that are done")
    asked = parser.parse_args(arguments)
    folder = asked.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["FLASHSMITH_TUNED_DIR"] = str(folder / "tuned")  # the day's own records serve its benches
    if find_spec("platformdirs") is None:  # it would have named the user's cache
        os.environ.setdefault("FLASHSMITH_CACHE_DIR", str(Path.home() / ".cache" / "flashsmith"))
    prefixes = tuple(filter(None, asked.only.split(",")))
    plan = [part for part in parts(folder) if not prefixes or part.name.startswith(prefixes)]
    state = run_day(plan, folder, asked.minutes, fresh=asked.fresh, report=partial(write_markdown, folder))
    write_markdown(folder, state)
    print(folder / "report.md")
    statuses = [state["parts"].get(part.name, {}).get("status") for part in plan]
    return 0 if all(status in ("done", "skipped") for status in statuses) else 1


if __name__ == "__main__":
    sys.exit(main())
