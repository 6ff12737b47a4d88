"""Hold one tuned kernel and what is known of its speed; read and write the records of a GPU."""

from __future__ import annotations

import json
import re
import tempfile
import warnings
from collections.abc import Hashable, Iterable
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from filelock import FileLock

from ..errors import BadRecord, UsageError
from ..whole_file import write_whole
from .features import PLAIN, Features, ScoreMod, Table
from .kernel import TILE_OF, KernelName, KernelSpec
from .problem import Dtype, Problem
from .search import Search, TimedTile
from .tile import Tile

SCHEMA = 1  # of the file; raise it when the meaning of a field changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Why a tile is believed to be good. Measured and predicted times are never compared with each other."""

    kind: Literal["predicted", "measured"]
    time_ms: float  # of one launch of the kernel, for the record's lengths
    tflops: float  # credited FLOPs over time; 0 for a kernel without matrix products
    spread: float  # relative: between start phases if predicted, between the 20% and 80% quantiles if measured
    by: str  # the model's version, or GPU, driver and date
    trials: int  # candidates that were tried
    samples: int = 0  # launches that were timed, if measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The best tile known for one kernel on one GPU, found for the given lengths."""

    gpu: str
    sm: int
    kernel: KernelName
    dtype: Dtype
    d: int
    causal: bool
    B: int
    Hq: int
    Hk: int
    Nq: int
    Nk: int
    tile: Tile
    evidence: Evidence
    source_sha256: str  # of the text that was timed: another text makes the record stale
    nvrtc: str
    search: Search | None = None  # None: it was not kept
    dv: int = 0  # head dimension of v; 0: d
    features: Features = PLAIN

    @property
    def text(self) -> str:
        """What the kernel's text depends on beside its tile, in words, as Problem.text."""
        words = [self.dtype, f"d={self.d}"]
        words += [f"dv={self.dv}"] if self.dv else []
        words += ["causal"] if self.causal and not self.features.shifted else []
        return " ".join((*words, *self.features.words))

    @property
    def spec(self) -> KernelSpec:
        """The kernel that the record speaks of."""
        return KernelSpec(
            kernel=self.kernel, dtype=self.dtype, d=self.d, causal=self.causal, tile=self.tile, sm=self.sm, dv=self.dv,
            features=self.features,
        )  # fmt: skip

    @property
    def place(self) -> tuple[str, str, int, int, bool, str, int, int, int, int, int]:
        """What a record is the only one for; also its order in the file."""
        return (
            self.kernel, self.dtype, self.d, self.dv, self.causal, " ".join(self.features.words), self.Nq, self.Nk,
            self.B, self.Hq, self.Hk,
        )  # fmt: skip

    def serves_text_of(self, problem: Problem) -> bool:
        """Whether the kernel's text for `problem` differs from the record's in its tile alone."""
        return self.spec == KernelSpec.of(self.kernel, problem, self.tile, self.sm)


def record_path(folder: Path, gpu: str) -> Path:
    """The file that holds a GPU's records. Raises UsageError for a name that is no key: it could lead elsewhere."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", gpu):
        raise UsageError(f"GPU key {gpu!r} cannot name a file: letters, digits, '.', '_' and '-' alone.")
    return folder / f"{gpu}.json"


def read_records(path: Path) -> tuple[Record, ...]:
    """The records of one file; none if it does not exist. A damaged file counts as empty and is named in a warning."""
    try:
        return _parse(path)
    except FileNotFoundError:
        return ()
    except BadRecord as error:
        warnings.warn(f"{error} It counts as missing; nothing overwrites it.", stacklevel=2)
        return ()


def write_record(folder: Path, record: Record) -> Path:
    """Put `record` in its place in the GPU's file: old file or new file, never half; other writers' records are kept.

    Raises UsageError if the folder cannot be written, BadRecord if the file that is there cannot be read.
    """
    path = record_path(folder, record.gpu)
    check_writable(folder)
    with FileLock(path.with_suffix(".lock")):
        try:
            others = [r for r in _parse(path) if r.place != record.place]
        except FileNotFoundError:
            others = []
        write_whole(path, _file_text([*others, record]).encode())
    return path


def check_writable(folder: Path) -> None:
    """Make `folder` if need be. Raises UsageError if files cannot be made in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"records cannot be written to {folder}: {error.strerror}. Name another folder with --out."
        ) from error


