"""Slots: fixed-size, aligned extents in a container."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod

ALIGNMENT_BYTES = 4096
"""Offsets and lengths are multiples of this: enough for O_DIRECT on 512e and 4Kn devices."""


def round_up(size_bytes: int, unit_bytes: int = ALIGNMENT_BYTES) -> int:
    """Smallest multiple of the unit that holds the size."""
    return -(-size_bytes // unit_bytes) * unit_bytes


class Slots:
    """Which slots of a container are free; the lowest go first, to keep the file short."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Take the lowest free slot. `IndexError` if there is none: ask for the length first."""
        return heapq.heappop(self._free)

    def give(self, slot: int) -> None:
        """Make a slot free again."""
        heapq.heappush(self._free, slot)


class Container(ABC):
    """The file that holds slots. Safe to use from several threads on different slots.

    Parameters
    ----------
    path : str
        What names it in messages.
    slot_bytes : int
        Size of a slot, a multiple of `ALIGNMENT_BYTES`.
    num_slots : int
        How many slots it has.
    """

    def __init__(self, path: str, slot_bytes: int, num_slots: int) -> None:
        if slot_bytes <= 0 or slot_bytes % ALIGNMENT_BYTES:
            raise ValueError(f"slot_bytes must be a positive multiple of {ALIGNMENT_BYTES}, got {slot_bytes}")
        self.path = path
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots

    def read(self, slot: int, view: memoryview) -> None:
        """Fill `view` with the first bytes of a slot.

        Raises
        ------
        StorageError
            If the bytes cannot be had; `CorruptState` if the file ends before them.
        """
        self._read(self._offset(slot, view), view)

    def write(self, slot: int, view: memoryview) -> None:
        """Write `view` to the beginning of a slot.

        Raises
        ------
        StorageError
            If not all bytes were written; `TierFull` if there is no room.
        """
        self._write(self._offset(slot, view), view)

    def _offset(self, slot: int, view: memoryview) -> int:
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"slot {slot} of {self.num_slots} in {self.path}")
        if view.nbytes > self.slot_bytes or view.nbytes % ALIGNMENT_BYTES:
            raise ValueError(f"{view.nbytes} bytes do not fit a slot of {self.slot_bytes} in {self.path}")
        return slot * self.slot_bytes

    @abstractmethod
    def _read(self, offset: int, view: memoryview) -> None: ...

    @abstractmethod
    def _write(self, offset: int, view: memoryview) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Free what the container holds. Idempotent."""
