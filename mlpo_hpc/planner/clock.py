"""Simulated time: things that happen at a moment, and processes that wait for a time or for a condition."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator

Condition = Callable[[], bool]
Process = Generator[float | Condition, None, None]
"""Yields the seconds, or the condition, that it waits for."""


class Clock:
    """Runs processes until all have ended."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._num_running = 0
        self._waiting: list[tuple[Condition, Process]] = []

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do something later; at one moment, first come first served."""
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._number), action))

    def start(self, process: Process) -> None:
        """Let a process begin now."""
        self._num_running += 1
        self.after(0.0, lambda: self._resume(process))

    def run(self) -> None:
        """Let time pass until all processes have ended; what else was to happen then does not.

        Raises
        ------
        RuntimeError
            If a process waits for what cannot happen any more.
        """
        while self._num_running:
            if not self._events:
                raise RuntimeError(f"{self._num_running} simulated processes wait for what will not happen")
            self.now_s, _, action = heapq.heappop(self._events)
            action()
            self._wake()

    def _wake(self) -> None:
        """Resume those whose condition holds now; what they do may make others' conditions hold."""
        while ready := [entry for entry in self._waiting if entry[0]()]:
            self._waiting = [entry for entry in self._waiting if entry not in ready]
            for _, process in ready:
                self._resume(process)

    def _resume(self, process: Process) -> None:
        for wish in process:
            if callable(wish):
                if not wish():
                    self._waiting.append((wish, process))
                    return
            elif wish > 0:
                self.after(wish, lambda: self._resume(process))
                return
        self._num_running -= 1
