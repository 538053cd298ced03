"""How fast a tier is for a plain sequential reader and a plain sequential writer: what floors refer to."""

from __future__ import annotations

import dataclasses
import statistics
import time

from mlpo_hpc.bench.conditions import BenchTier
from mlpo_hpc.storage.filesystem import describe
from mlpo_hpc.storage.probe import Probe, open_probe

ROUNDS = 3
ROUND_S = 1.5
"""About how long each reads or writes in a round."""
MOST_SPACE = 16
"""Part of the free space that is written: one over this."""


def measure_tier(tier: BenchTier, round_s: float = ROUND_S) -> BenchTier:
    """The tier with its rates, of a fresh file that is left behind by nobody.

    Parameters
    ----------
    tier : BenchTier
        Where.
    round_s : float
        About how long each round reads or writes. A capped device gives more than its cap in the beginning.

    Raises
    ------
    StorageError
        If its directory does not take the file.
    """
    with open_probe(tier.dir, describe(tier.dir).free_bytes // MOST_SPACE) as probe:
        begin = time.perf_counter()
        probe.fill()
        count = max(2, round(round_s * probe.num_filled / (time.perf_counter() - begin)))
        rounds = [(_rate(probe, count, 0), _rate(probe, 0, count)) for _ in range(ROUNDS)]
        direct = probe.is_direct
    read_bps, write_bps = (statistics.median(rates) for rates in zip(*rounds, strict=True))
    return dataclasses.replace(tier, read_bps=read_bps, write_bps=write_bps, direct=direct)


def _rate(probe: Probe, num_reads: int, num_writes: int) -> float:
    """Bytes per second."""
    begin = time.perf_counter()
    probe.move(num_reads, num_writes, probe.chunk_bytes)
    return (num_reads + num_writes) * probe.chunk_bytes / (time.perf_counter() - begin)
