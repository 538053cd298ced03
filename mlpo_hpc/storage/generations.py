"""Generations: the files that hold the state of a tier, one after the other.

What is written goes to the last one. Those before are read until nothing in them is wanted any more; a checkpoint
may have given them a name by then. Slots are numbered through all of them.
"""

from __future__ import annotations

from mlpo_hpc.storage.base import Container, FileContainer


class Generations(Container):
    """A container that can be followed by another of the same layout.

    Parameters
    ----------
    first : FileContainer
        Owned, as those that follow it.
    """

    def __init__(self, first: FileContainer) -> None:
        super().__init__(first.path, first.slot_bytes, first.num_slots)
        self._members = {0: first}
        self.last = 0
        """Number of the one that is written to."""

    def __str__(self) -> str:
        return str(self.member(self.last))

    def member(self, generation: int) -> FileContainer:
        """One of them."""
        return self._members[generation]

    def generation(self, slot: int) -> int:
        """Which one a slot is in."""
        return slot // self.num_slots

    def succeed(self, following: FileContainer) -> None:
        """Write to another one from now on.

        Raises
        ------
        ValueError
            If its slots are others.
        """
        if (following.slot_bytes, following.num_slots) != (self.slot_bytes, self.num_slots):
            raise ValueError(f"{following} has other slots than {self}")
        self.last += 1
        self._members[self.last] = following

    def drop(self, generation: int) -> None:
        """Close one that is not wanted any more."""
        self._members.pop(generation).close()

    def place(self, slot: int) -> int:
        """Byte of its file at which a slot begins."""
        return self._members[slot // self.num_slots].place(slot % self.num_slots)

    @property
    def is_direct(self) -> bool:
        """Whether the page cache is left out."""
        return self.member(self.last).is_direct

    def facts(self) -> dict[str, str]:
        """What they are, for the report."""
        return self.member(self.last).facts()

    def where(self, slot: int) -> str:
        """A slot's place in its file."""
        return self._members[slot // self.num_slots].where(slot % self.num_slots)

    def read(self, slot: int, view: memoryview) -> None:
        """As of any container."""
        self._members[slot // self.num_slots].read(slot % self.num_slots, view)

    def write(self, slot: int, view: memoryview) -> None:
        """As of any container."""
        self._members[slot // self.num_slots].write(slot % self.num_slots, view)

    def _read(self, offset: int, view: memoryview) -> None:
        raise NotImplementedError  # each member has its own offsets

    def _write(self, offset: int, view: memoryview) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Close all."""
        for member in self._members.values():
            member.close()
