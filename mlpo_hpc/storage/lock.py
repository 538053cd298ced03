"""One job per directory: an flock on the directory itself, which leaves no file and dies with us."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading

from mlpo_hpc.errors import StorageError, here
from mlpo_hpc.telemetry.log import warn

NO_LOCKS_HERE = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EBADF, errno.EINVAL}


_held: dict[tuple[int, int], list[int]] = {}
"""Descriptor and number of users of each directory that this process holds, by device and inode."""
_held_lock = threading.Lock()


class DirectoryLock:
    """Exclusive use of a tier directory for this process, until it ends or the last `close`.

    Several engines of one process may use a directory together.

    Raises
    ------
    StorageError
        If another job holds it; the message names its process where the kernel tells.
    """

    def __init__(self, directory: str) -> None:
        self._owner_pid = os.getpid()
        self._closed = False
        status = os.stat(directory)
        self._key = (status.st_dev, status.st_ino)
        with _held_lock:
            if self._key in _held:
                _held[self._key][1] += 1
            else:
                _held[self._key] = [_lock(directory), 1]

    def close(self) -> None:
        """Let others in. Idempotent. A forked child leaves its parent's lock alone."""
        if self._closed or os.getpid() != self._owner_pid:
            return
        self._closed = True
        with _held_lock:
            fd = _held[self._key][0]
            _held[self._key][1] -= 1
            if _held[self._key][1]:
                return
            del _held[self._key]
        # Explicit, for a forked child may still hold a copy of the descriptor.
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _lock(directory: str) -> int:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_LOCKS_HERE:
            warn("%s cannot be locked: nothing stops a second job from filling it too", directory)
            return fd
        holder = _holder(fd)
        os.close(fd)
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        raise StorageError(
            f"another job uses this tier directory{holder} on {here(directory)}. "
            "Give each job a directory of its own, for example with ${SLURM_JOB_ID} in 'dir'."
        ) from error
    return fd


def _holder(fd: int) -> str:
    """Name the process that holds the lock, if it is on this host and we may see it."""
    inode = os.fstat(fd).st_ino
    with open("/proc/locks") as locks:
        for line in locks:
            fields = line.split()
            if "FLOCK" in fields and fields[5].rpartition(":")[2] == str(inode):
                return f" (held by process {fields[4]})"
    return ""
