"""One job per directory: an flock on the directory itself, which leaves no file and dies with us."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os

from mlpo_hpc.errors import StorageError, here
from mlpo_hpc.telemetry.log import warn

NO_LOCKS_HERE = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EBADF, errno.EINVAL}


class DirectoryLock:
    """Exclusive use of a tier directory for as long as the process lives or until `close`.

    Raises
    ------
    StorageError
        If another job holds it; the message names its process where the kernel tells.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._owner_pid = os.getpid()
        self._fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _holder(self._fd)
            self.close()
            if error.errno in NO_LOCKS_HERE:
                warn("%s cannot be locked: nothing stops a second job from filling it too", directory)
                return
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise StorageError(
                f"another job uses this tier directory{holder} on {here(directory)}. "
                "Give each job a directory of its own, for example with ${SLURM_JOB_ID} in 'dir'."
            ) from error

    def close(self) -> None:
        """Let others in. Idempotent. A forked child only drops its copy."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        if os.getpid() == self._owner_pid:
            # Explicit, for a forked child may still hold a copy of the descriptor.
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _holder(fd: int) -> str:
    """Name the process that holds the lock, if it is on this host and we may see it."""
    inode = os.fstat(fd).st_ino
    with open("/proc/locks") as locks:
        for line in locks:
            fields = line.split()
            if "FLOCK" in fields and fields[5].rpartition(":")[2] == str(inode):
                return f" (held by process {fields[4]})"
    return ""
