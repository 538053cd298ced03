"""The watch: one lock for all bookkeeping, bounded waits with reports, and the first failure of any I/O thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from mlpo_hpc.errors import MlpoError, StorageTimeout, here
from mlpo_hpc.telemetry.log import logger

REPORT_S = 60.0


class Watch:
    """A lock to hold while looking at or changing what I/O threads report.

    Parameters
    ----------
    timeout_s : float
        Longest wait without any progress.
    queues : callable
        Describes what is queued, for the reports of a long wait.
    """

    def __init__(self, timeout_s: float, queues: Callable[[], str]) -> None:
        self.closed = False
        self._timeout_s = timeout_s
        self._queues = queues
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._progress = 0

    def __enter__(self) -> Watch:
        self._changed.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._changed.release()

    def note(self, error: BaseException | None) -> bool:
        """Count progress, or keep the first error for the main thread; False if nothing matters any more."""
        self._progress += 1
        if error is not None and self._failure is None:
            self._failure = error
            logger.error("%s", error)
        if self._failure is not None:
            self._changed.notify_all()
        return self._failure is None and not self.closed

    def notify(self) -> None:
        """Something that others may wait for has changed."""
        self._changed.notify_all()

    def raise_failure(self) -> None:
        """Raise what went wrong in an I/O thread, now or earlier.

        Raises
        ------
        MlpoError
            Also after the end.
        """
        if self._failure is not None:
            raise self._failure
        if self.closed:
            raise MlpoError("the offload engine is closed")

    def wait(self, what: str) -> None:
        """Wait for any change; say so every minute.

        Raises
        ------
        StorageTimeout
            If there was no progress for `timeout_s`.
        """
        waited_s = 0.0
        before = self._progress
        while not self._changed.wait(min(REPORT_S, self._timeout_s)):
            waited_s = 0.0 if self._progress != before else waited_s + min(REPORT_S, self._timeout_s)
            before = self._progress
            logger.warning("waiting for %s since %.0f s on %s (queued: %s)", what, waited_s, here(), self._queues())
            if waited_s >= self._timeout_s:
                raise StorageTimeout(
                    f"no tier made progress for {waited_s:.0f} s while waiting for {what} on {here()}. "
                    "Check the file systems of the tiers, or raise 'tokens.timeout_s'."
                )
        self.raise_failure()
