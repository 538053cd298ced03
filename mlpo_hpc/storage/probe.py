"""A quick look at a tier's bandwidth: enough to weigh tiers against each other at start-up."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from mlpo_hpc.storage.base import ALIGNMENT_BYTES
from mlpo_hpc.storage.posix import RawFile

MOST_BYTES = 64 * 2**20
NUM_CHUNKS = 8
NUM_THREADS = 2
LIMIT_S = 1.0


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second of one tier, alone in each direction."""

    read_bps: float
    write_bps: float

    @property
    def round_trip_bps(self) -> float:
        """Bytes per second that are written and then read again, one after the other."""
        return 1 / (1 / self.read_bps + 1 / self.write_bps)


def quick_bandwidth(directory: str, room_bytes: int = MOST_BYTES) -> Bandwidth:
    """Write and read back up to 64 MiB in an unnamed file, at most about a second each way.

    Parameters
    ----------
    directory : str
        Where to look.
    room_bytes : int
        Space that may be taken for a moment.

    Raises
    ------
    StorageError
        If the directory does not take the bytes.
    """
    chunk_bytes = max(1, min(MOST_BYTES, room_bytes) // NUM_CHUNKS // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    file = RawFile(directory, chunk_bytes, NUM_CHUNKS)
    blocks = [mmap.mmap(-1, chunk_bytes) for _ in range(NUM_THREADS)]
    views = [memoryview(block) for block in blocks]
    try:
        written, write_bps = _rate(file.write, views, NUM_CHUNKS)
        _, read_bps = _rate(file.read, views, written)
    finally:
        file.close()
        for view, block in zip(views, blocks, strict=True):
            view.release()
            block.close()
    return Bandwidth(read_bps, write_bps)


def _rate(move: Callable[[int, memoryview], None], views: list[memoryview], limit: int) -> tuple[int, float]:
    """Move chunks in rounds, one a thread, until the limit or the time is up."""
    begin = time.perf_counter()
    done = 0
    with ThreadPoolExecutor(len(views)) as pool:
        while done < limit and (done == 0 or time.perf_counter() - begin < LIMIT_S):
            count = min(len(views), limit - done)
            list(pool.map(move, range(done, done + count), views[:count]))
            done += count
    return done, done * views[0].nbytes / (time.perf_counter() - begin)
