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

from mlpo_hpc.cluster.verdict import gather, together
from mlpo_hpc.storage.base import ALIGNMENT_BYTES
from mlpo_hpc.storage.probe import Probe

SCOPES = ("off", "direction", "tier")
"""Who keeps others out, least first: nobody; a reader readers and a writer writers; a rank all others."""

EQUAL = 1.05
"""Differences below this factor count as none."""

ROUNDS = 3
LIMIT_S = 10.0
"""No further round is begun after it."""
PHASE_S = 1.0
MOST_BYTES = 256 * 2**20
PIECES = 16
"""That each rank moves each way in a phase, at least."""
LEAST_PIECE_BYTES = 2**20


@dataclass(frozen=True)
class Contention:
    """State that passes a tier each way at the same time, in bytes per second of all ranks, by scope and round.

    One rank alone has only the scope ``off``, which may have more rounds than the others.
    """

    rates_bps: dict[str, list[float]]

    def typical_bps(self, scope: str) -> float:
        """Median over the rounds."""
        return statistics.median(self.rates_bps[scope])

    def candidates(self) -> list[str]:
        """Stricter scopes that were better by 5 % in the first round, and at all in every one so far."""
        off = self.rates_bps["off"]
        return [
            scope
            for scope, rates in self.rates_bps.items()
            if rates[0] > EQUAL * off[0] and all(b > a for a, b in zip(off, rates, strict=False))
        ]

    def best_scope(self) -> str:
        """The least exclusion that no stricter candidate beats by 5 % in the median, and in every round at all."""
        best = SCOPES[0]
        for scope in self.candidates():
            gains = [b / a for a, b in zip(self.rates_bps[best], self.rates_bps[scope], strict=False)]
            if statistics.median(gains) > EQUAL and min(gains) > 1:
                best = scope
        return best


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


def measure(probe: Probe, crew: Crew, compare: bool = True) -> Contention:
    """Collective over the training world. Measure one tier, for a few seconds at most.

    Parameters
    ----------
    probe : Probe
        Of this rank, filled.
    crew : Crew
        Those that share the tier; one that does not compete only finds out how fast the tier is.
    compare : bool
        Whether to find out about turns too; the same on all ranks.
    """
    step = math.lcm(crew.size, crew.permits)
    load = _load(probe, step, _phase(probe, crew, "off", 0, Load(step, probe.chunk_bytes)).whole_bps)
    rates: dict[str, list[float]] = {scope: [] for scope in (SCOPES if compare and crew.competes else SCOPES[:1])}
    ends = time.monotonic() + LIMIT_S
    scopes = SCOPES if compare else SCOPES[:1]
    for turn in range(ROUNDS):
        for scope in scopes[turn:] + scopes[:turn]:
            phase = _phase(probe, crew, scope, turn, load)
            if scope in rates:
                rates[scope].append(phase.steady_bps)
        # Turns must pay in every round: without a candidate only the tier's own rate is of interest.
        if not any(gather(bool(Contention(rates).candidates()))):
            scopes = SCOPES[:1]
        if not all(gather(time.monotonic() < ends)):
            break
    return Contention(rates)


@dataclass(frozen=True)
class Load:
    """What a crew moves each way in a phase."""

    num_pieces: int
    piece_bytes: int


def _load(probe: Probe, step: int, trial_bps: float) -> Load:
    """About a second's, in pieces small enough to be shared evenly and to keep all threads at it."""
    nbytes = min(MOST_BYTES, trial_bps * PHASE_S)
    piece = min(probe.chunk_bytes, max(LEAST_PIECE_BYTES, nbytes / (PIECES * step)))
    piece_bytes = max(1, int(piece) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return Load(step * max(1, round(nbytes / piece_bytes / step)), piece_bytes)


@dataclass(frozen=True)
class Phase:
    """When a crew was done with each piece (one clock for all processes of a node).

    Parameters
    ----------
    begin_s : float
        When the first began.
    done_s : list of list of float
        For reading and for writing, sorted.
    piece_bytes : int
        Size of a piece.
    """

    begin_s: float
    done_s: list[list[float]]
    piece_bytes: int

    @property
    def whole_bps(self) -> float:
        """Bytes per second each way, from begin to end."""
        num_pieces = max(map(len, self.done_s))
        return num_pieces * self.piece_bytes / max(1e-9, max(map(max, self.done_s)) - self.begin_s)

    @property
    def steady_bps(self) -> float:
        """Bytes per second of the slower way, without its first third: caches and throttles give more at first."""
        return min(map(self._steady_bps, self.done_s))

    def _steady_bps(self, done_s: list[float]) -> float:
        first = len(done_s) // 3
        if len(done_s) - first < 2:
            return self.whole_bps if any(self.done_s) else 0.0
        return (len(done_s) - 1 - first) * self.piece_bytes / max(1e-9, done_s[-1] - done_s[first])


def _phase(probe: Probe, crew: Crew, scope: str, turn: int, load: Load) -> Phase:
    """Move a load each way, by those whose turn it is."""
    takes_part = crew.competes or scope == "off"
    reads, writes = [
        _part(load.num_pieces, ranks, crew.number) if takes_part else 0 for ranks in _active(crew, scope, turn)
    ]

    def move() -> tuple[float, list[list[float]]]:
        return time.monotonic(), probe.move(reads, writes, load.piece_bytes)

    gather(None)  # all begin together
    moved = crew.gather(together(move))
    done_s = [sorted(at for _, ways in moved for at in ways[way]) for way in range(2)]
    return Phase(min(begin for begin, _ in moved), done_s, load.piece_bytes)


def _active(crew: Crew, scope: str, turn: int) -> tuple[list[int], list[int]]:
    """Numbers of those that read and of those that write."""
    if scope == "off":
        return list(range(crew.size)), list(range(crew.size))
    first = [(turn + i) % crew.size for i in range(crew.permits)]
    second = [(turn + crew.permits + i) % crew.size for i in range(crew.permits)]
    return first, first if scope == "tier" else second


def _part(num_pieces: int, ranks: list[int], number: int) -> int:
    """How many of the pieces fall to this rank."""
    if number not in ranks:
        return 0
    return len(range(ranks.index(number), num_pieces, len(ranks)))
