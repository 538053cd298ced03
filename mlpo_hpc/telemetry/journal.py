"""The journal of one rank: what it is, then a line of JSON for each step, for ``mlpo report``.

A line has one of the keys ``start`` (all that stays the same, told anew by each start of a resumed run), ``loss`` (of
a step) and ``tiers`` (the figures of a step). Each is written at once, for a run may be killed at any moment; what
that cuts short is the last line alone.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import time
from collections.abc import Mapping
from typing import Any

from mlpo_hpc.errors import MlpoError, StorageError, here, storage_error
from mlpo_hpc.telemetry.log import logger

PREFIX = "steps-"
SUFFIX = ".jsonl"
DIGITS = 6
"""After the point: microseconds."""


class Journal:
    """Appends to the journal of a rank. Training goes on without one if it cannot be written any more.

    Parameters
    ----------
    path : str
        The file; that of a run which is resumed is continued. Nobody else may read it.
    start : mapping
        What the rank is and has, as JSON takes it.

    Raises
    ------
    StorageError
        If the file cannot be made, or another engine or job writes it.
    """

    def __init__(self, path: str, start: Mapping[str, Any]) -> None:
        self.path = path
        self._owner_pid = os.getpid()
        self._number = 0
        self._ended_s: float | None = None
        try:
            # Unbuffered: what a forked worker of a data loader inherits must not be written twice.
            self._file = open(path, "ab+", buffering=0, opener=_private)  # noqa: SIM115
            self._lock()
            self._end_torn_line()
            self._write({"start": start})
        except OSError as error:
            raise storage_error("beginning a journal", path, error) from error

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise StorageError(
                f"another engine or job writes the journal on {here(self.path)}. Give each a 'telemetry.dir' of its "
                "own, for example with ${SLURM_JOB_ID}, which stays the same for a job that is requeued"
            ) from None
        except OSError:
            logger.warning("%s cannot be locked: nothing stops a second run from writing into it", self.path)

    def _end_torn_line(self) -> None:
        """What a kill cut short must not swallow the first line of ours."""
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def step(self, number: int, report: Mapping[str, Any]) -> None:
        """A step is done.

        Parameters
        ----------
        number : int
            Of the step in the whole training, the runs before this one included.
        report : mapping
            As `StepReport.build` makes it; what is no number in it is left out.
        """
        now = time.perf_counter()
        iteration_s = None if self._ended_s is None else round(now - self._ended_s, DIGITS)
        self._number, self._ended_s = number, now
        when = {"step": number, "time_s": round(time.time(), 3), "iteration_s": iteration_s}
        tiers = {name: _numbers(figures) for name, figures in report["tiers"].items()}
        self._add({**_numbers(report), **when, "tiers": tiers})

    def loss(self, loss: float, text_tokens: int | None = None) -> None:
        """The loss of the last step, and tokens of text that all ranks trained on in it.

        Raises
        ------
        MlpoError
            Before the first step.
        """
        if self._ended_s is None:
            raise MlpoError("there is no step yet to record a loss for: call record_loss after engine.step()")
        finite = loss if math.isfinite(loss) else None  # JSON has no other numbers
        self._add({"step": self._number, "loss": finite, "text_tokens": text_tokens})

    def _add(self, line: Mapping[str, Any]) -> None:
        if self._file.closed:
            return
        try:
            self._write(line)
        except OSError as error:
            logger.warning("the journal ends here, training goes on: %s on %s", error, here(self.path))
            self.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        text = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        if self._file.write(text) != len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """End the file. Idempotent; nothing in a forked child."""
        if self._file.closed or os.getpid() != self._owner_pid:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_UN)  # a forked child may still have it open
            self._file.close()
        except OSError as error:
            logger.warning("the journal is perhaps not whole: %s on %s", error, here(self.path))


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _numbers(figures: Mapping[str, Any]) -> dict[str, int | float]:
    return {name: round(value, DIGITS) for name, value in figures.items() if isinstance(value, int | float)}


def open_journal(directory: str, world_rank: int, start: Mapping[str, Any]) -> Journal:
    """Begin or continue the journal of a rank, ``steps-<rank>.jsonl`` in a directory that is made if it is missing.

    Raises
    ------
    StorageError
        If it cannot be made, or another engine or job writes it.
    """
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as error:
        raise storage_error("making the telemetry directory", directory, error) from error
    return Journal(os.path.join(directory, f"{PREFIX}{world_rank}{SUFFIX}"), start)
