"""A stand-in drive that ranks share: half duplex, a known rate, and less of it when several ranks use it at once."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tests.containers import MemoryContainer

QUANTUM_BYTES = 256 * 1024
FREE_AT, BUSY_S, CONTENDED_BYTES, MOVED_BYTES, FIRST_RANK = range(5)


class SharedDrive:
    """One rank's view of the drive; its books are in a file that all ranks map.

    Transfers are cut into quanta that pass one after the other, on a schedule of its own, so that
    late wake-ups do not change what it can do.

    Parameters
    ----------
    path : Path
        The books; made by whoever comes first.
    rank, num_ranks : int
        Who uses it.
    bps : float
        What one rank gets, reads and writes together.
    loss : float
        Part of it that is lost while several ranks use it.
    """

    def __init__(self, path: Path, rank: int, num_ranks: int, bps: float, loss: float = 0.4) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        size = 8 * (FIRST_RANK + num_ranks)
        os.ftruncate(self._fd, size)
        self._books = np.frombuffer(mmap.mmap(self._fd, size), np.float64)
        self._rank, self._bps, self._loss = FIRST_RANK + rank, bps, loss
        self._lock = threading.Lock()

    @contextmanager
    def _open_books(self) -> Iterator[np.ndarray]:
        with self._lock:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                yield self._books
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def transfer(self, nbytes: int) -> None:
        """Let bytes pass."""
        self._count(1)
        while nbytes > 0:
            step = min(nbytes, QUANTUM_BYTES)
            self._wait_until(self._pass(step))
            nbytes -= step
        self._count(-1)

    def _count(self, change: int) -> None:
        with self._open_books() as books:
            books[self._rank] += change

    def _pass(self, nbytes: int) -> float:
        with self._open_books() as books:
            contended = np.count_nonzero(books[FIRST_RANK:]) > 1
            duration_s = nbytes / (self._bps * (1 - self._loss) if contended else self._bps)
            books[FREE_AT] = max(books[FREE_AT], time.monotonic()) + duration_s
            books[BUSY_S] += duration_s
            books[MOVED_BYTES] += nbytes
            books[CONTENDED_BYTES] += nbytes * contended
            return float(books[FREE_AT])

    def _wait_until(self, at: float) -> None:
        time.sleep(max(0.0, at - time.monotonic()))

    def bps(self) -> float:
        """Bytes per second of the time that the drive was at work, on its own schedule."""
        return float(self._books[MOVED_BYTES] / max(1e-9, self._books[BUSY_S]))

    def contended(self) -> float:
        """Part of all bytes that passed while several ranks used the drive."""
        return float(self._books[CONTENDED_BYTES] / max(1.0, self._books[MOVED_BYTES]))

    def forget(self) -> None:
        """Start counting anew."""
        self._books[BUSY_S:FIRST_RANK] = 0


class DriveContainer(MemoryContainer):
    """Slots in this rank's memory, at the speed of a shared drive."""

    def __init__(self, drive: SharedDrive, num_slots: int, slot_bytes: int) -> None:
        super().__init__(num_slots, slot_bytes)
        self._drive = drive

    def _write(self, offset: int, view: memoryview) -> None:
        self._drive.transfer(view.nbytes)
        super()._write(offset, view)

    def _read(self, offset: int, view: memoryview) -> None:
        self._drive.transfer(view.nbytes)
        super()._read(offset, view)
