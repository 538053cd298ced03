"""The index of an ``hdf5`` container: which slot holds what, overwritten in place, two copies in turn.

Whoever is killed while writing one copy leaves the other one whole.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import astuple, dataclass

import numpy as np
import xxhash

from mlpo_hpc.errors import CorruptState, here
from mlpo_hpc.storage.base import Transport, round_up

COPIES = 2
FREE = -1
ROW = np.dtype([("subgroup", "<i4"), ("chunk", "<i4"), ("nbytes", "<u8"), ("checksum", "<u8")])
HEADER = ("generation", "step", "seal")


@dataclass(frozen=True)
class Held:
    """What a slot holds: a chunk of a subgroup's record, and its xxh3 checksum (0: not computed)."""

    subgroup: int
    chunk: int
    nbytes: int
    checksum: int


def index_type(num_slots: int) -> np.dtype[np.void]:
    """One copy of the index, padded so that it can be written with O_DIRECT."""
    offsets = [8 * place for place in range(len(HEADER) + 1)]
    formats = ["<u8"] * len(HEADER) + [(ROW, (num_slots,))]
    size = round_up(offsets[-1] + num_slots * ROW.itemsize)
    return np.dtype({"names": [*HEADER, "slots"], "formats": formats, "offsets": offsets, "itemsize": size})


def seal(copy: np.void) -> int:
    """Checksum over all of a copy but itself."""
    content = copy["generation"].tobytes() + copy["step"].tobytes() + copy["slots"].tobytes()
    return xxhash.xxh3_64_intdigest(content)


def newest(copies: np.ndarray, path: str) -> np.void:
    """The copy that was written last and is whole.

    Parameters
    ----------
    copies : ndarray
        The dataset ``index``, shape ``(2,)``.
    path : str
        Of the file, for messages.

    Raises
    ------
    CorruptState
        If there is none.
    """
    whole = [copy for copy in copies if copy["generation"] and copy["seal"] == seal(copy)]
    if not whole:
        raise CorruptState(
            f"no copy of the index says what the slots hold, on {here(path)}: the job ended before its first step, "
            "or the file was damaged. Resume from the last checkpoint"
        )
    latest: np.void = max(whole, key=lambda copy: int(copy["generation"]))
    return latest


class SlotIndex:
    """The index of one rank's slots, at its place in a file.

    Parameters
    ----------
    transport : Transport
        Of the file.
    offset : int
        Where the first copy lies.
    num_slots : int
        Slots of this rank.
    """

    def __init__(self, transport: Transport, offset: int, num_slots: int) -> None:
        self._transport = transport
        self._offset = offset
        self._type = index_type(num_slots)
        self._generation = 0

    def write(self, step: int, held: Mapping[int, Held]) -> None:
        """Say what the slots hold after a step; those not named are free.

        Raises
        ------
        StorageError
            If it cannot be written; the copy before is whole then.
        """
        self._generation += 1
        with mmap.mmap(-1, self._type.itemsize) as memory:
            copy = np.frombuffer(memory, self._type)[0:1]
            copy["generation"], copy["step"] = self._generation, step
            copy["slots"]["subgroup"] = FREE
            for slot, what in held.items():
                copy["slots"][0, slot] = astuple(what)
            copy["seal"] = seal(copy[0])
            del copy
            with memoryview(memory) as view:
                self._transport.write(self._offset + self._generation % COPIES * self._type.itemsize, view)
