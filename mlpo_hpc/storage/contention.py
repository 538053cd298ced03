"""What a tier loses or gains when the ranks of a node use it at once: measured, so that turns must earn their keep.

Published measurements differ from drive to drive, so it is looked at on the spot: the same bytes
pass the tier each way (read and written at the same time, as in an update) by all ranks at once, by
one reader beside one writer, and by one rank alone.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlpo_hpc.cluster.verdict import together
from mlpo_hpc.storage.probe import Probe

SCOPES = ("off", "direction", "tier")
"""Who keeps others out, least first: nobody; a reader readers and a writer writers; a rank all others."""

EQUAL = 1.05
"""Differences below this factor count as none."""

ROUNDS = 3
PHASE_S = 0.25
MAX_CHUNKS = 512


@dataclass(frozen=True)
class Contention:
    """State that passes a tier each way, in bytes per second of all ranks together, by scope and round."""

    rates_bps: dict[str, list[float]]

    def typical_bps(self, scope: str) -> float:
        """Median over the rounds."""
        return statistics.median(self.rates_bps[scope])

    def best_scope(self) -> str:
        """The least exclusion that nothing stricter beats by 5 % in the median, and in every round at all."""
        best = SCOPES[0]
        for scope in SCOPES[1:]:
            gains = [b / a for a, b in zip(self.rates_bps[best], self.rates_bps[scope], strict=True)]
            if statistics.median(gains) > EQUAL and min(gains) > 1:
                best = scope
        return best

    def efficiency(self, scope: str) -> float:
        """What passes with this scope, as a part of what passes for one rank alone."""
        return self.typical_bps(scope) / self.typical_bps("tier")


@dataclass(frozen=True)
class Crew:
    """The ranks of a node that share a tier.

    Parameters
    ----------
    number : int
        This rank among them.
    size : int
        How many there are.
    permits : int
        How many may use the tier at once when they take turns.
    gather : callable
        Collective over the training world. The values of the crew, in order of their numbers.
    """

    number: int
    size: int
    permits: int
    gather: Callable[[Any], list[Any]]

    @property
    def competes(self) -> bool:
        """Whether more ranks share the tier than permits."""
        return self.size > self.permits


def measure(probe: Probe, crew: Crew) -> Contention:
    """Collective over the training world. Measure one tier.

    Parameters
    ----------
    probe : Probe
        Of this rank, filled.
    crew : Crew
        Those that share the tier; a crew that does not compete takes part and moves nothing.
    """
    step = math.lcm(crew.size, crew.permits)
    trial_bps = _phase(probe, crew, "off", 0, step)
    num_chunks = step * min(MAX_CHUNKS // step + 1, math.ceil(trial_bps * PHASE_S / probe.chunk_bytes / step))
    rates: dict[str, list[float]] = {scope: [] for scope in SCOPES}
    for turn in range(ROUNDS):
        for scope in (*SCOPES[turn:], *SCOPES[:turn]):
            rates[scope].append(_phase(probe, crew, scope, turn, num_chunks))
    return Contention(rates)


def _phase(probe: Probe, crew: Crew, scope: str, turn: int, num_chunks: int) -> float:
    """Move `num_chunks` each way, by those whose turn it is; return bytes per second each way."""
    readers, writers = _active(crew, scope, turn)
    reads, writes = (_part(num_chunks, ranks, crew.number) if crew.competes else 0 for ranks in (readers, writers))

    def move() -> tuple[float, float]:
        begin = time.monotonic()  # one clock for all processes of a node
        probe.move(reads, writes)
        return begin, time.monotonic()

    crew.gather(None)  # all begin together
    times = crew.gather(together(move))
    duration_s: float = max(end for _, end in times) - min(begin for begin, _ in times)
    return num_chunks * probe.chunk_bytes / duration_s


def _active(crew: Crew, scope: str, turn: int) -> tuple[list[int], list[int]]:
    """Numbers of those that read and of those that write."""
    if scope == "off":
        return list(range(crew.size)), list(range(crew.size))
    first = [(turn + i) % crew.size for i in range(crew.permits)]
    second = [(turn + crew.permits + i) % crew.size for i in range(crew.permits)]
    return first, first if scope == "tier" else second


def _part(num_chunks: int, ranks: list[int], number: int) -> int:
    """How many of the chunks fall to this rank."""
    if number not in ranks:
        return 0
    return len(range(ranks.index(number), num_chunks, len(ranks)))
