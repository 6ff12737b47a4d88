"""Exchange values between the lanes of a warp."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"

_LANE = np.arange(32)


def _sources(mode: str, lane: Any, clamp: Any) -> tuple[Array, Array]:
    """Source lane of each lane, and whether it lies in the segment; out of range a lane reads itself."""
    segment = clamp >> 8 & 0x1F
    bound = clamp & 0x1F
    highest = (_LANE & segment) | (bound & ~segment)
    lowest = _LANE & segment
    if mode == "up":
        source = _LANE - lane
        inside = source >= highest
    elif mode == "down":
        source = _LANE + lane
        inside = source <= highest
    elif mode == "bfly":
        source = _LANE ^ lane
        inside = source <= highest
    else:
        source = lowest | (lane & ~segment)
        inside = source <= highest
    return np.where(inside, source, _LANE), inside


@lru_cache(maxsize=256)
def _known_sources(mode: str, lane: int, clamp: int) -> tuple[Array, Array]:
    return _sources(mode, lane & 0x1F, clamp)


def shuffle(value: Array, n: int, mode: str, lane: int, clamp: int) -> tuple[Array, Array]:
    """shfl with constant lane and clamp: the shuffled values, and where the source was in range."""
    source, inside = _known_sources(mode, lane, clamp)
    rows = np.broadcast_to(value, n).reshape(-1, 32)
    return rows.take(source, axis=1).reshape(-1), inside


def shuffle_variable(value: Array, n: int, mode: str, lane: Array, clamp: Array) -> tuple[Array, Array]:
    """shfl with lane and clamp in registers."""
    lanes = np.broadcast_to(lane, n).reshape(-1, 32).astype("i8") & 0x1F
    clamps = np.broadcast_to(clamp, n).reshape(-1, 32).astype("i8")
    source, inside = _sources(mode, lanes, clamps)
    rows = np.broadcast_to(value, n).reshape(-1, 32)
    return np.take_along_axis(rows, source, axis=1).reshape(-1), inside


def _participants(n: int, members: Array, mask: Array | None) -> Array:
    named: Array = (np.broadcast_to(members, n).reshape(-1, 32) >> _LANE.astype("u4") & np.uint32(1)).astype(bool)
    return named if mask is None else named & mask.reshape(-1, 32)


def vote_any(value: Array, n: int, members: Array, mask: Array | None) -> Array:
    """Whether one participant's predicate holds, for each warp."""
    votes = np.broadcast_to(value, n).reshape(-1, 32)
    return np.asarray((votes & _participants(n, members, mask)).any(1, keepdims=True))


def vote_all(value: Array, n: int, members: Array, mask: Array | None) -> Array:
    """Whether every participant's predicate holds."""
    votes = np.broadcast_to(value, n).reshape(-1, 32)
    return np.asarray((votes | ~_participants(n, members, mask)).all(1, keepdims=True))


def vote_uni(value: Array, n: int, members: Array, mask: Array | None) -> Array:
    """Whether all participants agree."""
    return vote_all(value, n, members, mask) | ~vote_any(value, n, members, mask)


def vote_ballot(value: Array, n: int, members: Array, mask: Array | None) -> Array:
    """A bit for each participant whose predicate holds."""
    votes = np.broadcast_to(value, n).reshape(-1, 32) & _participants(n, members, mask)
    return np.packbits(votes, axis=1, bitorder="little").view("u4")


def leading_lanes(n: int, members: Array) -> tuple[Array, Array]:
    """The lowest lane that is named, for each warp, and whether each lane is it."""
    named = _participants(n, members, None)
    first = named.argmax(1)[:, None]
    return first.astype("u4"), first == _LANE


def active_lanes(n: int, mask: Array | None) -> Array:
    """A bit for each active lane."""
    lanes = np.ones(n, bool) if mask is None else mask
    return np.packbits(lanes.reshape(-1, 32), axis=1, bitorder="little").view("u4")
