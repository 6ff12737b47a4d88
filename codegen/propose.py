"""Propose the next tile of a search: what was tried and what runs now -> a tile that is neither. Keeps no state.

The times of all tiles are taken for a Gaussian process over the fields of the tile, and the tile with the largest
expected improvement over the best so far comes next (Jones, Schonlau and Welch, "Efficient global optimization of
expensive black-box functions", 1998). The space is finite and irregular, a few hundred legal tiles among thousands of
combinations, so the improvement is computed for every legal tile: none is drawn that is illegal, or drawn twice.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import fields
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .spec.defaults import default_tile, published_tiles
from .spec.gpu import Gpu
from .spec.kernel import KernelName
from .spec.problem import Problem
from .spec.space import legal_tiles
from .spec.tile import Tile

REACH = 4.0  # of the covariance: sum of steps in the fields of two tiles at which it has fallen to 1/e
ROUGHNESS = 1e-3  # share of the variance that is no function of the fields: what ptxas does with a tile
DOUBLING = frozenset({"Br", "Bc", "warps", "row_split", "stages", "min_blocks"})  # a step is a factor of two

Floats = NDArray[np.float64]


class Known(NamedTuple):
    """A tile that was tried."""

    tile: Tile
    seconds: float | None  # None if it failed


class Proposer:
    """The order in which a search tries the legal tiles of one kernel.

    First the default tile, without and with spills, then `first`, then the published tiles; then by expected
    improvement. It looks at what is known and at nothing else, so that any worker can go on where another stopped, and
    the same history brings the same proposal. `seed` decides between tiles that promise the same. With `measured` it
    knows the fields that only a GPU can judge; `space` are the tiles to choose from if not all legal ones.
    """

    def __init__(
        self,
        kernel: KernelName,
        problem: Problem,
        gpu: Gpu,
        *,
        seed: int = 0,
        first: Sequence[Tile] = (),
        measured: bool = False,
        space: Sequence[Tile] | None = None,
    ) -> None:
        tiles = list(legal_tiles(kernel, problem, gpu, measured=measured) if space is None else space)
        random.Random(seed).shuffle(tiles)
        self.space = tuple(tiles)
        self._place = {tile: n for n, tile in enumerate(tiles)}
        defaults = (default_tile(kernel, problem, gpu, spilling=spilling) for spilling in (False, True))
        wanted = dict.fromkeys((*defaults, *first, *published_tiles(kernel, problem, gpu)))
        self.first = tuple(tile for tile in wanted if tile in self._place)

    def __call__(self, known: Sequence[Known], running: Collection[Tile]) -> Tile | None:
        """The next tile to try; None if none is left."""
        taken = {tile for tile, _ in known} | set(running)
        for tile in self.first:
            if tile not in taken:
                return tile
        left = [n for n, tile in enumerate(self.space) if tile not in taken]
        if not left:
            return None
        tried = [(self._place[tile], seconds) for tile, seconds in known if tile in self._place]
        timed = [math.log(seconds) for _, seconds in tried if seconds is not None]
        if not timed:
            return self.space[left[0]]
        # A failure says as much as the slowest tile.
        times = np.array([max(timed) if seconds is None else math.log(seconds) for _, seconds in tried])
        at = [n for n, _ in tried]
        unknown = [self._place[tile] for tile in running if tile in self._place]
        mean, deviation = self._expect(at, times, unknown, left)
        return self.space[left[int(np.argmax(expected_improvement(min(timed), mean, deviation)))]]

    def _expect(self, at: list[int], times: Floats, running: list[int], asked: list[int]) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the logarithm of the times of the tiles `asked`.

        What runs has no time yet, but it will be known: it lowers the deviation around it and leaves the mean alone.
        """
        centre, scale = float(times.mean()), max(float(times.std()), 1e-2)
        weights = np.linalg.solve(self._covariance(at, at), (times - centre) / scale)
        mean = self._covariance(asked, at) @ weights * scale + centre
        soon = [*at, *running]
        across = self._covariance(asked, soon)
        explained = np.einsum("ij,ji->i", across, np.linalg.solve(self._covariance(soon, soon), across.T))
        return mean, np.sqrt(np.clip(1.0 - explained, 1e-12, None)) * scale

    def _covariance(self, some: list[int], others: list[int]) -> Floats:
        """Of the times of tiles, in units of their variance."""
        covariance: Floats = self._alike[np.ix_(some, others)]
        return covariance

    @cached_property
    def _alike(self) -> Floats:
        return _correlation(self.space)


def _correlation(tiles: Sequence[Tile]) -> Floats:
    """[tiles, tiles]: how alike the times of two tiles are, less the more steps lie between their fields."""
    steps = np.zeros((len(tiles), len(tiles)))
    for field in fields(tiles[0]):
        values = [int(getattr(tile, field.name)) for tile in tiles]
        rank = {value: n for n, value in enumerate(sorted(set(values)))}
        place = np.array([math.log2(v) if field.name in DOUBLING else float(rank[v]) for v in values])
        steps += np.abs(place[:, None] - place[None, :])
    return np.exp(-steps / REACH) + ROUGHNESS * np.eye(len(tiles))


def expected_improvement(best: float, mean: Floats, deviation: Floats) -> Floats:
    """Of normally distributed values, the mean of what they fall below `best`.

    >>> round(float(expected_improvement(0.0, np.array([0.0]), np.array([1.0]))[0]), 4)
    0.3989
    """
    z = (best - mean) / deviation
    below = 0.5 * (1 + np.array([math.erf(x) for x in z / math.sqrt(2)]))
    density = np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return (best - mean) * below + deviation * density
