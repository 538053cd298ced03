"""Rhythm: when an update has the tiers, and when the next one is expected to."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

REMEMBERED = 3
"""Times that are looked back on; the shortest counts: better to be ready too early."""
LEAST_LEAD_S = 0.1
"""What a device was given before must be done with, its queue too, when the update begins."""
PART = 20
"""The longer a backward pass lasts, the less exactly its end is known: to one part in so many."""


class Rhythm:
    """Told of backward passes and updates; tells others whether an update is near. Ask from any thread: a hint.

    The pass whose number is that of the last one before the update before is taken for the last one again, and for as
    long as it was.

    Parameters
    ----------
    now_s : callable
        A clock.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._lasted_s: deque[float] = deque(maxlen=REMEMBERED)
        """From the beginning of the last pass to that of the update."""
        self._passes, self._usual_passes = 0, 0
        self._since_s = 0.0
        self.is_stepping = False
        """Whether an update goes on."""
        self.news = threading.Condition()
        """Notified when the tiers may be free for others."""

    def backward(self) -> None:
        """A backward pass begins."""
        self._passes, self._since_s = self._passes + 1, self._now_s()

    def begin(self) -> None:
        """An update begins."""
        if self._passes:
            self._usual_passes = self._passes
            self._lasted_s.append(self._now_s() - self._since_s)
        self.is_stepping = True
        self.tell()  # it may not get on from the start

    def end(self) -> None:
        """It has ended, also if by an error, or was left out. Idempotent."""
        self._passes, self.is_stepping = 0, False
        self.tell()

    def tell(self) -> None:
        """Let others look whether they are free, or it does not get on without them."""
        with self.news:
            self.news.notify_all()

    def is_near(self, lead_s: float) -> bool:
        """Whether an update is expected within `lead_s`, or would have been, and does not come much later.

        The first half of the pass is none of that time, or the others would have none.
        """
        lasted_s = list(self._lasted_s)
        if not lasted_s or self._passes < self._usual_passes:
            return False
        shortest_s = min(lasted_s)
        lead_s = min(shortest_s / 2, max(lead_s, LEAST_LEAD_S, shortest_s / PART))
        return shortest_s - lead_s < self._now_s() - self._since_s < 2 * max(lasted_s) + lead_s
