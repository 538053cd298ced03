"""Transport ``posix``: pread and pwrite, with O_DIRECT where the file system takes it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from functools import cache
from typing import Any

from mlpo_hpc.errors import CorruptState, StorageError, here, storage_error
from mlpo_hpc.storage.base import ALIGNMENT_BYTES, FileContainer, Transport
from mlpo_hpc.storage.owner import new_name
from mlpo_hpc.telemetry.log import say

MAX_CALL_BYTES = 2**30  # Linux moves at most 0x7ffff000 bytes a call, some file systems fewer

# What open(O_TMPFILE) answers where the file system or kernel has no unnamed files.
NO_UNNAMED_FILES = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}
NO_LINKS = {errno.EXDEV, errno.ENOENT, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EACCES}
NO_DIRECT_IO = {errno.EINVAL, errno.EOPNOTSUPP}

_direct_devices: set[int] = set()
"""Where a read past the page cache worked: another try would wait for what is under way."""


class PosixFile(Transport):
    """An open file, moved by pread and pwrite.

    Parameters
    ----------
    fd : int
        Owned.
    path : str
        Of the file, or of the directory of a file without a name.
    direct : bool
        Whether it was opened with O_DIRECT.

    Notes
    -----
    Pages left in the page cache would be host memory outside the budget. Without O_DIRECT each
    piece is synced and its pages are dropped.
    """

    name = "posix"

    def __init__(self, fd: int, path: str, direct: bool) -> None:
        self.fd = fd
        self.path = path
        self.direct = direct

    def read(self, offset: int, view: memoryview) -> None:
        self._move("reading", os.preadv, offset, view)
        if not self.direct:
            drop_pages(self.fd, offset, view.nbytes)

    def write(self, offset: int, view: memoryview) -> None:
        self._move("writing", os.pwritev, offset, view)
        if not self.direct:
            sync(self.fd, self.path)
            drop_pages(self.fd, offset, view.nbytes)

    def _move(self, action: str, call: Callable[..., int], offset: int, view: memoryview) -> None:
        """Move all bytes of a view; short transfers go on from the last aligned byte."""
        done = 0
        while done < view.nbytes:
            try:
                moved = call(self.fd, [view[done : done + MAX_CALL_BYTES]], offset + done)
            except OSError as error:
                raise storage_error(f"{action} state at byte {offset + done}", self.path, error) from error
            end = done + moved
            progress = end - end % ALIGNMENT_BYTES if end < view.nbytes else end
            if progress <= done:
                raise stuck(action, offset + end, moved, self.path)
            done = progress

    def link(self, path: str) -> bool:
        """Give a file without a name one; False on another file system, or where files without a name had one."""
        return link_file(f"/proc/self/fd/{self.fd}", os.path.abspath(path), self.fd)

    def punch(self, offset: int, size_bytes: int) -> None:
        punch_hole(self.fd, offset, size_bytes, self.path)

    def sync(self) -> None:
        sync(self.fd, self.path)

    def close(self) -> None:
        """Close the file; one without a name frees its space."""
        if self.fd < 0:
            return
        fd, self.fd = self.fd, -1
        try:
            os.close(fd)
        except OSError as error:
            raise storage_error("closing the state file", self.path, error) from error


def stuck(action: str, offset: int, moved: int, path: str) -> StorageError:
    """The error for a transfer that does not go on."""
    if action == "reading":
        return CorruptState(
            f"the state file ends at byte {offset} where state was written, on {here(path)}. "
            "Something truncated it: find out what, then resume from the last checkpoint."
        )
    return StorageError(f"{action} stopped after {moved} bytes at byte {offset} on {here(path)}")


def sync(fd: int, path: str) -> None:
    """Wait until what was written is on the device, which is when some file systems find out that they cannot."""
    try:
        os.fdatasync(fd)
    except OSError as error:
        raise storage_error("syncing the state file", path, error) from error


# Flags of fallocate(2) and sync_file_range(2), which Python does not have.
KEEP_SIZE, PUNCH_HOLE = 1, 2
WAIT_BEFORE, WRITE, WAIT_AFTER = 1, 2, 4


def punch_hole(fd: int, offset: int, size_bytes: int, path: str) -> None:
    """Give the space of some bytes of a file back, where the file system can.

    Raises
    ------
    StorageError
        If the device failed.
    """
    code = _call_c("fallocate", fd, PUNCH_HOLE | KEEP_SIZE, offset, size_bytes)
    if code not in (0, errno.EOPNOTSUPP, errno.ENOSYS):
        raise storage_error("giving space back", path, OSError(code, os.strerror(code)))


def link_file(source: str, path: str, fd: int) -> bool:
    """Give a file another name; False on another file system, or where there are no such links.

    Parameters
    ----------
    source, path : str
        Absolute: the old name, or that of a descriptor in ``/proc``, and the new one.
    fd : int
        Any descriptor: only with one Python follows what ``/proc`` links to.

    Raises
    ------
    StorageError
        If there is no room, or the like.
    """
    try:
        os.link(source, path, src_dir_fd=fd, follow_symlinks=True)
    except OSError as error:
        if error.errno in NO_LINKS:
            return False
        raise storage_error("naming a state file", path, error) from error
    return True


def start_write_out(fd: int, offset: int, size_bytes: int) -> None:
    """Let the device begin with a range that was written; what goes wrong is found by `write_out`."""
    _call_c("sync_file_range", fd, offset, size_bytes, WRITE)


def write_out(fd: int, offset: int, size_bytes: int, path: str) -> None:
    """Wait until a range is on the device, whatever else of the file is not; `sync` where that cannot be.

    Where the range lies may still be lost with the machine: enough for state that nobody reads after it.

    Raises
    ------
    StorageError
        If the device failed; `TierFull` if it has no room.
    """
    code = _call_c("sync_file_range", fd, offset, size_bytes, WAIT_BEFORE | WRITE | WAIT_AFTER)
    if code in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE):
        sync(fd, path)
    elif code:
        raise storage_error("syncing the state file", path, OSError(code, os.strerror(code)))


@cache
def _of_c_library(name: str) -> Any:
    return getattr(ctypes.CDLL(None, use_errno=True), name, None)


def _call_c(name: str, fd: int, *numbers: int) -> int:
    """Call a function of the C library on a file; 0, or the number of the error. Numbers go in registers of 64 bits."""
    call = _of_c_library(name)
    if call is None:
        return errno.ENOSYS
    done = call(fd, *map(ctypes.c_int64, numbers))
    return ctypes.get_errno() if done else 0


def drop_pages(fd: int, offset: int, size_bytes: int) -> None:
    """Give clean pages of a file back to the system."""
    os.posix_fadvise(fd, offset, size_bytes, os.POSIX_FADV_DONTNEED)


def open_raw(directory: str, slot_bytes: int, num_slots: int) -> FileContainer:
    """Container ``raw``: slots in one file of ours alone, which has no name and so never outlives us.

    Parameters
    ----------
    directory : str
        Where the file lies.
    slot_bytes, num_slots : int
        Its layout; the file is sparse until slots are written.

    Raises
    ------
    StorageError
        If it cannot be made there.
    """
    return FileContainer(open_unnamed(directory, slot_bytes * num_slots), slot_bytes, num_slots)


def open_unnamed(directory: str, size_bytes: int) -> PosixFile:
    """Make a sparse file without a name.

    Raises
    ------
    StorageError
        If it cannot be made there.
    """
    fd = -1
    try:
        fd, direct = _open(directory)
        os.ftruncate(fd, size_bytes)
    except OSError as error:
        _abandon(fd)
        raise storage_error("creating a state file", directory, error) from error
    return PosixFile(fd, directory, direct)


def open_posix(path: str) -> PosixFile:
    """Open a file that exists, for reading and writing.

    Raises
    ------
    StorageError
        If it cannot be opened.
    """
    fd = -1
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            direct_fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
            if _reads_directly(direct_fd):
                os.close(fd)
                return PosixFile(direct_fd, path, True)
            os.close(direct_fd)
    except OSError as error:
        _abandon(fd)
        raise storage_error("opening the state file", path, error) from error
    _say_buffered(os.path.dirname(path))
    return PosixFile(fd, path, False)


def _abandon(fd: int) -> None:
    # Called on the way out with the first error, which is the one worth telling.
    with contextlib.suppress(OSError):
        os.close(fd)


def _open(directory: str) -> tuple[int, bool]:
    """Open an unnamed file, with O_DIRECT if it can be used; say so once where it cannot."""
    try:
        fd = _open_unnamed(directory, os.O_DIRECT)
    except OSError as error:
        if error.errno not in NO_DIRECT_IO:
            raise
        fd = -1
    if fd >= 0:
        if _takes_direct_io(fd):
            return fd, True
        os.close(fd)
    _say_buffered(directory)
    return _open_unnamed(directory, 0), False


def _say_buffered(directory: str) -> None:
    say("%s does not take O_DIRECT; each chunk there is synced and its pages are dropped", directory)


def _open_unnamed(directory: str, extra_flags: int) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | extra_flags
    try:
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in NO_UNNAMED_FILES or not os.path.isdir(directory):
            raise
    path = os.path.join(directory, new_name())
    fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(path)
    return fd


def _takes_direct_io(fd: int) -> bool:
    """Write one aligned block: some file systems accept the flag and refuse the transfer."""
    with mmap.mmap(-1, ALIGNMENT_BYTES) as block:
        try:
            os.pwrite(fd, block, 0)
        except OSError as error:
            if error.errno in NO_DIRECT_IO:
                return False
            raise
    return True


def _reads_directly(fd: int) -> bool:
    """As `_takes_direct_io`, of a file whose bytes must stay."""
    device = os.fstat(fd).st_dev
    if device in _direct_devices:
        return True
    with mmap.mmap(-1, ALIGNMENT_BYTES) as block, contextlib.suppress(OSError):
        if os.preadv(fd, [block], 0) > 0:  # of an empty file nothing is read, which proves nothing
            _direct_devices.add(device)
        return True
    return False
