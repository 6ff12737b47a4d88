"""Keep the times of every legal tile of one kernel on one GPU, so that a search can be replayed: tests/data/spaces.

The first line of a table says what the times are. Then one line a tile: its fields, and the predicted seconds or the
class of its failure.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from flashsmith.objective import Candidate
from flashsmith.predict import MODEL
from flashsmith.spec.kernel import TILE_OF, KernelName
from flashsmith.spec.problem import Problem
from flashsmith.spec.space import tile_of
from flashsmith.spec.tile import Tile

FOLDER = Path(__file__).parents[1] / "tests" / "data" / "spaces"


@dataclass(frozen=True)
class Space:
    """One kernel on one GPU, bf16, at the lengths that `flashsmith tune` has by default."""

    kernel: KernelName
    gpu: str
    d: int
    causal: bool = False

    @classmethod
    def of(cls, name: str) -> Space:
        """The space of a name: forward_a100_d128, or forward_rtx4090_d64_causal."""
        kernel, gpu, d, *mask = name.split("_")
        return cls(kernel, gpu, int(d[1:]), bool(mask))  # type: ignore[arg-type]

    @property
    def name(self) -> str:
        return f"{self.kernel}_{self.gpu}_d{self.d}{'_causal' if self.causal else ''}"

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.csv.gz"

    @property
    def problem(self) -> Problem:
        return Problem(dtype="bf16", d=self.d, causal=self.causal, B=2, Hq=16, Nq=8192)

    def write(self, candidates: Sequence[Candidate]) -> None:
        """Keep the times; the same bytes for the same times."""
        p, text = self.problem, io.StringIO()
        text.write(f"# {self.name}, {p.text}, B={p.B} Hq={p.Hq} Nq={p.Nq}: seconds predicted by {MODEL}\n")
        lines = csv.writer(text, lineterminator="\n")
        lines.writerow([f.name for f in fields(TILE_OF[self.kernel])] + ["seconds"])
        for c in candidates:
            seconds = f"{c.time.seconds:.6e}" if c.time else c.failure.partition(":")[0]
            lines.writerow([int(value) for value in astuple(c.tile)] + [seconds])
        FOLDER.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))

    def read(self) -> Mapping[Tile, float | None]:
        """The seconds of each tile, None for one that failed; fields that a table is older than have their defaults."""
        lines = gzip.decompress(self.path.read_bytes()).decode().splitlines()
        times: dict[Tile, float | None] = {}
        for row in csv.DictReader(lines[1:]):
            time = row.pop("seconds")
            tile = tile_of(self.kernel, {field: int(value) for field, value in row.items()})
            times[tile] = float(time) if time[0].isdigit() else None
        return times


def recorded_names() -> list[str]:
    """The spaces that are there."""
    return sorted(path.name.removesuffix(".csv.gz") for path in FOLDER.glob("*.csv.gz"))
