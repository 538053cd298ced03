"""Which checkpoints stay: the newest ones, every so many steps one for good, and never less than the last committed."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from mlpo_hpc.checkpoint.files import sync_folder
from mlpo_hpc.checkpoint.find import OURS, committed, named_latest
from mlpo_hpc.checkpoint.manifest import MANIFEST
from mlpo_hpc.errors import storage_error
from mlpo_hpc.telemetry.log import say, warn


def rotate(directory: Path, keep_last: int | None, keep_every: int | None) -> list[str]:
    """Remove checkpoints of ours that are not to stay.

    Parameters
    ----------
    directory : Path
        Where they are.
    keep_last : int or None
        How many of those saved last stay; None: all do.
    keep_every : int or None
        Those of steps that this divides stay too.

    Returns
    -------
    list of str
        The tags of those that were removed.

    Raises
    ------
    StorageError
        If one cannot be removed; it is not a checkpoint any more then.
    """
    if keep_last is None:
        return []
    by_age = sorted(committed(directory), key=lambda each: (each[1].created, each[1].step), reverse=True)
    named = named_latest(directory)
    removed = [
        tag
        for tag, manifest in by_age[max(1, keep_last) :]
        if tag != named and not (keep_every and manifest.step % keep_every == 0)
    ]
    for tag in removed:
        remove(directory / tag)
        say("checkpoint %s removed: there are %d newer ones", directory / tag, max(1, keep_last))
    return removed


def remove(folder: Path) -> None:
    """Remove a checkpoint: first it ceases to exist, then its files go, and its folder if there is nothing else.

    Raises
    ------
    StorageError
        If it cannot be.
    """
    try:
        (folder / MANIFEST).unlink()
        sync_folder(folder)
        for path in folder.iterdir():
            if OURS.fullmatch(path.name):
                path.unlink(missing_ok=True)
        with suppress(OSError):  # something of somebody else's is in it
            folder.rmdir()
    except OSError as error:
        raise storage_error("removing a checkpoint", str(folder), error) from error


def make_room(directory: Path, needed_bytes: int, keep_last: int | None, keep_every: int | None) -> None:
    """Before a checkpoint is saved: if there is no room for it, the ones that it will replace go first."""
    if _free_bytes(directory) < needed_bytes and keep_last is not None:
        rotate(directory, max(1, keep_last - 1), keep_every)
    free_bytes = _free_bytes(directory)
    if free_bytes < needed_bytes:
        warn(
            "a checkpoint takes up to %.1f GB and %s has %.1f GB left: free space, or set 'checkpoint.keep_last'",
            needed_bytes / 1e9,
            directory,
            free_bytes / 1e9,
        )


def _free_bytes(directory: Path) -> int:
    space = os.statvfs(directory)
    return space.f_bavail * space.f_frsize
