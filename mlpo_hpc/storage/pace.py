"""Pace: how traffic that can wait goes on beside traffic that cannot."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from mlpo_hpc.storage.lane import Lane

SHARE = 50
"""A lane that is busy all the time gives up one part in so many, so that the other traffic comes to an end too."""
LEAST_PATIENCE_S = 5.0
"""A shorter time that a lane is busy is its own."""
MOST_PATIENCE_S = 60.0
"""Bytes that were queued for long do not hold up those after them for ever."""
FIRST_POLL_S, LAST_POLL_S = 0.002, 0.02
"""Between two looks: looking takes time of a processor that training wants."""
NEWS_S = 0.1
"""While others want them, looks are this far apart: the end of that is told."""


class Pace:
    """One thread's way through some lanes: while they are idle, else a small part of the time.

    Parameters
    ----------
    lanes : sequence of Lane
        Those whose device it uses; none: nothing holds it up.
    is_wanted : callable, optional
        Whether somebody will ask more of them within the given seconds, though nothing is asked now.
    news : threading.Condition, optional
        Notified when that has ended.
    """

    def __init__(
        self,
        lanes: Sequence[Lane] = (),
        is_wanted: Callable[[float], bool] = lambda _: False,
        news: threading.Condition | None = None,
    ) -> None:
        self._lanes = list(lanes)
        self._is_wanted = is_wanted
        self._news = news or threading.Condition()
        self.before_others: Callable[[], None] = lambda: None
        """Called while others are about to ask, or ask: what this traffic can do for them in time."""
        self._last_s = LEAST_PATIENCE_S / SHARE
        self._hurried = False
        self._awaited = 0

    @property
    def is_free(self) -> bool:
        """Whether nothing holds it up; so it is too when the process is about to end."""
        return not self._lanes or self._hurried or self._awaited > 0 or not threading.main_thread().is_alive()

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Somebody waits for this traffic as long as this lasts: it is as urgent as any other."""
        with self._news:
            self._awaited += 1
            self._news.notify_all()
        try:
            yield
        finally:
            self._awaited -= 1

    def hurry(self) -> None:
        """From now on somebody waits for this traffic: it is as urgent as any other."""
        with self._news:
            self._hurried = True
            self._news.notify_all()

    def wait(self) -> None:
        """Wait until the lanes are idle, or as long as is fair."""
        patience_s = min(MOST_PATIENCE_S, max(LEAST_PATIENCE_S, SHARE * self._last_s))
        end, pause_s = time.monotonic() + patience_s, FIRST_POLL_S
        while not self.is_free and time.monotonic() < end:
            if self._is_wanted(self._last_s):  # what is begun now would still be under way
                self.before_others()
                self._rest(NEWS_S, lambda: self._is_wanted(self._last_s))
            elif all(lane.is_idle() for lane in self._lanes):
                return
            else:
                self._rest(pause_s, lambda: True)
                pause_s = min(LAST_POLL_S, 1.5 * pause_s)

    def _rest(self, seconds: float, is_held_up: Callable[[], bool]) -> None:
        """Wait for news, unless they came before we listened."""
        with self._news:
            if is_held_up() and not self.is_free:
                self._news.wait(seconds)

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Move some bytes that do not go through the lanes, in the turn of this rank."""
        self.wait()
        begin = time.monotonic()
        with ExitStack() as turns:
            for lane in self._lanes:
                turns.enter_context(lane.turn())
            yield
        self.took(time.monotonic() - begin)

    def took(self, seconds: float) -> None:
        """So long the last bytes were under way: the longer, the more time is left to others before the next ones."""
        self._last_s = seconds
