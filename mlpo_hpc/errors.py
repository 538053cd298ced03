"""The few exceptions of the library. Each message says what, where and what to do."""

from __future__ import annotations

import errno
import os
import socket

ADVICE = {
    errno.ENOSPC: "free space there; if it is a tier, give another one more of the state ('tiers' / 'capacity')",
    errno.EDQUOT: "your quota is used up: free space, ask for more, or point 'dir' elsewhere",
    errno.EIO: "the device or file system failed: check the system log; write elsewhere",
    errno.EFBIG: "raise the file size limit (ulimit -f), or point 'dir' elsewhere",
    errno.ENOENT: "create the directory, or correct 'dir'",
    errno.EACCES: "make the directory writable for this user, or correct 'dir'",
    errno.EPERM: "make the directory writable for this user, or correct 'dir'",
    errno.EROFS: "the file system is mounted read-only: point 'dir' elsewhere",
    errno.EAGAIN: "another process has the file locked: let it end, or set HDF5_USE_FILE_LOCKING=FALSE to read anyway",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


class MlpoError(Exception):
    """Base of all errors raised on purpose by mlpo_hpc."""

    on_all_ranks = False
    """Whether every rank raises the same error, so that rank 0 alone need print it."""


class ConfigError(MlpoError, ValueError):
    """The configuration cannot be used."""


class MpiMismatch(ConfigError):
    """The launcher and the MPI library do not belong together."""


class UnsupportedError(MlpoError):
    """A DeepSpeed feature, version or optimizer that does not fit this offload engine."""


class StorageError(MlpoError):
    """A tier failed to move bytes."""


class TierFull(StorageError):
    """No room is left on any tier for state that must be written."""


class CorruptState(StorageError):
    """State read back from a tier is not what was written to it."""


class StorageTimeout(StorageError):
    """A tier made no progress for longer than allowed."""


def here(path: str | os.PathLike[str] | None = None) -> str:
    """Say where we are: host, world rank and, if given, the path."""
    rank = os.environ.get("RANK", "0")
    place = f"host {socket.gethostname()}, rank {rank}"
    return f"{place}, {os.fspath(path)}" if path is not None else place


def storage_error(action: str, path: str, error: OSError) -> StorageError:
    """Turn an operating system error into ours, with advice for its errno."""
    advice = ADVICE.get(error.errno or 0, "see the system log of that host")
    kind = TierFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else StorageError
    name = errno.errorcode.get(error.errno or 0, "?")
    return kind(f"{action} failed: {name} ({error.strerror}) on {here(path)}. What to do: {advice}.")
