"""Which checkpoints a directory has, and which of them is meant."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlpo_hpc.checkpoint.documents import read_manifest
from mlpo_hpc.checkpoint.files import partial
from mlpo_hpc.checkpoint.manifest import LATEST, MANIFEST, Manifest
from mlpo_hpc.errors import ConfigError, CorruptState, MlpoError

OURS = re.compile(
    r"(state|tensors|shard|failed|sealed\d+)-\d{5,}-[0-9a-f]{8}\.(bin|safetensors|json|h5)(\.partial)?|manifest\.json\.partial"
)
"""Names of files in the folder of a checkpoint, but for that of its manifest."""


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
    named = awaited_latest(directory) or named_latest(directory)
    if named is not None and (is_ours(directory / named) or is_deepspeeds(directory / named)):
        return named
    return next((name for name, _ in committed(directory)), named)


def named_latest(directory: Path) -> str | None:
    """The folder that the file ``latest`` names, if there is one of that name."""
    return _named_in(directory, directory / LATEST)


def awaited_latest(directory: Path) -> str | None:
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
