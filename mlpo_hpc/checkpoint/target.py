"""What is exported appears whole or not at all, and ranks share the work."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mlpo_hpc.checkpoint.files import sync_folder
from mlpo_hpc.cluster.crowd import Ranks, each
from mlpo_hpc.errors import ConfigError, here, storage_error

Told = Callable[[int, int], None]
"""``(done_bytes, all_bytes)``: that many more are done, of that many in all."""


@contextmanager
def whole(target: Path, ranks: Ranks, content: str = "") -> Iterator[Path]:
    """Collective over `ranks`. A folder of this user's alone, which gets another name when it is whole.

    Parameters
    ----------
    target : Path
        That name; all ranks see the folder above it.
    ranks : Ranks
        That fill the folder together.
    content : str
        A file in the folder, if that alone is to be the target.

    Yields
    ------
    Path
        The folder. Whatever is in it is gone after an error.

    Raises
    ------
    ConfigError
        If the target exists, or another export to it was killed or goes on.
    StorageError
        If the folder cannot be made or named.
    """
    folder = target.with_name(f"{target.name}.partial")
    first = ranks.rank == 0
    each(ranks, lambda: _make(folder, target) if first else None)
    try:
        yield folder
        each(ranks, lambda: _name(folder, content, target) if first else None)
    finally:
        if first and folder.exists():
            shutil.rmtree(folder)


def _make(folder: Path, target: Path) -> None:
    _refuse_existing(target)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError as error:
        raise ConfigError(
            f"another export to {target.name} goes on, or was killed: remove the folder then, {here(folder)}"
        ) from error
    except OSError as error:
        raise storage_error("making the folder of the export", str(folder), error) from error


def _refuse_existing(target: Path) -> None:
    if os.path.lexists(target):
        raise ConfigError(f"it exists, and is left as it is: give another name than {here(target)}")


def _name(folder: Path, content: str, target: Path) -> None:
    _refuse_existing(target)  # it may have appeared meanwhile
    sync_folder(folder)
    try:
        os.rename(folder / content, target)
    except OSError as error:
        raise storage_error("naming the export", str(target), error) from error
    sync_folder(target.parent)


def share(sizes: Sequence[int], ranks: Ranks) -> list[int]:
    """Which of some pieces of work this rank does: neighbours, about as many bytes as others do.

    Neighbours, for what lies side by side in the checkpoint is read and checked once then.
    """
    total, before, mine = max(1, sum(sizes)), 0, []
    for number, size in enumerate(sizes):
        if min(ranks.size - 1, (2 * before + size) * ranks.size // (2 * total)) == ranks.rank:
            mine.append(number)
        before += size
    return mine
