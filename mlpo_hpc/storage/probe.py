"""A file to measure a tier with."""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from mlpo_hpc.storage.base import ALIGNMENT_BYTES, Container
from mlpo_hpc.storage.posix import open_raw

MOST_BYTES = 64 * 2**20
NUM_SLOTS = 8
THREADS_PER_WAY = 2  # as in a lane
LIMIT_S = 1.0


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

    @property
    def is_direct(self) -> bool:
        """Whether the page cache is left out."""
        return self._container.is_direct

    @property
    def num_filled(self) -> int:
        """Slots that `fill` wrote."""
        return self._written

    def fill(self) -> None:
        """Write as many slots as a second allows, at least one: later phases stay within them."""
        begin, limit = time.perf_counter(), self._container.num_slots
        while self._written < limit and (not self._written or time.perf_counter() - begin < LIMIT_S):
            count = min(THREADS_PER_WAY, limit - self._written)
            with ThreadPoolExecutor(count) as pool:
                list(pool.map(self._container.write, range(self._written, self._written + count), self._views))
            self._written += count

    def move(self, num_reads: int, num_writes: int, piece_bytes: int) -> list[list[float]]:
        """Read and write pieces of slots at the same time; when each was done (`time.monotonic`), by way."""
        ways = [(self._container.read, num_reads), (self._container.write, num_writes)]
        with ThreadPoolExecutor(2 * THREADS_PER_WAY) as pool:
            futures = [
                [
                    pool.submit(self._work, call, self._views[THREADS_PER_WAY * way + thread][:piece_bytes], pieces)
                    for thread in range(THREADS_PER_WAY)
                    if (pieces := range(thread, count, THREADS_PER_WAY))
                ]
                for way, (call, count) in enumerate(ways)
            ]
            return [[at for future in of_way for at in future.result()] for of_way in futures]

    def _work(self, call: Callable[[int, memoryview], None], view: memoryview, pieces: Sequence[int]) -> list[float]:
        done = []
        with view:
            for piece in pieces:
                call(piece % self._written, view)
                done.append(time.monotonic())
        return done


def open_probe(directory: str, room_bytes: int) -> Probe:
    """A probe of up to 64 MiB in an unnamed file of a directory.

    Raises
    ------
    StorageError
        If the directory does not take the file.
    """
    return Probe(open_raw(directory, pick_chunk_bytes(room_bytes), NUM_SLOTS))


def pick_chunk_bytes(room_bytes: int) -> int:
    """Slot size of a probe that may take that much: up to 64 MiB together."""
    return max(1, math.floor(min(MOST_BYTES, room_bytes) / NUM_SLOTS / ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
