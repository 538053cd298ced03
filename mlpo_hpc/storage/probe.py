"""A quick look at a tier: its bandwidth, and a file to look further with."""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

from mlpo_hpc.storage.base import ALIGNMENT_BYTES, Container
from mlpo_hpc.storage.posix import RawFile

MOST_BYTES = 64 * 2**20
NUM_SLOTS = 8
THREADS_PER_WAY = 2  # as in a lane
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


class Probe:
    """A container to measure with, and memory for its chunks.

    Parameters
    ----------
    container : Container
        Owned: closed at the end. At least 2 slots.
    """

    def __init__(self, container: Container) -> None:
        self.chunk_bytes = container.slot_bytes
        self._container = container
        self._written = 0
        self._blocks = [mmap.mmap(-1, self.chunk_bytes) for _ in range(2 * THREADS_PER_WAY)]
        self._views = [memoryview(block) for block in self._blocks]

    def __enter__(self) -> Probe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._container.close()
        for view, block in zip(self._views, self._blocks, strict=True):
            view.release()
            block.close()

    def bandwidth(self) -> Bandwidth:
        """Write, then read back what was written, about a second each way at most."""
        write_bps = self.fill()
        begin = time.perf_counter()
        done = self._rounds(self._container.read, self._written)
        return Bandwidth(done * self.chunk_bytes / (time.perf_counter() - begin), write_bps)

    def fill(self) -> float:
        """Write as many slots as a second allows, at least one; return bytes per second."""
        begin = time.perf_counter()
        self._written = self._rounds(self._container.write, self._container.num_slots)
        return self._written * self.chunk_bytes / (time.perf_counter() - begin)

    def _rounds(self, move: Callable[[int, memoryview], None], limit: int) -> int:
        """Move chunks, one a thread at once, until the limit or the time is up; return their number."""
        begin, done = time.perf_counter(), 0
        while done < limit and (done == 0 or time.perf_counter() - begin < LIMIT_S):
            count = min(THREADS_PER_WAY, limit - done)
            with ThreadPoolExecutor(count) as pool:
                list(pool.map(move, range(done, done + count), self._views))
            done += count
        return done

    def move(self, num_reads: int, num_writes: int) -> None:
        """Read and write chunks at the same time, among those that `fill` wrote."""
        ways = [(self._container.read, num_reads), (self._container.write, num_writes)]
        with ThreadPoolExecutor(2 * THREADS_PER_WAY) as pool:
            futures = [
                pool.submit(
                    self._work, call, self._views[THREADS_PER_WAY * way + thread], range(thread, count, THREADS_PER_WAY)
                )
                for way, (call, count) in enumerate(ways)
                for thread in range(THREADS_PER_WAY)
            ]
            for future in futures:
                future.result()

    def _work(self, call: Callable[[int, memoryview], None], view: memoryview, chunks: Sequence[int]) -> None:
        for chunk in chunks:
            call(chunk % self._written, view)


def open_probe(directory: str, room_bytes: int) -> Probe:
    """A probe of up to 64 MiB in an unnamed file of a directory.

    Raises
    ------
    StorageError
        If the directory does not take the file.
    """
    chunk_bytes = max(1, math.floor(min(MOST_BYTES, room_bytes) / NUM_SLOTS / ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
    return Probe(RawFile(directory, chunk_bytes, NUM_SLOTS))
