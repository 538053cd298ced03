"""Manifests and shards as files: JSON that says of itself whether it is whole."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import xxhash
from pydantic import ValidationError

from mlpo_hpc.checkpoint.files import checked, read_whole
from mlpo_hpc.checkpoint.manifest import FORMAT, MANIFEST, VERSION, Entry, Manifest, Shard
from mlpo_hpc.errors import ConfigError, CorruptState, here

CHECKSUM = re.compile(rb'\{"checksum": "([0-9a-f]{16})", ')
"""How a manifest begins; the checksum is of all bytes that follow."""


def encode(entry: Entry) -> bytes:
    """An entry as a file."""
    return json.dumps(entry.model_dump(mode="json"), allow_nan=True).encode()


def encode_manifest(manifest: Manifest) -> bytes:
    """A manifest as a file. Its first key is a checksum of what follows, for no other file can have it."""

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


def _first_line(error: Exception) -> str:
    return " ".join(str(error).splitlines()[:3])
