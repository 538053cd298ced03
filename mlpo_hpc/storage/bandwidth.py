"""How fast a directory is: read, written and both at once, by one rank alone and by all of a node at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from mlpo_hpc.cluster.crowd import Ranks, each
from mlpo_hpc.storage.probe import Probe, open_probe

CROWDS = ("alone", "at once")
LOADS = {"read": (1, 0), "write": (0, 1), "both": (1, 1)}
"""Whether each load reads and writes."""
FULL_DUPLEX = 1.5
"""Both ways at once give more than this, in units of the slower way: else they share one path."""
PAYS = 1.05
"""Turns pay if one rank alone gets more than this factor of all at once."""


@dataclass
class Bandwidth:
    """Bytes per second of all ranks that took part, by crowd and load, one value a round; of each way for ``both``."""

    rounds_bps: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    direct: bool = True
    """Whether the page cache was left out by O_DIRECT."""

    def typical_bps(self, crowd: str, load: str) -> float:
        """Median over the rounds."""
        return statistics.median(self.rounds_bps[crowd, load])

    def best_bps(self, load: str) -> float:
        """What a node gets of it, in turns if these pay."""
        return max(self.typical_bps(crowd, load) for crowd in CROWDS)

    @property
    def is_full_duplex(self) -> bool:
        """Whether reading and writing at once moves more bytes than one of them."""
        slower = min(self.best_bps("read"), self.best_bps("write"))
        return 2 * self.best_bps("both") > FULL_DUPLEX * slower

    @property
    def turns_pay(self) -> bool:
        """Whether one rank after the other gets more than all at once, both ways."""
        return self.typical_bps("alone", "both") > PAYS * self.typical_bps("at once", "both")


def measure_bandwidth(
    directory: str, ranks: Ranks, rounds: int, seconds: float, room_bytes: int, told: Callable[[], None]
) -> Bandwidth:
    """Collective over `ranks`. Measure one directory with fresh files; nothing is left.

    Parameters
    ----------
    directory : str
        Where.
    ranks : Ranks
        Those of a node; in round r rank r is the one alone.
    rounds : int
        How often, interleaved.
    seconds : float
        About how long each load lasts.
    room_bytes : int
        Space that all ranks together may take.
    told : callable
        Called after each of the ``6 * rounds`` loads, on all ranks.

    Raises
    ------
    StorageError
        The first failing rank's, on all.
    """
    found = Bandwidth()
    with ExitStack() as files:
        probe = each(ranks, lambda: files.enter_context(open_probe(directory, room_bytes // ranks.size)))
        found.direct = probe.is_direct
        begin = time.perf_counter()
        each(ranks, probe.fill)
        slot_s = max(ranks.allgather((time.perf_counter() - begin) / probe.num_filled))
        count = max(2, round(seconds / max(1e-6, slot_s)))
        for number in range(rounds):
            for load, ways in LOADS.items():
                for crowd in CROWDS:
                    active = crowd == "at once" or ranks.rank == number % ranks.size
                    share = max(2, count if crowd == "at once" else count * ranks.size)
                    bps = _rate(ranks, probe, [way * share if active else 0 for way in ways])
                    found.rounds_bps.setdefault((crowd, load), []).append(bps)
                    told()
    return found


def _rate(ranks: Ranks, probe: Probe, counts: list[int]) -> float:
    """Bytes per second of the slower way, all ranks together."""

    def move() -> list[tuple[float, int]]:
        begin = time.monotonic()
        done = probe.move(counts[0], counts[1], probe.chunk_bytes) if any(counts) else [[], []]
        return [(max(ends, default=begin) - begin, len(ends)) for ends in done]

    ranks.allgather(None)  # all begin together
    moved = ranks.allgather(each(ranks, move))
    rates: list[float] = []
    for way in zip(*moved, strict=True):
        num_pieces, took_s = sum(count for _, count in way), max(took_s for took_s, _ in way)
        if num_pieces:
            rates.append(num_pieces * probe.chunk_bytes / max(1e-9, took_s))
    return min(rates)
