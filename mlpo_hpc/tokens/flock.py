"""Backend ``flock``: exclusion by file locks that the kernel frees with their process. Fairness is not promised."""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from pathlib import Path

from mlpo_hpc.tokens.base import Token
from mlpo_hpc.tokens.process import Process

LOCK_TABLE = Path("/proc/locks")

_open_tokens: weakref.WeakSet[FlockToken] = weakref.WeakSet()


class FlockToken(Token):
    """One token of one rank: a lock on one of `permits` files that all ranks of the node opened.

    A waiter sleeps in the kernel. A lock belongs to the open file, which a forked child shares;
    so children close theirs.

    Parameters
    ----------
    name : str
        Tier and direction.
    paths : list of str
        One file for each permit, made if need be; they may be removed once all ranks opened them.
    node_rank : int
        Spreads the waiters over the files.
    processes : list of Process
        The ranks of the node, to name holders.
    """

    def __init__(self, name: str, paths: list[str], node_rank: int, processes: list[Process]) -> None:
        self.name = name
        self._fds = [os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) for path in paths]
        self._mine = node_rank % len(self._fds)
        self._processes = {process.pid: process for process in processes}
        self._held: int | None = None
        _open_tokens.add(self)

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
        if fd not in self._fds:  # freed meanwhile: its number may be another file's
            return
        fcntl.flock(fd, fcntl.LOCK_UN)

    def locked(self) -> bool:
        for fd in self._fds:
            if fd == self._held:
                continue
            if _try_lock(fd):
                fcntl.flock(fd, fcntl.LOCK_UN)
                return False
        return True

    def wanted(self) -> bool:
        """Whether the kernel's table shows a waiter; without a table: perhaps."""
        return not LOCK_TABLE.exists() or bool(self._pids(waiting=True))

    def holders(self) -> list[Process]:
        return [self._processes[pid] for pid in self._pids(waiting=False) if pid in self._processes]

    def _pids(self, waiting: bool) -> list[int]:
        files = [os.fstat(fd) for fd in self._fds]
        return _lock_owners({(status.st_dev, status.st_ino) for status in files}, waiting)

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


def _lock_owners(files: set[tuple[int, int]], waiting: bool) -> list[int]:
    """Processes that hold, or wait for, a lock on files given as (device, inode): proc_locks(5)."""
    pids = []
    for line in LOCK_TABLE.read_text().splitlines() if LOCK_TABLE.exists() else ():
        # "3: -> FLOCK  ADVISORY  WRITE 4711 08:01:1234 0 EOF", the arrow for a waiter
        fields = line.split()[1:]
        waits = fields[0] == "->"
        kind, _, _, pid, where = fields[waits : waits + 5]
        major, minor, inode = where.split(":")
        device = os.makedev(int(major, 16), int(minor, 16))
        if kind == "FLOCK" and waits == waiting and (device, int(inode)) in files:
            pids.append(int(pid))
    return pids


def _close_in_child() -> None:
    for token in list(_open_tokens):
        token.free()


os.register_at_fork(after_in_child=_close_in_child)
