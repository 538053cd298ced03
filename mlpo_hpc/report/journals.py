"""Read the journals of all ranks: every start of the run with its steps, whatever a kill left of them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlpo_hpc.errors import MlpoError
from mlpo_hpc.telemetry.journal import PREFIX, SUFFIX

NEEDED = {"began_s", "world_rank", "world_size", "host", "tiers"}
"""Without these a start says nothing."""


@dataclass
class Part:
    """What one rank wrote between a start and the next one."""

    start: dict[str, Any]
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    losses: dict[int, tuple[float, int | None]] = field(default_factory=dict)
    """Loss (NaN where it was no finite number) and text tokens."""


@dataclass
class Journals:
    """All that was found."""

    parts: list[Part] = field(default_factory=list)
    num_torn: int = 0
    """Lines that a kill cut short, or that are damaged."""


def find_journals(run: str | os.PathLike[str]) -> list[Path]:
    """The journals of a run: a folder's, or the file itself.

    Raises
    ------
    MlpoError
        If there is none.
    """
    path = Path(run)
    if path.is_file():
        return [path]
    found = sorted(
        file for file in path.glob(f"{PREFIX}*{SUFFIX}") if file.name[len(PREFIX) : -len(SUFFIX)].isdecimal()
    )
    if not found:
        raise MlpoError(
            f"{path} holds no journals (steps-<rank>.jsonl). A run writes them with "
            '"telemetry": {"dir": "..."} in its section "mlp_offload": give that folder'
        )
    return found


def read_journals(paths: Iterable[Path]) -> Journals:
    """Read journals; those of one rank may be continued by several starts of the run.

    Raises
    ------
    MlpoError
        If one cannot be read.
    """
    found = Journals()
    for path in paths:
        try:
            with open(path, "rb") as file:
                _read(file, found)
        except OSError as error:
            raise MlpoError(f"cannot read the journal {path}: {error.strerror}") from error
    return found


def _read(lines: Iterable[bytes], found: Journals) -> None:
    """Add what a file holds; steps before any start belong to nothing."""
    part: Part | None = None
    for text in lines:
        line = _parse(text)
        try:
            if line is None:
                raise ValueError
            if "start" in line:
                part = _part(line["start"])
                found.parts.append(part)
            elif part is None:
                raise ValueError
            else:
                _take(part, line)
        except (KeyError, TypeError, ValueError):
            found.num_torn += bool(text.strip())


def _parse(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def _part(start: dict[str, Any]) -> Part:
    if NEEDED - start.keys():
        raise ValueError
    return Part(start)


def _take(part: Part, line: dict[str, Any]) -> None:
    number = int(line["step"])
    if "loss" in line:
        loss = line["loss"]
        part.losses[number] = (math.nan if loss is None else float(loss), line.get("text_tokens"))
    else:
        line["tiers"].items()
        part.steps[number] = line
