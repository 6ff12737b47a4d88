"""Name the parts of a GPU day: what each runs, how long it may take, in which order."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

MINUTES = 7.0  # for everything, the report included
Status = Literal["done", "failed", "timeout", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part: a command in a process of its own, and the most seconds that it may take.

    The command writes its findings, as they come, as JSON to the file that it is given; what a killed part had found
    is kept.
    """

    name: str
    seconds: float
    command: Callable[[Path], list[str]]  # of the file for its findings
    why_not: Callable[[], str] = lambda: ""  # a reason to skip it, or ""
    vital: bool = False  # runs every time, and nothing runs without it


CONFIGS = tuple((d, causal) for d in (128, 64) for causal in (False, True))  # bf16
TILED = ("forward", "fused", "dkdv", "dq", "forward90", "fused90")


def parts(folder: Path) -> tuple[Part, ...]:
    """The plan: correctness; the microbenchmarks, which are short and settle a model's constants; tuning, so that the
    bench times tuned kernels; then what a model is judged by.

    The limits add up to more than the day has, since few parts need theirs; what is left over when time is up is not
    started, and a second call with the same folder does it.
    """
    day = partial(_module, "flashsmith.gpuday.work")
    tests = Part(name="tests", seconds=120, command=day("tests"), why_not=partial(_missing, "pytest"))
    rates = Part(name="rates", seconds=60, command=day("rates"))
    environment = Part(name="environment", seconds=45, command=day("environment"), vital=True)
    sanitizer = Part(name="sanitizer", seconds=60, command=day("sanitizer"))
    memory = Part(name="memory", seconds=30, command=day("memory"))
    tuned = [
        Part(
            name=f"tune {_name(*c)}", seconds=45, command=day("tune", *map(str, c), str(folder / "tuned")),
            why_not=partial(_missing, "optuna"),
        )
        for c in CONFIGS
    ]  # fmt: skip
    benches = [Part(name=f"bench {_name(*c)}", seconds=60, command=day("bench", *map(str, c))) for c in CONFIGS]
    tiles = [Part(name=f"tiles {kernel}", seconds=45, command=day("tiles", kernel)) for kernel in TILED]
    warpgroups = Part(name="warpgroups", seconds=90, command=day("warpgroups"))
    flex = Part(name="flex", seconds=60, command=day("flex"))
    return (environment, tests, rates, *tuned, *benches, warpgroups, *tiles, memory, sanitizer, flex)


def _name(d: int, causal: bool) -> str:
    return f"d{d}{' causal' if causal else ''}"


def _missing(package: str) -> str:
    return "" if find_spec(package) else f"{package} is not installed here"


def _module(module: str, *arguments: str) -> Callable[[Path], list[str]]:
    return lambda file: [sys.executable, "-m", module, str(file), *arguments]
