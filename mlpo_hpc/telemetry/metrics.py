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
LEAST_CHUNKS = 16
"""Chunks that a rate is taken from at least, to even out a device's moods."""


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


class _Clock:
    """Time in which at least one thread is at something."""

    def __init__(self) -> None:
        self._inside = 0
        self._since = 0.0
        self._total_s = 0.0

    def enter(self, now: float) -> None:
        if not self._inside:
            self._since = now
        self._inside += 1

    def leave(self, now: float) -> None:
        self._inside -= 1
        if not self._inside:
            self._total_s += now - self._since

    def seconds(self, now: float) -> float:
        return self._total_s + (now - self._since if self._inside else 0.0)


@dataclass(frozen=True)
class _Served:
    """Time spent on chunks, waiting for turns included, and what was moved in it."""

    seconds: float
    nbytes: int
    chunks: int


class Meter:
    """Thread-safe counters of what moves on one tier in one direction."""

    def __init__(self) -> None:
        self.backlog_bytes = 0
        """Asked for and not yet moved."""
        self.spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self.record: Tell | None = None
        """Told of each chunk and each wait, if there is a trace."""
        self._lock = threading.Lock()
        self._nbytes = 0
        self._wait_s = 0.0
        self._moving = _Clock()
        self._serving = _Clock()
        self._served = _Served(0.0, 0, 0)
        self._begins: deque[_Served] = deque([self._served])
        """What was served when each of the last steps began."""

    def asked(self, nbytes: int) -> None:
        """A chunk is to be moved."""
        with self._lock:
            self.backlog_bytes += nbytes

    @contextmanager
    def serving(self, nbytes: int, is_usual: bool = True) -> Iterator[None]:
        """A thread has a chunk in hand: it waits for its turn, then moves it.

        What is not usual, in threads and traffic beside it, does not tell how fast the usual will be: `recent_bps`
        leaves it out.
        """
        if is_usual:
            with self._lock:
                self._serving.enter(time.perf_counter())
        try:
            yield
        finally:
            now = time.perf_counter()
            with self._lock:
                self.backlog_bytes -= nbytes
                if is_usual:
                    before = self._served
                    self._serving.leave(now)
                    self._served = _Served(self._serving.seconds(now), before.nbytes + nbytes, before.chunks + 1)

    def begin_step(self, is_new: bool = False) -> None:
        """From now on `recent_bps` looks back to the beginning of the step before, or further if too little moved.

        If it `is_new`, what was before does not count.
        """
        with self._lock:
            if is_new:
                self._begins.clear()
            self._begins.append(self._served)
            while len(self._begins) > 2 and self._served.chunks - self._begins[1].chunks >= LEAST_CHUNKS:
                self._begins.popleft()

    def recent_bps(self) -> float | None:
        """Bytes per second while there were any to move, since the step before began; None if too few moved.

        All of a step is needed for it: within a step a device that serves in slices of time, or other jobs,
        would make chunks go here and there, and the next step would wait for the tier that got too many.
        """
        with self._lock:
            begin, end = self._begins[0], self._served
            if end.chunks - begin.chunks < LEAST_CHUNKS:
                return None
            return (end.nbytes - begin.nbytes) / max(1e-9, end.seconds - begin.seconds) or None

    @contextmanager
    def moving(self, nbytes: int) -> Iterator[None]:
        """Count a chunk; bytes are added when all of them arrived."""
        begin = time.perf_counter()
        with self._lock:
            self._moving.enter(begin)
        arrived = 0
        try:
            yield
            arrived = nbytes
        finally:
            end = time.perf_counter()
            with self._lock:
                self._moving.leave(end)
                self._nbytes += arrived
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
            return Figures(self._nbytes, self._moving.seconds(time.perf_counter()), self._wait_s)
