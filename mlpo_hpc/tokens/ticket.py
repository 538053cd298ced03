"""Fair tickets over atomic counters that co-located ranks share: the logic, without MPI.

A rank takes the next ticket and is served when fewer than `permits` earlier tickets are still
out: ``ticket < served + permits``. Two atomic additions a turn, first come first served. A ticket is
never given back unused, so a rank that died with one would block the others: its process is
looked for, and its end ends the job.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

from mlpo_hpc.errors import MlpoError, StorageTimeout, here
from mlpo_hpc.telemetry.log import logger
from mlpo_hpc.tokens.base import Token
from mlpo_hpc.tokens.process import Process

FIRST_SLEEP_S = 50e-6
LONGEST_SLEEP_S = 50e-3
PART_OF_WAIT = 1 / 16
"""A waiter sleeps for this part of what it has waited, so that it comes that much late at most."""
LOOK_S = 2.0  # between two looks whether the others still live
REPORT_S = 60.0


class Counters(ABC):
    """64-bit counters in memory shared by the ranks of a node, zero at first."""

    @abstractmethod
    def add(self, index: int, value: int) -> int:
        """Add atomically; return the value before."""

    @abstractmethod
    def load(self, index: int) -> int:
        """Read, without taking part in any atomic operation."""

    @abstractmethod
    def store(self, index: int, value: int) -> None:
        """Write a counter that only this rank writes."""


class TicketToken(Token):
    """One token of one rank.

    Parameters
    ----------
    name : str
        Tier and direction, in messages.
    counters : Counters
        Shared by the ranks of the node.
    base : int
        The token's first counter; it uses ``2 + len(processes)`` of them.
    permits : int
        How many may hold it at once.
    node_rank : int
        This rank among `processes`.
    processes : list of Process
        The ranks of the node.
    timeout_s : float
        Longest wait before `StorageTimeout`.
    looks : bool
        Whether the others' processes can be seen from here, so that their death can.
    """

    def __init__(
        self,
        name: str,
        counters: Counters,
        base: int,
        permits: int,
        node_rank: int,
        processes: list[Process],
        timeout_s: float = 1800.0,
        looks: bool = True,
    ) -> None:
        self.name = name
        self._counters = counters
        self._next, self._served, self._holders = base, base + 1, base + 2
        self._permits = permits
        self._node_rank = node_rank
        self._processes = processes
        self._timeout_s = timeout_s
        self._looks = looks

    @staticmethod
    def num_counters(node_size: int) -> int:
        """Counters that one token needs."""
        return 2 + node_size

    def acquire(self) -> float:
        """Wait for a permit, first come first served; return the seconds waited.

        Raises
        ------
        MlpoError
            If a rank of the node died.
        StorageTimeout
            If no permit came within `timeout_s`.
        """
        ticket = self._counters.add(self._next, 1)
        begin = time.monotonic()
        if not self._is_served(ticket):
            self._wait(ticket, begin)
        self._counters.store(self._holders + self._node_rank, ticket + 1)
        return time.monotonic() - begin

    def release(self) -> None:
        """Let the next one in."""
        self._counters.store(self._holders + self._node_rank, 0)
        self._counters.add(self._served, 1)

    def locked(self) -> bool:
        return self._counters.load(self._next) >= self._counters.load(self._served) + self._permits

    def wanted(self) -> bool:
        return self._counters.load(self._next) > self._counters.load(self._served) + self._permits

    def holders(self) -> list[Process]:
        return [p for i, p in enumerate(self._processes) if self._counters.load(self._holders + i)]

    def _is_served(self, ticket: int) -> bool:
        return ticket < self._counters.load(self._served) + self._permits

    def _wait(self, ticket: int, begin: float) -> None:
        now, look_at, report_at = begin, begin + LOOK_S, begin + REPORT_S
        while not self._is_served(ticket):
            time.sleep(min(max(FIRST_SLEEP_S, PART_OF_WAIT * (now - begin)), LONGEST_SLEEP_S))
            now = time.monotonic()
            if self._looks and now >= look_at:
                look_at = now + LOOK_S
                self._look_for_dead()
            if now >= report_at:
                report_at = now + REPORT_S
                logger.warning("waiting for %s since %.0f s on %s; %s", self.name, now - begin, here(), self.who())
            if now - begin > self._timeout_s:
                raise StorageTimeout(
                    f"no permit for {self.name} within {self._timeout_s:.0f} s on {here()}; {self.who()}. "
                    "Check that tier's file system, or raise 'tokens.timeout_s'."
                )

    def _look_for_dead(self) -> None:
        dead = [process for process in self._processes if not process.is_alive()]
        if dead:
            names = ", ".join(map(str, dead))
            raise MlpoError(f"{names} died; {here()} cannot get {self.name} any more. Look at that rank's output.")
