"""The folder of a checkpoint: made, prepared, committed; and what attempts left in it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from mlpo_hpc.checkpoint.documents import encode_manifest, read_manifest
from mlpo_hpc.checkpoint.files import partial, put_in_place, sync_folder, write_whole
from mlpo_hpc.checkpoint.find import OURS, awaited_latest, is_ours, named_latest
from mlpo_hpc.checkpoint.manifest import LATEST, MANIFEST, Manifest
from mlpo_hpc.errors import ConfigError, CorruptState, storage_error


def make(folder: Path) -> None:
    """Make the folder of a checkpoint, and those above it, if they are missing; first finish what kills cut short.

    Raises
    ------
    StorageError
        If they cannot be made.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise storage_error("making the folder of the checkpoint", str(folder), error) from error
    latest = folder.parent / LATEST
    if awaited_latest(folder.parent) is not None:  # or it would be forgotten when this save replaces or removes it
        put_in_place(latest)
    partial(latest).unlink(missing_ok=True)
    for each in {folder, folder.parent / (named_latest(folder.parent) or folder.name)}:
        with suppress(CorruptState, ConfigError):  # what is damaged is replaced as a whole by the commit
            remove_unused(each, read_manifest(each) if is_ours(each) else None)


def prepare(folder: Path, manifest: Manifest, save_latest: bool) -> None:
    """Do all of a commit that may fail without harm; shards that the manifest names are on the device.

    ``latest.partial`` names the checkpoint from its commit on until ``latest`` does: see `awaited_latest`.
    """
    latest = folder.parent / LATEST
    write_whole(partial(folder / MANIFEST), encode_manifest(manifest))
    if save_latest:
        write_whole(partial(latest), manifest.tag.encode())
    else:
        partial(latest).unlink(missing_ok=True)
    sync_folder(folder)
    sync_folder(folder.parent)


def abandon(folder: Path) -> None:
    """Take back what `prepare` did. The manifest goes last: while it is there ``latest.partial`` names nothing."""
    partial(folder.parent / LATEST).unlink(missing_ok=True)
    partial(folder / MANIFEST).unlink(missing_ok=True)


def commit(folder: Path, manifest: Manifest, save_latest: bool) -> None:
    """Make a checkpoint exist that is prepared. If this fails it may exist: nothing of it must be removed then."""
    put_in_place(folder / MANIFEST)
    if save_latest:
        put_in_place(folder.parent / LATEST)
    remove_unused(folder, manifest)


def remove_unused(folder: Path, manifest: Manifest | None) -> None:
    """Take away what attempts that came to nothing, or a checkpoint of the same name, left in a folder.

    Parameters
    ----------
    folder : Path
        Of a checkpoint.
    manifest : Manifest, optional
        The files of its attempt stay; None: nothing is committed there.
    """
    attempts = {_attempt(shard.file) for shard in manifest.shards} if manifest is not None else set()
    for path in folder.iterdir():
        if OURS.fullmatch(path.name) and _attempt(path.name) not in attempts:
            path.unlink(missing_ok=True)


def _attempt(name: str) -> str:
    """What the names of all files of one attempt to save have in common."""
    return name.rpartition("-")[2].partition(".")[0]
