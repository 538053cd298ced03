"""Counters of one tier and direction, and what changed between two looks at them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mlpo_hpc.telemetry.trace import Tell

MAX_SPANS = 65536
LEAST_WAIT_S = 1e-4
"""Shorter waits for a token are left out of a trace."""


@dataclass(frozen=True)
class Span:
    """One chunk's way: begin and end in seconds of `time.perf_counter`."""

    begin_s: float
    end_s: float
    nbytes: int


@dataclass(frozen=True)
class Figures:
    """Totals since the start."""

    nbytes: int = 0
    busy_s: float = 0.0
    """Time in which at least one chunk was moving."""
    wait_s: float = 0.0
    """Time that threads waited for the token."""
    taken: int = 0
    """How often the token was taken."""

    def since(self, earlier: Figures) -> Figures:
        """What was added after `earlier`."""
        return Figures(
            self.nbytes - earlier.nbytes,
            self.busy_s - earlier.busy_s,
            self.wait_s - earlier.wait_s,
            self.taken - earlier.taken,
        )


class Meter:
    """Thread-safe counters of what moves on one tier in one direction."""

    def __init__(self) -> None:
        self.spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self.record: Tell | None = None
        """Told of each chunk and each wait, if there is a trace."""
        self._lock = threading.Lock()
        self._nbytes = 0
        self._busy_s = 0.0
        self._wait_s = 0.0
        self._moving = 0
        self._busy_since = 0.0

    @contextmanager
    def moving(self, nbytes: int) -> Iterator[None]:
        """Count a chunk; bytes are added when all of them arrived."""
        begin = time.perf_counter()
        with self._lock:
            if not self._moving:
                self._busy_since = begin
            self._moving += 1
        arrived = 0
        try:
            yield
            arrived = nbytes
        finally:
            end = time.perf_counter()
            with self._lock:
                self._moving -= 1
                self._nbytes += arrived
                if not self._moving:
                    self._busy_s += end - self._busy_since
                self.spans.append(Span(begin, end, arrived))
            if self.record is not None:
                self.record("chunk", begin, end, arrived)

    def waited(self, seconds: float) -> None:
        """Add time spent waiting for the token."""
        with self._lock:
            self._wait_s += seconds
        if self.record is not None and seconds > LEAST_WAIT_S:
            now = time.perf_counter()
            self.record("waits for the token", now - seconds, now, 0)

    def figures(self) -> Figures:
        """Totals up to now."""
        with self._lock:
            busy_s = self._busy_s
            if self._moving:
                busy_s += time.perf_counter() - self._busy_since
            return Figures(self._nbytes, busy_s, self._wait_s)
