"""A subgroup of which at least a part is in host memory, and what is going on with it."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from mlpo_hpc.state.cache import Buffer
from mlpo_hpc.state.table import Chunk


class Phase(Enum):
    """What is going on with a resident subgroup."""

    READING = "reading"
    """A part of it is missing."""
    HOST = "host"
    IN_USE = "in use"
    WRITING = "writing"


@dataclass
class Resident:
    """A subgroup in host memory, chunk by chunk."""

    buffer: Buffer
    absent: list[int]
    """Chunks that are neither in memory nor on their way, ascending."""
    present: set[int] = field(default_factory=set)
    """Chunks that are in memory."""
    reading: int = 0
    """Chunks on their way into memory."""
    unwritten: int = 0
    """Chunks whose write was asked for and is not done."""
    asked: set[int] = field(default_factory=set)
    """Chunks whose write was asked for since the last commit."""
    written: dict[int, Chunk] = field(default_factory=dict)
    """New chunks by position, until all are there to be committed."""
    in_use: bool = False
    dirty: bool = False
    """Newer than its copy on the tiers."""
    was_read: bool = False
    """Came from the tiers since it was last asked for, or a part of it did: a cache miss."""

    @property
    def phase(self) -> Phase:
        """In one word."""
        if self.in_use:
            return Phase.IN_USE
        if self.unwritten:
            return Phase.WRITING
        return Phase.READING if self.reading or self.absent else Phase.HOST

    @property
    def in_flight(self) -> bool:
        """Whether anything of it is being moved."""
        return bool(self.reading or self.unwritten)

    def spare(self) -> Sequence[int]:
        """Chunks whose memory can be had: the tiers have them too, and nobody uses them."""
        held = self.in_use or self.dirty
        return [i for i in self.present if i in self.written] if held else list(self.present)

    def drop(self, index: int) -> None:
        """A chunk leaves memory."""
        self.present.remove(index)
        bisect.insort(self.absent, index)
