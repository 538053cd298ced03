"""Rhythm: when an update has the tiers, and when the next one is expected to."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

REMEMBERED = 3
"""Times between updates; the shortest counts, for saving or evaluation in between makes one longer."""
LEAST_LEAD_S = 0.15
"""What a device was given before must be done with, its queue too, when the update begins."""
PART = 20
"""The longer the time between updates, the less exactly it is known: to one part in so many."""


class Rhythm:
    """Told when updates begin and end; tells others of the next one. Safe to ask from any thread: a hint.

    Parameters
    ----------
    now_s : callable
        A clock.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._between_s: deque[float] = deque(maxlen=REMEMBERED)
        self._ended_s: float | None = None
        self.is_stepping = False
        """Whether an update goes on."""

    def begin(self) -> None:
        """An update begins."""
        if self._ended_s is not None:
            self._between_s.append(self._now_s() - self._ended_s)
        self._ended_s = None
        self.is_stepping = True

    def end(self) -> None:
        """It has ended, also if by an error. Idempotent."""
        if self.is_stepping:
            self._ended_s = self._now_s()
        self.is_stepping = False

    def is_near(self, lead_s: float) -> bool:
        """Whether the next update is expected within `lead_s`, or was expected so long ago and may still come."""
        ended_s, between_s = self._ended_s, list(self._between_s)
        if ended_s is None or not between_s:
            return False
        shortest_s = min(between_s)
        return abs(self._now_s() - ended_s - shortest_s) < max(lead_s, LEAST_LEAD_S, shortest_s / PART)
