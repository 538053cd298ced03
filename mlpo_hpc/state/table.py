"""The table: for each subgroup, how large its state is and which slots hold it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Chunk:
    """The part of a subgroup's state that lies in one slot."""

    tier: int
    slot: int
    nbytes: int
    checksum: int | None


@dataclass
class Record:
    """One subgroup's entry."""

    label: str
    """Whose state it is, in messages."""
    nbytes: int
    """Size of the encoded state. It may change from one write to the next."""
    chunks: tuple[Chunk, ...] = ()
    """Where the newest committed copy lies; empty before the first write."""
    most_bytes: int = 0
    """Largest size that it may have; by default the present one."""

    def __post_init__(self) -> None:
        self.most_bytes = max(self.most_bytes, self.nbytes)


class Table:
    """Subgroup -> chunks. A write becomes visible by one assignment, `commit`.

    Parameters
    ----------
    records : list of Record
        Indexed by subgroup.
    chunk_bytes : int
        Largest chunk, a multiple of the alignment.
    """

    def __init__(self, records: list[Record], chunk_bytes: int) -> None:
        self.records = records
        self.chunk_bytes = chunk_bytes

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, subgroup: int) -> Record:
        return self.records[subgroup]

    def cuts(self, subgroup: int) -> list[slice]:
        """Byte ranges of a subgroup's chunks."""
        return cuts(self.records[subgroup].nbytes, self.chunk_bytes)

    def chunks_within(self, subgroup: int, parts: Sequence[slice]) -> list[int]:
        """Chunks that lie in one of some parts of a record; not a short last one, which another size makes longer."""
        full = [(i, cut) for i, cut in enumerate(self.cuts(subgroup)) if cut.stop - cut.start == self.chunk_bytes]
        return [i for i, cut in full if any(part.start <= cut.start and cut.stop <= part.stop for part in parts)]

    def commit(self, subgroup: int, chunks: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
        """Point the subgroup at its new chunks; return the old ones, whose slots are free now."""
        record = self.records[subgroup]
        old, record.chunks = record.chunks, chunks
        return old


def cuts(nbytes: int, chunk_bytes: int) -> list[slice]:
    """Cut a record into chunks, the last one shorter."""
    return [slice(begin, min(begin + chunk_bytes, nbytes)) for begin in range(0, nbytes, chunk_bytes)]
