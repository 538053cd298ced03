"""The folder of a checkpoint: names in it, files that last, the commit, and which checkpoints there are."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mlpo_hpc.checkpoint.manifest import FORMAT, LATEST, MANIFEST, VERSION, Entry, FileEntry, Manifest, Shard
from mlpo_hpc.errors import ConfigError, CorruptState, MlpoError, here, storage_error

MAX_MANIFEST_BYTES = 2**30
BLOCK_BYTES = 2**22
CHECKSUM = re.compile(rb'\{"checksum": "([0-9a-f]{16})", ')
"""How a manifest begins; the checksum is of all bytes that follow."""
OURS = re.compile(
    r"(state|tensors|shard|failed|sealed\d+)-\d{5,}-[0-9a-f]{8}\.(bin|safetensors|json|h5)(\.partial)?|manifest\.json\.partial"
)


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


def encode(entry: Entry) -> bytes:
    """An entry as a file."""
    return json.dumps(entry.model_dump(mode="json"), allow_nan=True).encode()


def encode_manifest(manifest: Manifest) -> bytes:
    """A manifest as a file. Its first key is a checksum of what follows, for no other file can have it."""
    import xxhash

    body = encode(manifest)[1:]
    return f'{{"checksum": "{xxhash.xxh3_64_hexdigest(body)}", '.encode() + body


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a committed checkpoint.

    Raises
    ------
    CorruptState
        If there is none that can be understood.
    ConfigError
        If a newer version of this library wrote it.
    """
    path = folder / MANIFEST
    data = read_whole(path)
    whole = _is_whole(data)
    try:
        values = json.loads(data)
        if isinstance(values, dict) and whole is not False and values.get("format") == FORMAT:
            _check_version(values.get("version"), path)
        if not whole:
            raise ValueError("its checksum is missing or another one")
        del values["checksum"]
        return Manifest.model_validate(values)
    except ConfigError:
        raise
    except ValueError as error:  # those of JSON and of pydantic are such
        raise CorruptState(f"the manifest is damaged ({_first_line(error)}): {here(path)}") from error


def _is_whole(data: bytes) -> bool | None:
    """Whether a manifest has the checksum that it names; None if it names none."""
    import xxhash

    head = CHECKSUM.match(data)
    return None if head is None else xxhash.xxh3_64_hexdigest(data[head.end() :]).encode() == head[1]


def _check_version(found: Any, path: Path) -> None:
    if found != VERSION:
        raise ConfigError(
            f"version {found} of the checkpoint format, this library knows {VERSION}: install a newer mlpo_hpc, on "
            f"{here(path)}"
        )


def read_shard(folder: Path, manifest: Manifest, rank: int) -> Shard:
    """The shard of a rank.

    Raises
    ------
    CorruptState
        If it is not what the manifest says.
    """
    entry = manifest.shards[rank]
    data = checked(folder, entry)
    try:
        shard = Shard.model_validate_json(data)
    except ValidationError as error:
        raise CorruptState(f"a shard is damaged ({_first_line(error)}): {here(folder / entry.file)}") from error
    if shard.rank != rank:
        raise CorruptState(f"the shard of rank {shard.rank} instead of {rank}: {here(folder / entry.file)}")
    return shard


def checked(folder: Path, entry: FileEntry) -> bytes:
    """A small file, whose size and checksum are those that were noted.

    Raises
    ------
    CorruptState
        If they are not.
    """
    import xxhash

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
    import xxhash

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
    if _awaited_latest(folder.parent) is not None:  # or it would be forgotten when this save replaces or removes it
        put_in_place(latest)
    partial(latest).unlink(missing_ok=True)
    for each in {folder, folder.parent / (named_latest(folder.parent) or folder.name)}:
        with suppress(CorruptState, ConfigError):  # what is damaged is replaced as a whole by the commit
            remove_unused(each, read_manifest(each) if is_ours(each) else None)


def prepare(folder: Path, manifest: Manifest, save_latest: bool) -> None:
    """Do all of a commit that may fail without harm; shards that the manifest names are on the device.

    ``latest.partial`` names the checkpoint from its commit on until ``latest`` does: see `_awaited_latest`.
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


def is_ours(folder: Path) -> bool:
    """Whether a folder holds a committed checkpoint of this format."""
    return os.path.lexists(folder / MANIFEST)  # what is not a file, or a link, is told by `read_manifest`


def is_unfinished(folder: Path) -> bool:
    """Whether a folder holds what a save wrote that was broken off, or goes on."""
    return folder.is_dir() and not is_ours(folder) and any(OURS.fullmatch(path.name) for path in folder.iterdir())


def is_deepspeeds(folder: Path) -> bool:
    """Whether a folder holds a checkpoint that DeepSpeed itself wrote."""
    return any(folder.glob("*_model_states.pt"))


@contextmanager
def offering(directory: Path, words: str, but: str | None = None) -> Iterator[None]:
    """Let an error that says what is wrong with a checkpoint name those that are there, but for one."""
    try:
        yield
    except MlpoError as error:
        found = ", ".join(name for name, _ in committed(directory) if name != but)
        error.args = (f"{error}\n{words}: {found or 'none'}",)
        raise


def committed(directory: Path) -> Iterator[tuple[str, Manifest]]:
    """Checkpoints in a directory that can be understood, the newest first."""
    found = []
    for folder in directory.iterdir() if directory.is_dir() else ():
        if is_ours(folder):
            try:
                found.append((folder.name, read_manifest(folder)))
            except (CorruptState, ConfigError):
                continue  # `read_manifest` of the one that is asked for says what is wrong with it
    yield from sorted(found, key=lambda each: _age(each[1]), reverse=True)


def _age(manifest: Manifest) -> tuple[int, int, str]:
    """Steps that were applied, steps with those that were skipped, and when."""
    return manifest.step, manifest.training.get("global_steps", 0), manifest.created


def find_tag(directory: Path, tag: str | None) -> str | None:
    """The checkpoint to load: what was asked for, else what ``latest`` names, else the newest one.

    ``latest`` is only a hint: it may be torn, or name what was never committed.
    """
    if tag is not None:
        return tag
    named = _awaited_latest(directory) or named_latest(directory)
    if named is not None and (is_ours(directory / named) or is_deepspeeds(directory / named)):
        return named
    return next((name for name, _ in committed(directory)), named)


def named_latest(directory: Path) -> str | None:
    """The folder that the file ``latest`` names, if there is one of that name."""
    return _named_in(directory, directory / LATEST)


def _awaited_latest(directory: Path) -> str | None:
    """The checkpoint that was committed, but a kill came before ``latest`` could name it.

    Not if ``latest`` was changed since: that was somebody who knows better.
    """
    hint, latest = partial(directory / LATEST), directory / LATEST
    named = _named_in(directory, hint)
    if named is None or not is_ours(directory / named) or partial(directory / named / MANIFEST).exists():
        return None
    changed_since = latest.exists() and latest.stat().st_mtime_ns > hint.stat().st_mtime_ns
    return None if changed_since else named


def _named_in(directory: Path, hint: Path) -> str | None:
    if not hint.is_file():
        return None
    named = hint.read_bytes()[:4096].decode(errors="replace").strip()
    return next((path.name for path in directory.iterdir() if path.name == named), None)  # never a way out of it


def _first_line(error: Exception) -> str:
    return " ".join(str(error).splitlines()[:3])
