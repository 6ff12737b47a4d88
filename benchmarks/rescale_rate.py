"""Print how often a warp of a lazily rescaling forward rescales, by the spread of the scores. No GPU is needed.

    python benchmarks/rescale_rate.py

Scores are independent and normally distributed, in natural units; 64 warps of 32 rows, 4096 keys in tiles of 64.
"""

from __future__ import annotations

import math

import numpy as np

WARPS, ROWS, KEYS, BC = 64, 32, 4096, 64
MAX_GROWTH = 8.0  # of the exponent in base 2, as in templates/parts/softmax.j2


def rescale_rate(deviation: float, *, seed: int = 0) -> float:
    """The share of tiles in which some row of a warp outgrows its m, the first tile of each row among them."""
    scores = np.random.default_rng(seed).normal(0.0, deviation * math.log2(math.e), (WARPS, ROWS, KEYS // BC, BC))
    tops = scores.max(axis=3)
    m = np.full((WARPS, ROWS), -np.inf)
    taken = 0
    for j in range(KEYS // BC):
        rescales = (tops[:, :, j] - m > MAX_GROWTH).any(axis=1)
        m[rescales] = np.maximum(m, tops[:, :, j])[rescales]
        taken += int(rescales.sum())
    return taken / (WARPS * KEYS // BC)


if __name__ == "__main__":
    for deviation in (1.0, 2.0, 4.0, 9.0):
        print(f"standard deviation {deviation:g}: {rescale_rate(deviation):.1%} of the tiles")
