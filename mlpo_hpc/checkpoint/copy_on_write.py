"""Copy on write: bytes that are saved while their owner may want to change them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mlpo_hpc.errors import StorageTimeout, here
from mlpo_hpc.state.cache import Buffer


class CopyOnWrite:
    """Bytes of one moment: where they lie, until their owner is about to change them; a copy from then on.

    Parameters
    ----------
    fetch : callable
        Gives the bytes, as they are when it is called first.
    is_live : bool
        Whether these are the owner's memory, or a copy already.
    """

    def __init__(self, fetch: Callable[[], memoryview], is_live: bool = True) -> None:
        self._fetch = fetch
        self._is_live = is_live
        self._data: memoryview | None = None
        self._dropped = False
        self._lock = threading.Lock()

    @contextmanager
    def reading(self) -> Iterator[memoryview]:
        """The bytes, which do not change meanwhile: for a piece of work that is short."""
        with self._lock:
            yield self._get()

    def before_change(self, timeout_s: float) -> None:
        """The owner may change its memory when this returns.

        Raises
        ------
        StorageTimeout
            If a piece of work with the bytes takes longer than `timeout_s`.
        """
        if not self._lock.acquire(timeout=timeout_s):
            raise stuck(timeout_s)
        try:
            if not self._dropped:
                data = self._get()
                if self._is_live and len(data):
                    data = Buffer(len(data)).fill(data)
                self._data, self._is_live = data, False
        finally:
            self._lock.release()

    def drop(self) -> None:
        """They are saved. Idempotent."""
        with self._lock:
            self._dropped, self._data = True, None

    def _get(self) -> memoryview:
        if self._data is None:
            self._data = self._fetch()
        return self._data


def stuck(timeout_s: float) -> StorageTimeout:
    """The error for an update that has waited too long for what is to be saved."""
    return StorageTimeout(f"the checkpoint does not get on: nothing was written for {timeout_s:.0f} s on {here()}")
