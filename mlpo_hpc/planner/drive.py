"""A simulated tier: what is asked of it moves one piece after the other, each way, or both ways in turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from mlpo_hpc.planner.clock import Clock
from mlpo_hpc.planner.machine import WAYS, PlanTier

Move = tuple[float, Callable[[], None]]
"""Bytes, and what is told when they were moved."""


class Path:
    """Where one piece moves at a time. On a path for both ways they alternate while both are wanted."""

    def __init__(self, clock: Clock, rates_bps: dict[str, float]) -> None:
        self._clock = clock
        self._rates_bps = rates_bps
        self._queues: dict[str, deque[Move]] = {way: deque() for way in rates_bps}
        self._busy = False
        self._last = ""

    def submit(self, way: str, move: Move) -> None:
        """Queue a piece."""
        self._queues[way].append(move)
        self._next()

    def _next(self) -> None:
        wanted = [way for way, queue in self._queues.items() if queue]
        if self._busy or not wanted:
            return
        way = next((way for way in wanted if way != self._last), wanted[0])
        nbytes, done = self._queues[way].popleft()
        self._busy, self._last = True, way
        self._clock.after(nbytes / self._rates_bps[way], lambda: self._end(done))

    def _end(self, done: Callable[[], None]) -> None:
        self._busy = False
        done()
        self._next()


class Drive:
    """A tier with a path for each way, or with one for both."""

    def __init__(self, clock: Clock, tier: PlanTier) -> None:
        self.moved_bytes = dict.fromkeys(WAYS, 0.0)
        rates_bps = {way: tier.rate_bps(way) for way in WAYS}
        both = Path(clock, rates_bps)
        self._paths = {
            way: Path(clock, {way: rate_bps}) if tier.full_duplex else both for way, rate_bps in rates_bps.items()
        }

    def submit(self, way: str, nbytes: float, done: Callable[[], None]) -> None:
        """Move so many bytes, after what was asked for before."""

        def moved() -> None:
            self.moved_bytes[way] += nbytes
            done()

        self._paths[way].submit(way, (nbytes, moved))
