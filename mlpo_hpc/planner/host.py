"""A simulated rank's host memory: which chunks of which subgroups are in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


@dataclass
class Held:
    """The chunks of one subgroup that are in memory, by number."""

    present: set[int] = field(default_factory=set)
    coming: set[int] = field(default_factory=set)
    """Being read; their memory is taken."""
    newer: set[int] = field(default_factory=set)
    """Present, and not yet on a tier as they are or will be."""
    writing: set[int] = field(default_factory=set)
    """Those of them whose write was asked for."""
    in_use: bool = False

    @property
    def spare(self) -> set[int]:
        """Chunks whose memory can be had."""
        return self.present - self.newer


class Host:
    """Counts memory in chunks, all of one size.

    Parameters
    ----------
    chunks : int
        Of a subgroup.
    room : int
        Chunks that memory holds.
    next_use : callable
        Turns until a subgroup is needed.
    """

    def __init__(self, chunks: int, room: int, next_use: Callable[[int], int]) -> None:
        self.room = room
        self._chunks = chunks
        self._next_use = next_use
        self._held: dict[int, Held] = {}
        self._used = 0

    @property
    def num_present(self) -> int:
        """Chunks in memory, of all subgroups."""
        return sum(len(held.present) for held in self._held.values())

    def has(self, subgroup: int) -> bool:
        """Whether all of it is in memory and none of it is on its way to a tier."""
        held = self._held.get(subgroup)
        return held is not None and len(held.present) == self._chunks and not held.writing

    def can_read(self, subgroup: int) -> bool:
        """Whether chunks of it may be read: it is not being updated, and what its update left is on the tiers."""
        held = self._held.get(subgroup, Held())
        return not held.in_use and not (held.writing and self.missing(subgroup))

    def missing(self, subgroup: int) -> list[int]:
        """Chunks that are on the tiers only."""
        held = self._held.get(subgroup, Held())
        return [chunk for chunk in range(self._chunks) if chunk not in held.present and chunk not in held.coming]

    def take(self, subgroup: int, chunk: int) -> bool:
        """Memory for a chunk that is read, if need be that of the one that is used last; False: there is none now."""
        if self._used == self.room:
            use = self._next_use(subgroup)
            later = [other for other, held in self._held.items() if held.spare and self._next_use(other) > use]
            if not later:
                return False
            last = max(later, key=self._next_use)
            self.drop(last, max(self._held[last].spare))
        self._used += 1
        self._held.setdefault(subgroup, Held()).coming.add(chunk)
        return True

    def arrive(self, subgroup: int, chunk: int) -> None:
        """A chunk was read."""
        self._held[subgroup].coming.remove(chunk)
        self._held[subgroup].present.add(chunk)

    def use(self, subgroup: int) -> None:
        """Its update begins: all of it will be newer than what the tiers have."""
        held = self._held[subgroup]
        held.in_use = True
        held.newer = set(held.present)

    def write(self, subgroup: int, chunks: Iterable[int]) -> None:
        """Chunks of it that will not change any more are on their way to the tiers."""
        self._held[subgroup].writing.update(chunks)

    def put(self, subgroup: int) -> None:
        """It was updated."""
        self._held[subgroup].in_use = False

    def settle(self, subgroup: int, chunk: int) -> None:
        """A chunk was written."""
        self._held[subgroup].newer.remove(chunk)
        self._held[subgroup].writing.remove(chunk)

    def drop(self, subgroup: int, chunk: int) -> None:
        """A chunk leaves memory."""
        held = self._held[subgroup]
        held.present.remove(chunk)
        self._used -= 1
        if not (held.present or held.coming):
            del self._held[subgroup]
