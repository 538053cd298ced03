"""A checkpoint to a universal checkpoint of DeepSpeed, which stock ZeRO-3 loads on any number of ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mlpo_hpc.checkpoint import torch_file
from mlpo_hpc.checkpoint.files import check_file, sync_folder, write_whole
from mlpo_hpc.checkpoint.read import Reader
from mlpo_hpc.checkpoint.target import Told, share, whole
from mlpo_hpc.checkpoint.universal import Universal
from mlpo_hpc.cluster.crowd import Ranks, each
from mlpo_hpc.errors import storage_error

LATEST = "latest_universal"
"""Beside the folder: its name, by which DeepSpeed finds it when no tag is given."""
STATE = "zero"


def export_universal(reader: Reader, target: Path, ranks: Ranks, told: Told) -> int:
    """Collective over `ranks`. Write a folder of files, each of them by one rank; see `universal`.

    Parameters
    ----------
    reader : Reader
        Of the checkpoint.
    target : Path
        The folder, which does not exist. ``latest_universal`` beside it will name it.
    ranks : Ranks
        That share the work.
    told : callable
        Hears how far this rank is.

    Returns
    -------
    int
        Bytes of all tensors.

    Raises
    ------
    ConfigError
        If the target exists, or the state is not of Adam.
    StorageError
        If something cannot be read or written, or is not what was saved. Nothing is left then.
    """
    each(ranks, lambda: _check_small(reader, ranks))
    files = each(ranks, lambda: Universal(reader).files())
    sizes = [_nbytes(value) for value in files.values()]
    with whole(target, ranks) as folder:
        mine = [list(files.items())[number] for number in share(sizes, ranks)]
        each(ranks, lambda: _write_all(folder, mine, told))
        each(ranks, lambda: _finish(folder, target) if ranks.rank == 0 else None)
    each(ranks, lambda: _name_latest(target) if ranks.rank == 0 else None)
    return sum(sizes)


def _check_small(reader: Reader, ranks: Ranks) -> None:
    """Compare the files of frozen parameters and buffers with their checksums, those of every so many shards."""
    for shard in reader.shards[ranks.rank :: ranks.size]:
        check_file(reader.folder, shard.tensors)


def _nbytes(value: Any) -> int:
    return sum(tensor.nbytes for tensor in torch_file.tensors_in(value))


def _write_all(folder: Path, files: list[tuple[str, Any]], told: Told) -> None:
    all_bytes = sum(_nbytes(value) for _, value in files)
    told(0, all_bytes)
    for name, value in files:
        path = folder / name
        _make(path.parent)
        torch_file.write(path, value, lambda done: told(done, all_bytes))
        sync_folder(path.parent)


def _make(folder: Path) -> None:
    """Each folder for this user alone; another rank may make it at the same time."""
    try:
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise storage_error("making a folder of the export", str(folder), error) from error


def _finish(folder: Path, target: Path) -> None:
    sync_folder(folder / STATE)
    write_whole(folder / LATEST, target.name.encode())  # what needs room is written while all can be undone


def _name_latest(target: Path) -> None:
    path = target.parent / LATEST
    try:
        os.rename(target / LATEST, path)
    except OSError as error:
        raise storage_error("naming the export", str(path), error) from error
    sync_folder(target.parent)
