"""A lane: the I/O threads that move the chunks of one tier in one direction, in order of asking."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import xxhash

from mlpo_hpc.errors import CorruptState, MlpoError, here
from mlpo_hpc.storage.base import Container
from mlpo_hpc.telemetry.metrics import Meter
from mlpo_hpc.tokens.base import Turn

THREADS_PER_LANE = 2  # chunks in flight a tier and direction; enough to saturate a drive with 8-64 MiB chunks
JOIN_S = 10.0


@dataclass(frozen=True)
class Job:
    """Move `view` from or to a slot, then call `done(checksum, error)` from the I/O thread."""

    slot: int
    view: memoryview
    label: str
    """Whose state it is, in messages."""
    expected: int | None
    """Checksum to find when reading; None: do not look."""
    done: Callable[[int | None, BaseException | None], None]
    is_usual: bool = True
    """Whether it is of an update: the rate of these is what the next one is planned with."""


class Moving:
    """A chunk on its way.

    Parameters
    ----------
    cancelled : threading.Event
        Set when the lane is closed: it may never arrive then.
    """

    def __init__(self, cancelled: threading.Event) -> None:
        self._cancelled = cancelled
        self._begin_s = time.monotonic()
        self._moved = threading.Event()
        self._error: BaseException | None = None
        self._seconds = 0.0

    def done(self, _checksum: int | None, error: BaseException | None) -> None:
        """It has arrived, or something went wrong."""
        self._error, self._seconds = error, time.monotonic() - self._begin_s
        self._moved.set()

    def wait(self) -> float:
        """Wait for it; the seconds that it took.

        Raises
        ------
        StorageError
            What went wrong.
        """
        while not self._moved.wait(JOIN_S):
            if self._cancelled.is_set():
                raise MlpoError("the offload engine is closed")
        if self._error is not None:
            raise self._error
        return self._seconds

    def settle(self) -> None:
        """Wait until it is not under way any more, whatever came of it: nobody wants it."""
        with suppress(Exception):
            self.wait()


class Lane:
    """Base of `ReadLane` and `WriteLane`: queue, threads, turn, meter.

    Parameters
    ----------
    name : str
        Tier and direction, names the threads.
    container : Container
        Where the slots are.
    turn : Turn
        The rank's hold on the tier's token.
    checksum : bool
        Whether to compute and compare checksums.
    """

    def __init__(self, name: str, container: Container, turn: Turn, checksum: bool) -> None:
        self.name = name
        self.meter = Meter()
        self._container = container
        self._turn = turn
        self._checksum = checksum
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, name=f"mlpo-{name}-{i}", daemon=True) for i in range(THREADS_PER_LANE)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Queue a chunk. Its bytes must stay as they are until `done` is called."""
        self.meter.asked(job.view.nbytes)
        self._jobs.put(job)

    def queued(self) -> int:
        """Chunks not yet begun."""
        return self._jobs.qsize()

    def is_idle(self) -> bool:
        """Whether nothing is asked for here, and nobody else waits for the device."""
        return not self.meter.backlog_bytes and not self._turn.is_wanted()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The rank's turn on the device, for bytes that do not go through the lane."""
        self._turn.enter()
        try:
            yield
        finally:
            self._turn.leave()

    def move(self, slot: int, view: memoryview, label: str, expected: int | None) -> Moving:
        """Begin to move a chunk that no update asks for, from any thread but the lane's own."""
        moving = Moving(self._cancelled)
        self.submit(Job(slot, view, label, expected, moving.done, is_usual=False))
        return moving

    def close(self) -> bool:
        """Drop what is queued, let the transfers in flight end; False if a thread is stuck in one."""
        self._cancelled.set()
        for _ in self._threads:
            self._jobs.put(None)
        # The garbage collector may close an engine from one of its own I/O threads.
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in others:
            thread.join(JOIN_S)
        return len(others) == len(self._threads) and not any(thread.is_alive() for thread in others)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._cancelled.is_set():
                continue
            checksum, error = None, None
            try:
                checksum = self._move(job)
            except BaseException as failure:  # handed to the pipeline, which raises it in the main thread
                error = failure
            # While this thread waits for its next job it must not keep the last one's memory.
            done = job.done
            del job
            done(checksum, error)
            del done

    def _move(self, job: Job) -> int | None:
        raise NotImplementedError

    def _transfer(self, call: Callable[[int, memoryview], None], job: Job) -> None:
        with self.meter.serving(job.view.nbytes, job.is_usual):
            self.meter.waited(self._turn.enter())
            try:
                with self.meter.moving(job.view.nbytes):
                    call(job.slot, job.view)
            finally:
                self._turn.leave()


class ReadLane(Lane):
    """Moves chunks from storage to memory and compares their checksums."""

    def _move(self, job: Job) -> int | None:
        self._transfer(self._container.read, job)
        if not self._checksum or job.expected is None:
            return None
        found = xxhash.xxh3_64_intdigest(job.view)
        if found != job.expected:
            raise CorruptState(
                f"{job.label} read from {self._container.where(job.slot)} is not what was "
                f"written there: checksum {found:016x} instead of {job.expected:016x}, on "
                f"{here(self._container.path)}. The device or something else altered the state file: "
                "check the device, then resume from the last checkpoint."
            )
        return found


class WriteLane(Lane):
    """Computes checksums and moves chunks from memory to storage."""

    def _move(self, job: Job) -> int | None:
        checksum = xxhash.xxh3_64_intdigest(job.view) if self._checksum else None
        self._transfer(self._container.write, job)
        return checksum
