"""Which checkpoints a directory has, and what is wrong with those that do not count."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlpo_hpc.checkpoint.find import find_tag, is_deepspeeds, is_ours, is_unfinished, named_latest
from mlpo_hpc.checkpoint.manifest import LATEST
from mlpo_hpc.checkpoint.structure import outline
from mlpo_hpc.errors import ConfigError, here, storage_error

State = Literal["committed", "damaged", "unfinished", "deepspeed"]


@dataclass(frozen=True)
class Listed:
    """One folder of a directory of checkpoints.

    Parameters
    ----------
    tag : str
        Name of the folder.
    state : str
        ``committed``: nothing is wrong, as far as can be seen without reading the state itself; ``damaged``;
        ``unfinished``: files without a manifest; ``deepspeed``: of DeepSpeed's own format.
    step, num_ranks, num_parameters : int, optional
        Steps done, ranks that saved it, items of trained parameters.
    nbytes : int
        Size of its files.
    created : str, optional
        When, ISO 8601.
    why : str
        What is wrong.
    """

    tag: str
    state: State
    nbytes: int
    step: int | None = None
    created: str | None = None
    num_ranks: int | None = None
    num_parameters: int | None = None
    why: str = ""


@dataclass(frozen=True)
class Listing:
    """What is in a directory, the newest checkpoint first; what has no step comes last."""

    checkpoints: list[Listed]
    latest: str | None
    """The one that would be loaded."""
    warning: str
    """What is wrong with the file ``latest``."""


def list_checkpoints(directory: Path) -> Listing:
    """Look at all folders of a directory.

    Raises
    ------
    ConfigError
        If it is no directory.
    StorageError
        If it cannot be read.
    """
    if not directory.is_dir():
        raise ConfigError(f"no directory: {here(directory)}")
    try:
        folders = sorted(path for path in directory.iterdir() if path.is_dir())
        found = [listed for folder in folders if (listed := _look(folder)) is not None]
    except OSError as error:
        raise storage_error("listing checkpoints", str(directory), error) from error
    found.sort(key=lambda each: (each.step is not None, each.step or 0, each.created or ""), reverse=True)
    loaded = find_tag(directory, None)
    usable = {each.tag for each in found if each.state != "unfinished"}
    return Listing(found, loaded if loaded in usable else None, _warning(directory, usable))


def _look(folder: Path) -> Listed | None:
    if is_ours(folder):
        found = outline(folder)
        manifest, why = found.manifest, "; ".join(fault.text for fault in found.faults[:1])
        if len(found.faults) > 1:
            why += f" (and {len(found.faults) - 1} more faults)"
        if manifest is None:
            return Listed(folder.name, "damaged", _size(folder), why=why)
        return Listed(
            folder.name,
            "damaged" if why else "committed",
            _size(folder),
            manifest.step,
            manifest.created,
            manifest.world_size,
            found.num_items,
            why,
        )
    if is_deepspeeds(folder):
        return Listed(folder.name, "deepspeed", _size(folder))
    if is_unfinished(folder):
        return Listed(folder.name, "unfinished", _size(folder), why="saving it was broken off, or goes on")
    return None


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.iterdir())


def _warning(directory: Path, usable: set[str]) -> str:
    """The file is a hint only: what is wrong with it keeps nobody from loading."""
    if not (directory / LATEST).is_file():
        return ""
    named = named_latest(directory)
    return "" if named in usable else f"the file does not name a checkpoint: {here(directory / LATEST)}"
