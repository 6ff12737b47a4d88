"""Put constants that microbenchmarks measured on a GPU in the place of those in `rates.py` and in the table of GPUs.

`measured.json` beside this file holds them, one entry a GPU; where there is no such file every constant stays as it is.
What belongs to the architecture (pipes and memory path) serves every board of it, the board's own GPU first, else the
GPU that was measured last; what belongs to the part (tensor rate, L2, clock) serves that part alone.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from .board import Board
from .errors import BadConstants
from .rates import pipe_rates

FILE = Path(__file__).with_name("measured.json")
SCHEMA = 1

# What may be measured; the rest of a table stays what it is.
PATH_FIELDS = (
    "request_cycles", "wavefront_cycles", "fill_share", "shared_latency", "address_cycles", "reduction_bytes_per_clock",
    "barrier_cycles", "special_latency", "greedy",
)  # fmt: skip
PIPE_FIELDS = ("fma", "alu", "convert", "special")
BOARD_FIELDS = ("tensor_flops_per_clock_sm", "l2_bytes_per_clock_sm", "l2_latency", "clock_ghz")
MAY_BE_ZERO = frozenset({"fill_share"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The constants that one GPU gave, by the names of their fields in MemoryPath, PipeRates and Board."""

    gpu: str  # Board.name
    sm: int
    date: str  # 2026-12-01
    driver: str
    path: Mapping[str, float | bool] = field(default_factory=dict)
    pipes: Mapping[str, float] = field(default_factory=dict)
    board: Mapping[str, float] = field(default_factory=dict)


def as_measured(board: Board) -> Board:
    """The board with what is known of it and its architecture by measurement; itself if that is nothing."""
    return with_constants(board, read_measured(FILE))


def with_constants(board: Board, known: Sequence[Measured]) -> Board:
    """The same with the constants of `known`."""
    alike = sorted((m for m in known if m.sm == board.sm), key=lambda m: (m.gpu == board.name, m.date))
    if not alike:
        return board
    best = alike[-1]
    path: dict[str, Any] = dict(best.path)
    pipes: dict[str, Any] = dict(best.pipes)
    own: dict[str, Any] = dict(best.board) if best.gpu == board.name else {}
    return replace(
        board, path=replace(board.path, **path), pipes=replace(board.pipes or pipe_rates(board.sm), **pipes), **own
    )  # fmt: skip


def constants_version() -> str:
    """Whose constants were measured, and when, to follow a model's name: ", rates of h200 2026-12-01"; "" if none."""
    known = [f"{m.gpu} {m.date}" for m in read_measured(FILE)]
    return f", rates of {' and '.join(known)}" if known else ""


@lru_cache(maxsize=8)
def read_measured(file: Path) -> tuple[Measured, ...]:
    """The entries of a file, by GPU; none if there is no file. Raises BadConstants for one that cannot be read."""
    try:
        found = json.loads(file.read_bytes())
        if found["schema"] != SCHEMA:
            raise ValueError(f"schema {found['schema']}, not {SCHEMA}")
        entries = tuple(sorted((Measured(**entry) for entry in found["measured"]), key=lambda m: m.gpu))
        for entry in entries:
            _check(entry)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BadConstants(
            f"the measured constants in {file} cannot be read: {error!r}. Measure again, or remove the file: the "
            "constants of rates.py serve then."
        ) from error
    return entries


def write_measured(file: Path, entry: Measured) -> None:
    """Add the entry of a GPU to a file, in the place of an older one. Raises BadConstants for values out of range."""
    try:
        _check(entry)
    except ValueError as error:
        raise BadConstants(f"the constants of {entry.gpu} are not written: {error}.") from error
    others = [m for m in read_measured(file) if m.gpu != entry.gpu]
    entries = sorted((*others, entry), key=lambda m: m.gpu)
    text = json.dumps({"schema": SCHEMA, "measured": [asdict(m) for m in entries]}, indent=1, sort_keys=True)
    fresh = file.with_suffix(".new")
    fresh.write_text(text + "\n")
    fresh.replace(file)
    read_measured.cache_clear()


def _check(entry: Measured) -> None:
    """ValueError for a name that is no constant, and for a value that no machine has."""
    for values, fields in ((entry.path, PATH_FIELDS), (entry.pipes, PIPE_FIELDS), (entry.board, BOARD_FIELDS)):
        for name, value in values.items():
            if name not in fields:
                raise ValueError(f"{name} is none of {', '.join(fields)}")
            if not (isinstance(value, bool) if name == "greedy" else _is_quantity(value, name in MAY_BE_ZERO)):
                raise ValueError(f"{name} came out as {value!r}")


def _is_quantity(value: object, may_be_zero: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return False
    return value > 0 or (may_be_zero and value == 0)
