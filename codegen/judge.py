"""Turn down the tiles that the model is sure of, before a GPU is asked for their time."""

from __future__ import annotations

from .objective import Candidate
from .predict import ERROR
from .study import Study

SURE = 2.5 * ERROR  # relative: no error of the model that was seen turns around what lies further apart


class Judge:
    """Compares predictions with predictions alone: those of the model's own study, where each that it hears of goes."""

    def __init__(self, model: Study) -> None:
        self._model = model

    def __call__(self, expected: Candidate) -> str:
        """Why a tile is not worth a measurement: how far its prediction lies behind the best by now. Else ""."""
        if expected.time is None:
            return ""
        self._model.add(expected)
        times = [c.time.seconds for c in self._model.book.candidates if c.time is not None]
        behind = expected.time.seconds / min(times, default=expected.time.seconds) - 1
        return f"predicted {behind:.0%} behind the best prediction, and the model errs less." if behind > SURE else ""
