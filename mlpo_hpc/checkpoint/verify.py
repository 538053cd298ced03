"""Read every byte of a checkpoint and compare checksums; find the newest one that is sound."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import xxhash

from mlpo_hpc.checkpoint.files import BLOCK_BYTES, open_file
from mlpo_hpc.checkpoint.find import committed, find_tag, is_deepspeeds, is_ours, is_unfinished
from mlpo_hpc.checkpoint.structure import Extent, Fault, Outline, outline
from mlpo_hpc.checkpoint.target import Told
from mlpo_hpc.errors import ConfigError, StorageError, here, storage_error

NUM_THREADS = 4


def locate(path: Path) -> Path:
    """The folder of a checkpoint: the one that is given, else the one in it that would be loaded.

    Raises
    ------
    ConfigError
        If there is none of our format.
    """
    if is_ours(path) or is_unfinished(path):
        return path
    tag = find_tag(path, None) if path.is_dir() else None
    if is_deepspeeds(path) or (tag is not None and is_deepspeeds(path / tag) and not is_ours(path / tag)):
        raise ConfigError(f"a checkpoint in DeepSpeed's own format, which DeepSpeed reads: {here(path)}")
    if tag is None or not is_ours(path / tag):
        raise ConfigError(f"no checkpoint of mlpo_hpc: {here(path)}. Give the directory that was saved to, or DIR/TAG")
    return path / tag


def verify(folder: Path, told: Told, num_threads: int = NUM_THREADS) -> Outline:
    """Look at all of a checkpoint.

    Parameters
    ----------
    folder : Path
        ``DIR/TAG``.
    told : callable
        Hears how far it is.
    num_threads : int
        That read at once.

    Returns
    -------
    Outline
        Its `faults` are empty if the checkpoint is sound.
    """
    found = outline(folder)
    told(0, found.nbytes)
    with ThreadPoolExecutor(num_threads) as pool:
        for name, extents in found.extents.items():
            found.faults += _file_faults(folder / name, extents, lambda done: told(done, found.nbytes), pool)
    return found


def newest_sound(directory: Path, damaged: Outline, told: Told) -> str | None:
    """The newest checkpoint older than a damaged one in which nothing is wrong; None if there is none."""
    for tag, manifest in committed(directory):
        older = damaged.manifest is None or manifest.step <= damaged.manifest.step
        if directory / tag != damaged.folder and older and not verify(directory / tag, told).faults:
            return tag
    return None


def _file_faults(
    path: Path, extents: Sequence[Extent], told: Callable[[int], None], pool: ThreadPoolExecutor
) -> list[Fault]:
    try:
        fd = open_file(path)
    except StorageError as error:  # it was there a moment ago
        return [Fault(path.name, str(error))]
    try:
        faults = []
        for extent, fault in zip(extents, pool.map(partial(_fault, fd, path), extents), strict=True):
            told(extent.chunk.nbytes)
            faults += [fault] if fault else []
        return faults
    finally:
        os.close(fd)


def _fault(fd: int, path: Path, extent: Extent) -> Fault | None:
    chunk = extent.chunk
    where = f"bytes {chunk.offset} to {chunk.offset + chunk.nbytes} of {here(path)}"
    try:
        found = _checksum(fd, path, chunk.offset, chunk.nbytes)
    except StorageError as error:
        return Fault(path.name, f"{error} ({where})", extent.parameters)
    if found == chunk.checksum:
        return None
    return Fault(
        path.name, f"not what was saved: checksum {found} instead of {chunk.checksum}: {where}", extent.parameters
    )


def _checksum(fd: int, path: Path, offset: int, nbytes: int) -> str:
    digest, end = xxhash.xxh3_64(), offset + nbytes
    while offset < end:
        try:
            data = os.pread(fd, min(BLOCK_BYTES, end - offset), offset)
        except OSError as error:
            raise storage_error("reading the checkpoint", str(path), error) from error
        if not data:
            break  # cut off meanwhile: it is another checksum then
        digest.update(data)
        offset += len(data)
    return str(digest.hexdigest())
