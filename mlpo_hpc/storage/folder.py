"""Folders of ours in a tier's directory, into which nobody else looks."""

from __future__ import annotations

import atexit
import itertools
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mlpo_hpc.cluster.node import machine_id
from mlpo_hpc.errors import storage_error
from mlpo_hpc.telemetry.log import warn
from mlpo_hpc.tokens.process import start_ticks

STALE_S = 3600.0
"""After which a folder of a dead process is removed; making a file takes seconds."""

_numbers = itertools.count()


@contextmanager
def private_folder(directory: str) -> Iterator[str]:
    """A folder of ours, removed at the end; those that dead processes of this host left behind are removed first.

    Raises
    ------
    StorageError
        If it cannot be made.
    """
    # Two machines may have one name.
    prefix = f".mlpo_hpc-{socket.gethostname()}-{machine_id()[:8]}-"
    pid = os.getpid()
    folder = os.path.join(directory, f"{prefix}{pid}-{start_ticks(pid)}-{next(_numbers)}")
    try:
        _remove_leftovers(directory, prefix)
        os.mkdir(folder, 0o700)
    except OSError as error:
        raise storage_error("making a folder", directory, error) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if os.path.exists(folder):  # on NFS a file that is open still has a name there: once more when it is closed
            atexit.register(shutil.rmtree, folder, ignore_errors=True)


def _remove_leftovers(directory: str, prefix: str) -> None:
    pattern = re.compile(re.escape(prefix) + r"(\d+)-(\d+)-\d+")
    with os.scandir(directory) as entries:
        for entry in entries:
            if (match := pattern.fullmatch(entry.name)) and _is_stale(entry, *map(int, match.groups())):
                warn("removing %s, which process %s left behind", entry.path, match[1])
                shutil.rmtree(entry.path, ignore_errors=True)


def _is_stale(entry: os.DirEntry[str], pid: int, ticks: int) -> bool:
    """Ours, of a process that is gone, and old, for containers do not see each other's processes."""
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:  # another rank's, which is done with it
        return False
    old = time.time() - status.st_mtime > STALE_S
    return old and status.st_uid == os.getuid() and start_ticks(pid) != ticks
