"""Hold what features add to q, k and v of one call, as PyTorch tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ..philox import KEEP_ALL
from ..spec.features import ScoreMod, Window


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """What a query sees, of which sequences, and what is done to its scores and weights; see spec.problem.Problem.

    Packed sequences lie one after the other: q [1, Hq, rows of all, d]; `causal` ends the window at a query's own key.
    """

    window: Window = (None, None)
    top_left: bool = False
    k_lens: Tensor | None = None  # [B]: keys of each sequence; those behind are not seen, and move no diagonal
    cu_q: Tensor | None = None  # [B + 1]: where the rows of each sequence begin; the last: how many there are
    cu_k: Tensor | None = None
    max_q: int = 0  # rows and keys of the longest sequence, or more: the kernels' blocks are laid out for so many
    max_k: int = 0
    score_mod: ScoreMod | None = None
    tables: Mapping[str, Tensor] = field(default_factory=dict)  # that it reads, by name
    sinks: Tensor | None = None  # [Hq]
    rng: Tensor | None = None  # [2], int64: seed and offset of dropout
    keep_below: int = KEEP_ALL  # of 2^16 random numbers, those that keep a weight

    @property
    def keep(self) -> float:
        """The share of the weights that dropout keeps."""
        return self.keep_below / KEEP_ALL


NOTHING = Added()