def _file_text(records: Iterable[Record]) -> str:
    ordered = sorted(records, key=lambda record: record.place)
    return f'{{"schema": {SCHEMA}, "records": [\n' + ",\n".join(map(_record_text, ordered)) + "\n]}\n"


def _record_text(record: Record) -> str:
    """A line for what the record is of, and one for each part, so that a difference of two files shows what changed."""
    values = asdict(record)
    parts = {name: values.pop(name) for name in ("features", "tile", "evidence", "search")}
    if record.search is None:
        del parts["search"]
    if record.features.plain:
        del parts["features"]
    if not record.dv:
        del values["dv"]
    lines = [json.dumps(values)[1:-1], *(f'"{name}": {json.dumps(part)}' for name, part in parts.items())]
    return "{" + ",\n ".join(lines) + "}"


def _parse(path: Path) -> tuple[Record, ...]:
    try:
        document = json.loads(path.read_bytes(), parse_constant=_refuse_constant)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise BadRecord(f"{path} cannot be read: {error}.") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise BadRecord(f"{path} has schema {found}, this flashsmith reads {SCHEMA}.")
    try:
        return tuple(_record(item) for item in document["records"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadRecord(f"{path} does not follow schema {SCHEMA}: {error}.") from error


def _record(item: dict[str, Any]) -> Record:
    tile_type = TILE_OF[item["kernel"]]
    tile, evidence = tile_type(**item["tile"]), Evidence(**item["evidence"])
    search = _search(item["search"], tile_type) if item.get("search") else None
    features = _features(item["features"]) if "features" in item else PLAIN
    record = Record(**{**item, "tile": tile, "evidence": evidence, "search": search, "features": features})
    for part in (record, tile, evidence, features):
        _check_types(part)
    if evidence.time_ms <= 0:
        raise ValueError(f"time_ms is {evidence.time_ms}, and a launch takes time")
    return record


def _features(item: dict[str, Any]) -> Features:
    mod = item.get("score_mod")
    if mod is None:
        return Features(**item)
    tables = tuple(Table(**table) for table in mod["tables"])
    for table in tables:
        _check_types(table)
    return Features(**{**item, "score_mod": ScoreMod(text=mod["text"], tables=tables)})


def _search(item: dict[str, Any], tile_type: type[Tile]) -> Search:
    def timed(name: str) -> TimedTile | None:
        return TimedTile(**{**item[name], "tile": tile_type(**item[name]["tile"])}) if item[name] else None

    curve = tuple((trial, ms) for trial, ms in item["curve"])
    for trial, ms in curve:
        if type(trial) is not int or type(ms) not in (int, float):
            raise TypeError(f"curve has {[trial, ms]!r}, not a trial and its ms")
    search = Search(**{**item, "default": timed("default"), "runner_up": timed("runner_up"), "curve": curve})
    tiles = [each for each in (search.default, search.runner_up) if each is not None]
    for part in (search, *tiles, *(each.tile for each in tiles)):
        _check_types(part)
    return search


def _check_types(part: Record | Tile | Evidence | Search | TimedTile | Features | Table) -> None:
    """Raise TypeError for a field of another type than declared: a tile of "64" would fail far from here."""
    for name, kind in _types_of(cast(Hashable, type(part))).items():
        value = getattr(part, name)
        if get_origin(kind) is Literal:
            if not any(value == option and type(value) is type(option) for option in get_args(kind)):  # True == 1
                raise TypeError(f"{name} is {value!r}, not one of {', '.join(map(str, get_args(kind)))}")
        elif kind in (int, float, bool, str):
            allowed = (int, float) if kind is float else (kind,)
            if type(value) not in allowed:  # True is an int, and no length
                raise TypeError(f"{name} is {value!r}, not {kind.__name__}")


@cache
def _types_of(part: Hashable) -> dict[str, Any]:
    hints = get_type_hints(cast(Any, part))
    return {f.name: hints[f.name] for f in fields(cast(Any, part))}


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number that a record may hold")
