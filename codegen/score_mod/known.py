"""Spell the score modifications that papers have named."""

from __future__ import annotations

import math

from .parse import MAX_FLOAT, MIN_FLOAT, BadScoreMod

ALIBI = "score - slope[h] * abs(i + Nk - Nq - j)"
"""Press et al., "Train Short, Test Long", with the diagonal at the bottom right as flash-attn's alibi_slopes has it."""

BIAS = "score + bias[b, h, i, j]"
"""Any additive bias. A dimension of length 1 is broadcast: every index is clamped to its one entry."""


def softcap(cap: float) -> str:
    """Scores kept between -cap and cap, as Gemma 2 does.

    Raises BadScoreMod unless cap is positive and float32 holds it.

    >>> softcap(30)
    '30.0 * tanh(score / 30.0)'
    """
    cap = float(cap)
    text = f"{cap!r} * tanh(score / {cap!r})"
    if not (math.isfinite(cap) and MIN_FLOAT <= cap <= MAX_FLOAT):
        raise BadScoreMod(f"a cap is positive and at most {MAX_FLOAT}, not {cap!r}.", text, 0)
    return text
