"""Folders of ours in a directory that others use too, into which nobody else looks.

Their name tells who made them (`storage.owner`). A file in them, the mark, tells that they are ours,
and is locked as long as they are in use.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from mlpo_hpc.cluster.node import Node, gather_on_node
from mlpo_hpc.cluster.verdict import gather, together
from mlpo_hpc.errors import storage_error
from mlpo_hpc.storage.lock import NO_LOCKS_HERE
from mlpo_hpc.storage.owner import new_name

MARK = "mlpo_hpc-mark"


def mark_text(name: str) -> bytes:
    """What the mark of a folder of this name says."""
    return f"Work in progress of mlpo_hpc; when its job has ended, 'mlpo clean' removes it.\n{name}\n".encode()


@contextmanager
def private_folder(directory: str) -> Iterator[str]:
    """A folder of ours, removed at the end.

    Raises
    ------
    StorageError
        If it cannot be made; `TierFull` if there is no room.
    """
    name = new_name()
    folder = os.path.join(directory, name)
    with ExitStack() as endings:
        endings.callback(_remove_or_retry, folder)  # before it is there: a signal may come right after
        try:
            os.mkdir(folder, 0o700)
            endings.callback(os.close, _mark(folder, name))
        except FileExistsError as error:
            endings.pop_all()  # whoever made it
            raise storage_error("making a folder", directory, error) from error
        except OSError as error:
            raise storage_error("making a folder", directory, error) from error
        yield folder


def _mark(folder: str, name: str) -> int:
    """Write the mark; its descriptor holds the lock."""
    fd = os.open(os.path.join(folder, MARK), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        lock_mark(fd)
        os.write(fd, mark_text(name))
    except OSError:
        os.close(fd)
        raise
    return fd


def lock_mark(fd: int) -> bool | None:
    """Lock a mark until its descriptor is closed; False if another process has it, None if there are no locks here."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if error.errno in NO_LOCKS_HERE:
            return None
        raise
    return True


def _remove_or_retry(folder: str) -> None:
    """On NFS a file that is open still has a name there: once more when it is closed, or by the next start."""
    if not os.path.lexists(folder):  # it could not be made
        return
    try:
        fd = open_folder(folder)
        try:
            remove_contents(fd)
            remove_mark(fd, folder)
        finally:
            os.close(fd)
    except OSError:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)


def open_folder(folder: str) -> int:
    """A descriptor, not of what a link points to."""
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def remove_contents(fd: int) -> None:
    """Remove what is in an open folder except its mark: what is left if we are killed meanwhile is still known as ours.

    Raises
    ------
    OSError
        If something cannot be removed. No link is followed.
    """
    for name in os.listdir(fd):
        if stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=fd)
        elif name != MARK:
            os.unlink(name, dir_fd=fd)


def remove_mark(fd: int, folder: str) -> None:
    """Remove the mark of an open folder, and then the folder, which is empty.

    Raises
    ------
    OSError
        If it is not.
    """
    with suppress(FileNotFoundError):  # killed before it was marked
        os.unlink(MARK, dir_fd=fd)
    os.rmdir(folder)


@contextmanager
def common_folder(node: Node) -> Iterator[Path | None]:
    """Collective over the training world. A private folder for a moment, seen by all ranks of the node.

    Yields
    ------
    Path or None
        None on all ranks of the job if those of one node do not see the same files (containers).
    """
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    with ExitStack() as made:
        mine = together(lambda: made.enter_context(private_folder(base)) if node.node_rank == 0 else None)
        folder = Path(next(path for path in gather_on_node(node, mine) if path is not None))
        yield folder if all(gather(folder.is_dir())) else None
