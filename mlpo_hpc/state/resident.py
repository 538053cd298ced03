"""A subgroup in host memory, and what is going on with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from mlpo_hpc.state.cache import Buffer
from mlpo_hpc.state.table import Chunk


class Phase(Enum):
    """What is going on with a resident subgroup."""

    READING = "reading"
    HOST = "host"
    IN_USE = "in use"
    WRITING = "writing"


@dataclass
class Resident:
    """A subgroup in host memory."""

    buffer: Buffer
    phase: Phase
    dirty: bool = False
    """Newer than its copy on the tiers."""
    pending: int = 0
    """Chunks still to be moved."""
    wanted: bool = False
    """Stays in host memory when its write is done."""
    was_read: bool = False
    """Came from the tiers since it was last asked for: a cache miss."""
    written: dict[int, Chunk] = field(default_factory=dict)
    """New chunks by position, until all are there to be committed."""
