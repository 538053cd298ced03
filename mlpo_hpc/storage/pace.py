"""Pace: how traffic that can wait goes on beside traffic that cannot."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from mlpo_hpc.storage.lane import Lane

SHARE = 50
"""A lane that is busy all the time gives up one part in so many, so that the other traffic comes to an end too."""
LEAST_PATIENCE_S = 0.5
POLL_S = 0.002


class Pace:
    """One thread's way through some lanes: while they are idle, else a small part of the time.

    Parameters
    ----------
    lanes : sequence of Lane
        Those whose device it uses; none: nothing holds it up.
    """

    def __init__(self, lanes: Sequence[Lane] = ()) -> None:
        self._lanes = list(lanes)
        self._last_s = LEAST_PATIENCE_S / SHARE
        self._hurry = threading.Event()

    @property
    def is_free(self) -> bool:
        """Whether nothing holds it up."""
        return not self._lanes or self._hurry.is_set()

    def hurry(self) -> None:
        """From now on somebody waits for this traffic: it is as urgent as any other."""
        self._hurry.set()

    def wait(self) -> None:
        """Wait until the lanes are idle, or as long as is fair."""
        end = time.monotonic() + max(LEAST_PATIENCE_S, SHARE * self._last_s)
        while not self.is_free and time.monotonic() < end and not all(lane.is_idle() for lane in self._lanes):
            self._hurry.wait(POLL_S)

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Move some bytes, in the turn of this rank."""
        self.wait()
        begin = time.monotonic()
        with ExitStack() as turns:
            for lane in self._lanes:
                turns.enter_context(lane.turn())
            yield
        self._last_s = time.monotonic() - begin
