"""Files of a checkpoint: regular ones, of this user alone, whole or not at all, and on the device when it matters."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import xxhash

from mlpo_hpc.checkpoint.manifest import FileEntry
from mlpo_hpc.errors import CorruptState, here, storage_error

MAX_MANIFEST_BYTES = 2**30
BLOCK_BYTES = 2**22


def open_file(path: Path) -> int:
    """Open a file of a checkpoint for reading: a regular one, not where a symbolic link points to.

    Raises
    ------
    CorruptState
        If it is missing or something else.
    StorageError
        If it cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would be waited for
    except FileNotFoundError as error:
        raise CorruptState(f"a file of the checkpoint is missing: {here(path)}") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CorruptState(f"a symbolic link, which no file of a checkpoint is: {here(path)}") from error
        raise storage_error("opening a file of the checkpoint", str(path), error) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CorruptState(f"no regular file, which all files of a checkpoint are: {here(path)}")
    return fd


def read_whole(path: Path, limit_bytes: int = MAX_MANIFEST_BYTES) -> bytes:
    """All bytes of a small file of a checkpoint."""
    with os.fdopen(open_file(path), "rb") as file:
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise CorruptState(f"larger than {limit_bytes} bytes, which no such file is: {here(path)}")
    return data


def write_whole(path: Path, data: bytes) -> None:
    """Write a file of this user alone, and wait until it is on the device.

    Raises
    ------
    StorageError
        If it cannot be; `TierFull` if there is no room.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise storage_error("writing a file of the checkpoint", str(path), error) from error


def sync_file(path: Path) -> None:
    """Wait until a file is on the device."""
    fd = open_file(path)
    try:
        os.fsync(fd)
    except OSError as error:
        raise storage_error("syncing a file of the checkpoint", str(path), error) from error
    finally:
        os.close(fd)


def replace_whole(path: Path, data: bytes) -> None:
    """A file appears with this content, or stays what it was."""
    write_whole(partial(path), data)
    put_in_place(path)


def sync_folder(folder: Path) -> None:
    """Let names in a folder last."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise storage_error("syncing the folder of the checkpoint", str(folder), error) from error


def partial(path: Path) -> Path:
    """What is to be a file as soon as it may be."""
    return path.with_name(f"{path.name}.partial")


def put_in_place(path: Path) -> None:
    """Rename what is `partial`: a file appears with this content, or stays what it was."""
    try:
        os.rename(partial(path), path)
    except OSError as error:
        raise storage_error("naming a file of the checkpoint", str(path), error) from error
    sync_folder(path.parent)


def checked(folder: Path, entry: FileEntry) -> bytes:
    """A small file, whose size and checksum are those that were noted.

    Raises
    ------
    CorruptState
        If they are not.
    """

    path = folder / entry.file
    data = read_whole(path)
    found = xxhash.xxh3_64_hexdigest(data)
    if len(data) != entry.nbytes or found != entry.checksum:
        raise CorruptState(
            f"not what was saved: {len(data)} bytes with checksum {found} instead of {entry.nbytes} with "
            f"{entry.checksum}: {here(path)}"
        )
    return data


def file_checksum(path: Path) -> str:
    """Of a file of any size."""

    digest = xxhash.xxh3_64()
    try:
        with os.fdopen(open_file(path), "rb") as file:
            while piece := file.read(BLOCK_BYTES):
                digest.update(piece)
    except OSError as error:
        raise storage_error("reading a file of the checkpoint", str(path), error) from error
    return digest.hexdigest()


def check_file(folder: Path, entry: FileEntry) -> None:
    """Raise `CorruptState` if a file is not what was noted."""
    path = folder / entry.file
    found = file_checksum(path)
    if found != entry.checksum:
        raise CorruptState(f"not what was saved: checksum {found} instead of {entry.checksum}: {here(path)}")
