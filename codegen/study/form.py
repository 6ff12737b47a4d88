"""Write what became of a tile as attributes of a trial, and read it back as it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ..measure import Timing
from ..objective import Candidate
from ..predict import Prediction
from ..spec.kernel import KernelName
from ..spec.space import tile_of
from ..spec.tile import Tile

Attributes = Mapping[str, Any]

TIMES: dict[str, type[Prediction] | type[Timing]] = {kind.kind: kind for kind in (Prediction, Timing)}


def outcome(candidate: Candidate) -> tuple[str, Any]:
    """The attribute that holds the time, all of it, or the failure. One, so that it is there or it is not."""
    if candidate.time is None:
        return "failure", candidate.failure
    time = candidate.time
    return "time", {"kind": time.kind, **asdict(time), "spread": float(time.spread)}


def candidate_of(tile: Tile, attributes: Attributes) -> Candidate:
    """The candidate that left these attributes."""
    if "time" not in attributes:
        return Candidate(tile, None, attributes.get("failure", "Failed: its worker did not say why."))
    values = dict(attributes["time"])
    kind = TIMES[values.pop("kind")]
    return Candidate(tile, kind(**{name: value for name, value in values.items() if name in kind.__dataclass_fields__}))


def packed(candidate: Candidate) -> Attributes:
    """A candidate with its tile, as part of a study's own attributes."""
    return {"tile": {name: int(value) for name, value in asdict(candidate.tile).items()}, **dict([outcome(candidate)])}


def unpacked(kernel: KernelName, values: Attributes) -> Candidate:
    """The candidate that was packed."""
    return candidate_of(tile_of(kernel, values["tile"]), values)
