"""Show that a worker is alive, and notice one that is not. No two clocks are ever compared."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event, Thread

from .owner import Owner, is_gone

BEAT_S = 15.0  # between two beats of a worker
GRACE_S = 60.0  # without a beat, after which a worker on another machine counts as dead


class Heart:
    """A thread that calls `beat` again and again."""

    def __init__(self, beat: Callable[[], None], every_s: float) -> None:
        self._beat, self._every_s = beat, every_s
        self._stopped = Event()
        self._thread = Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """The last beat has been."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            self._beat()


class Watch:
    """Other workers' trials as one worker sees them.

    A trial is abandoned if its process is gone from this machine, or if its beat has stood still for `grace_s` by the
    watcher's own clock.
    """

    def __init__(self, grace_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._grace_s, self._clock = grace_s, clock
        self._seen: dict[int, tuple[int, float]] = {}  # trial -> its last beat, and when that was first seen

    def abandoned(self, trial: int, owner: Owner, beat: int) -> bool:
        """Whether nobody works on the trial any more."""
        if is_gone(owner):
            return True
        last, since = self._seen.get(trial, (-1, 0.0))
        if beat != last:
            self._seen[trial] = (beat, self._clock())
            return False
        return self._clock() - since > self._grace_s
