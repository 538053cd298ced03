"""Backend ``flock``: exclusion by file locks that the kernel frees with their process. Fairness is not promised."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
import weakref

from mlpo_hpc.tokens.base import Token

_open_files: weakref.WeakSet[FlockToken] = weakref.WeakSet()


class FlockToken(Token):
    """One token of one rank: a lock on one of `permits` files that all ranks of the node opened.

    A waiter sleeps in the kernel. A lock belongs to the open file, which a forked child shares;
    so children close theirs.

    Parameters
    ----------
    paths : list of str
        One existing file for each permit; they may be removed once all ranks opened them.
    node_rank : int
        Spreads the waiters over the files.
    """

    def __init__(self, paths: list[str], node_rank: int) -> None:
        self._fds = [os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in paths]
        self._mine = node_rank % len(self._fds)
        self._held: int | None = None
        _open_files.add(self)

    def acquire(self) -> float:
        """Take the first free file, else wait for one of them; return the seconds waited."""
        begin = time.monotonic()
        for fd in self._fds:
            if _try_lock(fd):
                self._held = fd
                return time.monotonic() - begin
        fd = self._fds[self._mine]
        fcntl.flock(fd, fcntl.LOCK_EX)
        self._held = fd
        return time.monotonic() - begin

    def release(self) -> None:
        """Unlock the file that `acquire` took."""
        fd, self._held = self._held, None
        if fd is None:
            raise RuntimeError("release of a token that is not held")
        fcntl.flock(fd, fcntl.LOCK_UN)

    def locked(self) -> bool:
        for fd in self._fds:
            if fd != self._held and _try_lock(fd):
                fcntl.flock(fd, fcntl.LOCK_UN)
                return False
        return True

    def wanted(self) -> bool:
        """The kernel does not tell who waits: always perhaps."""
        return True

    def free(self) -> None:
        """Close the files. Idempotent."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _close_in_child() -> None:
    for token in list(_open_files):
        token.free()


os.register_at_fork(after_in_child=_close_in_child)


def make_lock_files(count: int) -> tuple[str, list[str]]:
    """A private folder on this node with empty files to lock; the caller removes it when all have opened them."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = tempfile.mkdtemp(prefix="mlpo_hpc-", dir=base)
    paths = [os.path.join(folder, str(index)) for index in range(count)]
    for path in paths:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    return folder, paths
