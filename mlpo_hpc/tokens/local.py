"""Backend ``local``: tokens among the engines and threads of one process."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Hashable

from mlpo_hpc.errors import StorageTimeout, here
from mlpo_hpc.tokens.base import Token


class LocalToken(Token):
    """A fair counting lock: permits are handed over in the order of asking.

    Parameters
    ----------
    name : str
        What is being waited for, in messages.
    permits : int
        How many may hold it at once.
    timeout_s : float
        Longest wait before `StorageTimeout`.
    """

    def __init__(self, name: str, permits: int = 1, timeout_s: float = 1800) -> None:
        if permits < 1:
            raise ValueError(f"a token needs at least one permit, got {permits}")
        self.name = name
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._free = permits
        self._waiting: deque[threading.Event] = deque()

    def acquire(self) -> float:
        """Wait for a permit, first come first served; return the seconds waited.

        Raises
        ------
        StorageTimeout
            If no permit came within `timeout_s`.
        """
        with self._lock:
            if self._free and not self._waiting:
                self._free -= 1
                return 0.0
            turn = threading.Event()
            self._waiting.append(turn)
        begin = time.monotonic()
        if not turn.wait(self.timeout_s) and not self._withdraw(turn):
            raise StorageTimeout(f"no permit for {self.name} within {self.timeout_s:.0f} s on {here()}")
        return time.monotonic() - begin

    def _withdraw(self, turn: threading.Event) -> bool:
        """Leave the queue after a timeout; True if the permit came at the last moment."""
        with self._lock:
            if turn.is_set():
                return True
            self._waiting.remove(turn)
            return False

    def release(self) -> None:
        """Hand the permit to the one who waits longest, or make it free."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._free += 1

    def who(self) -> str:
        return "held within this process" if self.locked() else "free"

    def locked(self) -> bool:
        with self._lock:
            return self._free == 0

    def wanted(self) -> bool:
        with self._lock:
            return bool(self._waiting)


_tokens: dict[tuple[Hashable, str, int], LocalToken] = {}
_tokens_lock = threading.Lock()


def local_token(key: Hashable, name: str, permits: int, timeout_s: float) -> LocalToken:
    """The one token of this process for a tier's device and a direction."""
    with _tokens_lock:
        if (key, name, permits) not in _tokens:
            _tokens[key, name, permits] = LocalToken(name, permits, timeout_s)
        return _tokens[key, name, permits]
