"""What a token can do; the names are those of `threading.Lock`."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from types import TracebackType

from mlpo_hpc.tokens.process import Process


class Token(ABC):
    """Permission for one holder at a time (or `permits` of them) to move bytes on a tier.

    Held only while bytes move: buffer, slot and budget are in hand before it is asked for.
    """

    @abstractmethod
    def acquire(self) -> float:
        """Wait for a permit, first come first served; return the seconds waited."""

    @abstractmethod
    def release(self) -> None:
        """Give the permit back."""

    @abstractmethod
    def locked(self) -> bool:
        """Whether no permit is free now."""

    @abstractmethod
    def wanted(self) -> bool:
        """Whether somebody waits for a permit now."""

    def holders(self) -> list[Process]:
        """The ranks that hold a permit now, as far as that is known."""
        return []

    def who(self) -> str:
        """Say who holds it, for messages."""
        holders = self.holders()
        return f"held by {', '.join(map(str, holders))}" if holders else "nobody is known to hold it at this moment"

    def free(self) -> None:
        """Give back what it holds of the system; nothing by default. Idempotent."""
        return

    def __enter__(self) -> Token:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class FreeToken(Token):
    """Backend ``off``: everybody may always move bytes."""

    def acquire(self) -> float:
        return 0.0

    def release(self) -> None:
        return None

    def locked(self) -> bool:
        return False

    def wanted(self) -> bool:
        return False

    def who(self) -> str:
        return "no turns are taken"


class Turn:
    """One rank's hold on a token, shared by its I/O threads of one tier and direction.

    The first thread in takes the token, the last one out gives it back. After `max_chunks`
    no more threads get in while somebody else waits, so that the others have their turn.
    """

    def __init__(self, token: Token, max_chunks: int = 16) -> None:
        self._token = token
        self._max_chunks = max_chunks
        self._changed = threading.Condition()
        self._inside = 0
        self._entered = 0
        self.taken = 0
        """How often the token was taken."""

    def enter(self) -> float:
        """Get in; return the seconds waited for the token."""
        begin = time.perf_counter()
        with self._changed:
            while self._inside and self._entered >= self._max_chunks and self._token.wanted():
                self._changed.wait()
            if not self._inside:
                self._token.acquire()
                self._entered = 0
                self.taken += not isinstance(self._token, FreeToken)
            self._inside += 1
            self._entered += 1
        return time.perf_counter() - begin

    def leave(self) -> None:
        """Get out; the last one gives the token back."""
        with self._changed:
            self._inside -= 1
            if not self._inside:
                self._token.release()
                self._changed.notify_all()

    def is_wanted(self) -> bool:
        """Whether somebody else waits for the token or has it."""
        if not self._changed.acquire(blocking=False):  # a thread of ours waits for it
            return True
        try:
            return self._token.wanted() or (not self._inside and self._token.locked())
        finally:
            self._changed.release()

    def who(self) -> str:
        """Say who holds the token, for messages."""
        return self._token.who()
