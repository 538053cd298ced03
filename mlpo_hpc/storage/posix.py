"""Container ``raw`` over transport ``posix``: one file without a name, moved by pread and pwrite."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import uuid
from collections.abc import Callable

from mlpo_hpc.errors import CorruptState, StorageError, here, storage_error
from mlpo_hpc.storage.base import ALIGNMENT_BYTES, Container
from mlpo_hpc.telemetry.log import say

MAX_CALL_BYTES = 2**30  # Linux moves at most 0x7ffff000 bytes a call, some file systems fewer

# What open(O_TMPFILE) answers where the file system or kernel has no unnamed files.
NO_UNNAMED_FILES = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}
NO_DIRECT_IO = {errno.EINVAL, errno.EOPNOTSUPP}


class RawFile(Container):
    """Slots in one file of ours alone, which has no name and so never outlives us.

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

    Notes
    -----
    O_DIRECT is used where the file system takes it: pages left in the page cache would be host
    memory outside the budget. Elsewhere each chunk is synced and its pages are dropped.
    """

    def __init__(self, directory: str, slot_bytes: int, num_slots: int) -> None:
        super().__init__(directory, slot_bytes, num_slots)
        self.fd = -1
        try:
            self.fd, self.direct = _open(directory)
            os.ftruncate(self.fd, slot_bytes * num_slots)
        except OSError as error:
            self._abandon()
            raise storage_error("creating a state file", directory, error) from error

    def _read(self, offset: int, view: memoryview) -> None:
        self._move("reading", os.preadv, offset, view)
        self._drop_pages(offset, view.nbytes)

    def _write(self, offset: int, view: memoryview) -> None:
        self._move("writing", os.pwritev, offset, view)
        if not self.direct:
            self._sync()
            self._drop_pages(offset, view.nbytes)

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
                self._stuck(action, offset + end, moved)
            done = progress

    def _stuck(self, action: str, offset: int, moved: int) -> None:
        if action == "reading":
            raise CorruptState(
                f"the state file ends at byte {offset} where state was written, on {here(self.path)}. "
                "Something truncated it: find out what, then resume from the last checkpoint."
            )
        raise StorageError(f"{action} stopped after {moved} bytes at byte {offset} on {here(self.path)}")

    def _sync(self) -> None:
        try:
            os.fdatasync(self.fd)
        except OSError as error:
            raise storage_error("syncing the state file", self.path, error) from error

    def _drop_pages(self, offset: int, size_bytes: int) -> None:
        if not self.direct:
            os.posix_fadvise(self.fd, offset, size_bytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file, which frees its space."""
        if self.fd < 0:
            return
        fd, self.fd = self.fd, -1
        try:
            os.close(fd)
        except OSError as error:
            raise storage_error("closing the state file", self.path, error) from error

    def _abandon(self) -> None:
        # Called on the way out with the first error, which is the one worth telling.
        with contextlib.suppress(OSError):
            os.close(self.fd)
        self.fd = -1


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
    say("%s does not take O_DIRECT; each chunk there is synced and its pages are dropped", directory)
    return _open_unnamed(directory, 0), False


def _open_unnamed(directory: str, extra_flags: int) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | extra_flags
    try:
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in NO_UNNAMED_FILES or not os.path.isdir(directory):
            raise
    path = os.path.join(directory, f".mlpo_hpc-{uuid.uuid4().hex}")
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
