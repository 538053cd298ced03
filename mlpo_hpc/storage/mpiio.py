"""Transport ``mpiio``: blocking, independent MPI-IO from the I/O threads.

Each handle is opened on this process alone: closing one is collective over those that opened it,
and a rank that fails must not wait for the others. One handle reads and another writes, for
implementations lock a handle, or all of MPI-IO (ROMIO), during a call.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from mlpo_hpc.errors import StorageError, here, storage_error
from mlpo_hpc.storage.base import Transport
from mlpo_hpc.storage.filesystem import describe
from mlpo_hpc.storage.posix import (
    drop_pages,
    link_file,
    punch_hole,
    start_write_out,
    stuck,
    sync,
    write_out,
)

READ_BYTES = 2**20
"""Of a call. Where all of MPI-IO is under one lock, a reader that waits for the device holds writers up no longer."""
WRITE_BYTES = 4 * 2**20
"""Of a call. The device works on one while MPI copies the next; far below 2^31, where MPI before version 4 ends."""
ASK_BYTES = 128 * 1024
"""Linux reads no more ahead for one piece of advice than the device's readahead, 128 KiB by default."""


class MpiFile(Transport):
    """An existing file, moved by MPI-IO. Needs ``MPI_THREAD_MULTIPLE``.

    Parameters
    ----------
    path : str
        Of the file.
    hints : mapping, optional
        For MPI-IO.

    Raises
    ------
    StorageError
        If it cannot be opened.

    Notes
    -----
    MPI-IO goes through the page cache: what is to be read is asked for at once, so that the device
    is busy while MPI copies; what was written is synced; and the pages are dropped.
    """

    name = "mpiio"

    def __init__(self, path: str, hints: Mapping[str, str] | None = None) -> None:
        self.path = path
        self._handles: list[Any] = []
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            # There pages stay until all of the file is committed.
            self._is_nfs = describe(path).type.startswith("nfs")
            self._reading, self._writing = self._open(hints), self._open(hints)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise storage_error("opening the state file", path, error) from error
            raise

    def _open(self, hints: Mapping[str, str] | None) -> Any:
        from mpi4py import MPI

        try:
            # The error handler of files is "return" by default, so that mpi4py raises.
            handle = MPI.File.Open(MPI.COMM_SELF, self.path, MPI.MODE_RDWR, MPI.Info.Create(dict(hints or {})))
        except MPI.Exception as error:
            raise _translate(error, "opening the state file", self.path) from error
        self._handles.append(handle)
        return handle

    def get_hints(self) -> dict[str, str]:
        """The hints that MPI says are in use."""
        return dict(self._reading.Get_info().items())

    def read(self, offset: int, view: memoryview) -> None:
        for begin in range(offset, offset + view.nbytes, ASK_BYTES):
            os.posix_fadvise(self._fd, begin, ASK_BYTES, os.POSIX_FADV_WILLNEED)
        for begin, piece in _pieces(view, READ_BYTES):
            self._move("reading", self._reading.Read_at, os.preadv, offset + begin, piece)
        drop_pages(self._fd, offset, view.nbytes)

    def write(self, offset: int, view: memoryview) -> None:
        for begin, piece in _pieces(view, WRITE_BYTES):
            self._move("writing", self._writing.Write_at, os.pwritev, offset + begin, piece)
            start_write_out(self._fd, offset + begin, piece.nbytes)
        if self._is_nfs:
            sync(self._fd, self.path)
        else:
            write_out(self._fd, offset, view.nbytes, self.path)
        drop_pages(self._fd, offset, view.nbytes)

    def _move(self, action: str, call: Any, system_call: Callable[..., int], offset: int, view: memoryview) -> None:
        """Move all bytes. Where MPI fails the system is asked why: OMPIO and ROMIO do not say that a disk is full."""
        from mpi4py import MPI

        status = MPI.Status()
        done = 0
        while done < view.nbytes:
            rest, failure = view[done:], None
            try:
                call(offset + done, [rest, MPI.BYTE], status)
            except MPI.Exception as error:
                failure = error
            moved = 0 if failure else status.Get_elements(MPI.BYTE)
            try:
                moved = moved or system_call(self._fd, [rest], offset + done)
            except OSError as error:
                raise storage_error(f"{action} state at byte {offset + done}", self.path, error) from failure
            if failure:
                raise _translate(failure, f"{action} state at byte {offset + done}", self.path) from failure
            if not 0 < moved <= rest.nbytes:
                raise stuck(action, offset + done, moved, self.path)
            done += moved

    def link(self, path: str) -> bool:
        return link_file(f"/proc/self/fd/{self._fd}", os.path.abspath(path), self._fd)

    def punch(self, offset: int, size_bytes: int) -> None:
        punch_hole(self._fd, offset, size_bytes, self.path)

    def sync(self) -> None:
        sync(self._fd, self.path)

    def close(self) -> None:
        """Close all handles, unless MPI has ended before."""
        from mpi4py import MPI

        handles, self._handles = self._handles, []
        fd, self._fd = self._fd, -1
        try:
            for handle in handles if not MPI.Is_finalized() else ():
                handle.Close()
        except MPI.Exception as error:
            raise _translate(error, "closing the state file", self.path) from error
        finally:
            if fd >= 0:
                os.close(fd)


def _pieces(view: memoryview, size_bytes: int) -> Iterator[tuple[int, memoryview]]:
    for begin in range(0, view.nbytes, size_bytes):
        yield begin, view[begin : begin + size_bytes]


def create(path: str, hints: Mapping[str, str], size_bytes: int = 0) -> None:
    """Make a file by MPI-IO, which asks the file system for the striping that hints want.

    Raises
    ------
    StorageError
        If it cannot be made.
    """
    from mpi4py import MPI

    mode = MPI.MODE_CREATE | MPI.MODE_EXCL | MPI.MODE_RDWR
    try:
        handle = MPI.File.Open(MPI.COMM_SELF, path, mode, MPI.Info.Create(dict(hints)))
        try:
            handle.Set_size(size_bytes)
        finally:
            handle.Close()
    except MPI.Exception as error:
        raise _translate(error, "creating a state file", path) from error


@cache
def _error_codes() -> dict[int, int]:
    """MPI's error classes (MPI 4.1, section 14.7) that say what the system's errors say."""
    from mpi4py import MPI

    return {
        MPI.ERR_NO_SPACE: errno.ENOSPC,
        MPI.ERR_QUOTA: errno.EDQUOT,
        MPI.ERR_NO_SUCH_FILE: errno.ENOENT,
        MPI.ERR_ACCESS: errno.EACCES,
        MPI.ERR_READ_ONLY: errno.EROFS,
        MPI.ERR_IO: errno.EIO,
    }


def _translate(error: Any, action: str, path: str) -> StorageError:
    code = _error_codes().get(error.Get_error_class())
    text = f"MPI: {error.Get_error_string().splitlines()[0].removesuffix(', error stack:')}"
    if code:
        return storage_error(action, path, OSError(code, text))
    return StorageError(f"{action} failed: {text}, on {here(path)}. What to do: see the system log of that host.")


def ignored_hints(asked: Mapping[str, str], used: Mapping[str, str]) -> dict[str, str | None]:
    """Hints that MPI did not take, with what it uses instead (None: it does not know them)."""
    return {key: used.get(key) for key, value in asked.items() if _plain(used.get(key)) != _plain(value)}


def _plain(value: str | None) -> str | None:
    return None if value is None else value.strip().lower()
