"""Slots: fixed-size, aligned extents in a container."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlpo_hpc.storage.index import SlotIndex

ALIGNMENT_BYTES = 4096
"""Offsets and lengths are multiples of this: enough for O_DIRECT on 512e and 4Kn devices."""


def round_up(size_bytes: int, unit_bytes: int = ALIGNMENT_BYTES) -> int:
    """Smallest multiple of the unit that holds the size."""
    return -(-size_bytes // unit_bytes) * unit_bytes


class Slots:
    """Which slots of a container are free; the lowest go first, to keep the file short.

    A slot that is *held* is not taken again before it was both given back and released. Slots of an earlier
    generation (see `storage.generations`) are not taken any more; `emptied` is told when none of it is in use.
    """

    def __init__(self, num_slots: int, emptied: Callable[[int], None] = lambda _: None) -> None:
        self._num_slots = num_slots
        self._emptied = emptied
        self._generation = 0
        self._taken = Counter[int]()
        self._free = list(range(num_slots))
        self._held: set[int] = set()
        self._given: set[int] = set()

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Take the lowest free slot. `IndexError` if there is none: ask for the length first."""
        slot = heapq.heappop(self._free)
        self._taken[self._generation] += 1
        return slot

    def give(self, slot: int) -> None:
        """Make a slot free again."""
        if slot in self._held:
            self._given.add(slot)
            return
        generation = slot // self._num_slots
        self._taken[generation] -= 1
        if generation == self._generation:
            heapq.heappush(self._free, slot)
        else:
            self._look(generation)

    def pin(self) -> int:
        """Let this generation not be emptied before `unpin`; its number."""
        self._taken[self._generation] += 1
        return self._generation

    def unpin(self, generation: int) -> None:
        """It may be emptied."""
        self._taken[generation] -= 1
        if generation != self._generation:
            self._look(generation)

    def renew(self) -> None:
        """Take slots of the next generation only."""
        self._generation += 1
        first = self._generation * self._num_slots
        self._free = list(range(first, first + self._num_slots))
        self._look(self._generation - 1)

    def _look(self, generation: int) -> None:
        if not self._taken[generation]:
            del self._taken[generation]
            self._emptied(generation)

    def hold(self, slot: int) -> None:
        """Keep what is in a slot until `release`."""
        self._held.add(slot)

    def release(self, slot: int) -> None:
        """Hold a slot no longer."""
        self._held.remove(slot)
        if slot in self._given:
            self._given.remove(slot)
            self.give(slot)


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
        self.index: SlotIndex | None = None

    def __str__(self) -> str:
        return self.path

    @property
    def is_direct(self) -> bool:
        """Whether the page cache is left out."""
        return False

    def facts(self) -> dict[str, str]:
        """What it is, for the report."""
        return {}

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

    def where(self, slot: int) -> str:
        """A slot's place, for messages."""
        return f"slot {slot} (byte {slot * self.slot_bytes})"

    @abstractmethod
    def _read(self, offset: int, view: memoryview) -> None: ...

    @abstractmethod
    def _write(self, offset: int, view: memoryview) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Free what the container holds. Idempotent."""


class Transport(ABC):
    """How bytes reach a file. Safe to use from several threads on different bytes.

    Offsets and sizes are multiples of `ALIGNMENT_BYTES`.
    """

    name: str
    """As in the configuration."""
    direct = False
    """Whether the page cache is left out."""
    path: str
    """Of the file, or of the directory of a file without a name."""

    @abstractmethod
    def read(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes at `offset`.

        Raises
        ------
        StorageError
            If they cannot be had; `CorruptState` if the file ends before them.
        """

    @abstractmethod
    def write(self, offset: int, view: memoryview) -> None:
        """Write all of `view` at `offset`.

        Raises
        ------
        StorageError
            If not all was written; `TierFull` if there is no room.
        """

    def link(self, path: str) -> bool:
        """Give the file a name besides; False where that cannot be."""
        return False

    def punch(self, offset: int, size_bytes: int) -> None:
        """Give the space of some bytes back, where that can be; they read as zeros."""
        return

    def sync(self) -> None:
        """Wait until all that was written is on the device, where there is one.

        Raises
        ------
        StorageError
            If it cannot be.
        """
        return

    @abstractmethod
    def close(self) -> None:
        """Close the file. Idempotent, and never collective: a rank that fails waits for nobody."""


class FileContainer(Container):
    """Slots in a file, from a byte of it on.

    Parameters
    ----------
    transport : Transport
        Of the file; owned.
    slot_bytes, num_slots : int
        What this rank has of it.
    kind : str
        As in the configuration.
    base_bytes : int
        Where the first slot begins.
    index : SlotIndex, optional
        Where the file says which slot holds what.
    """

    def __init__(
        self,
        transport: Transport,
        slot_bytes: int,
        num_slots: int,
        kind: str = "raw",
        base_bytes: int = 0,
        index: SlotIndex | None = None,
    ) -> None:
        super().__init__(transport.path, slot_bytes, num_slots)
        self.kind = kind
        self.transport = transport
        self.base_bytes = base_bytes
        self.index = index
        self.endings = ExitStack()
        """What is to be done when it is closed."""

    def __str__(self) -> str:
        return f"{self.kind} over {self.transport.name} in {self.path}"

    @property
    def is_direct(self) -> bool:
        """Whether the transport leaves the page cache out."""
        return self.transport.direct

    def facts(self) -> dict[str, str]:
        """Container and transport, in the words of the configuration."""
        return {"container": self.kind, "transport": self.transport.name}

    def _read(self, offset: int, view: memoryview) -> None:
        self.transport.read(self.base_bytes + offset, view)

    def _write(self, offset: int, view: memoryview) -> None:
        self.transport.write(self.base_bytes + offset, view)

    def place(self, slot: int) -> int:
        """Byte of the file at which a slot begins."""
        return self.base_bytes + slot * self.slot_bytes

    def where(self, slot: int) -> str:
        """A slot's place in the file."""
        return f"slot {slot} (byte {self.place(slot)})"

    def punch(self, slot: int, kept_bytes: int) -> None:
        """Give the space of a slot back but for its first bytes, where that can be."""
        if kept_bytes < self.slot_bytes:
            self.transport.punch(self.place(slot) + kept_bytes, self.slot_bytes - kept_bytes)

    def close(self) -> None:
        """Close the file."""
        with self.endings:
            self.transport.close()
