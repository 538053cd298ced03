"""Write-behind: chunks go to the tiers that placement picks; the old copy stays valid until all are there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from mlpo_hpc.state.placement import Placement
from mlpo_hpc.state.resident import Resident
from mlpo_hpc.state.seal import Seal
from mlpo_hpc.state.table import Chunk, Table
from mlpo_hpc.state.watch import Watch
from mlpo_hpc.storage.lane import Job
from mlpo_hpc.storage.tier import StorageTier


class WriteBehind:
    """The writing half of the pipeline; called under its lock.

    Parameters
    ----------
    table : Table
        Where state is.
    tiers : sequence of StorageTier
        Where it may go.
    placement : Placement
        Picks among them.
    watch : Watch
        The pipeline's.
    after : callable
        Told of each chunk that was written, under the lock, from an I/O thread.
    starved : callable
        Called under the lock when chunks wait for slots.
    """

    def __init__(
        self,
        table: Table,
        tiers: Sequence[StorageTier],
        placement: Placement,
        watch: Watch,
        after: Callable[[int, Resident], None],
        starved: Callable[[], None],
    ) -> None:
        self.placement = placement
        self._table = table
        self._tiers = tiers
        self._watch = watch
        self._after = after
        self._starved = starved
        self._unplaced: deque[tuple[int, int, Resident, bool]] = deque()
        self.seal: Seal | None = None
        """Waits for what was in host memory alone."""

    @property
    def lacks_slots(self) -> bool:
        """Whether chunks wait for slots."""
        return bool(self._unplaced)

    def begin(self) -> None:
        """A step begins."""
        self.placement.begin(beside_save=self.seal is not None and not self.seal.is_closed)

    def write(self, subgroup: int, resident: Resident, chunks: Iterable[int], is_usual: bool = True) -> None:
        """Queue chunks of a subgroup for writing into free slots, those of them that were not before.

        `is_usual`: see `Job`.
        """
        wanted = [index for index in chunks if index not in resident.asked]
        resident.asked.update(wanted)
        resident.unwritten += len(wanted)
        self._unplaced.extend((subgroup, index, resident, is_usual) for index in wanted)
        self.place_chunks()
        self._commit_if_whole(subgroup, resident)

    def place_chunks(self) -> None:
        """Give waiting chunks to tiers, first come first served, so that one record at least gets through."""
        while self._unplaced:
            subgroup, index, resident, is_usual = self._unplaced[0]
            cut = self._table.cuts(subgroup)[index]
            tier = self.placement.pick([len(tier.slots) for tier in self._tiers], cut.stop - cut.start)
            if tier is None:
                self._starved()
                return
            self._unplaced.popleft()
            self._submit(subgroup, index, resident, tier, is_usual)

    def _submit(self, subgroup: int, index: int, resident: Resident, tier: int, is_usual: bool) -> None:
        record, cut = self._table[subgroup], self._table.cuts(subgroup)[index]
        slot = self._tiers[tier].slots.take()
        done = partial(self._chunk_written, subgroup, index, resident, tier, slot, cut.stop - cut.start)
        view = resident.buffer.view(record.nbytes)[cut]
        self._tiers[tier].writes.submit(Job(slot, view, record.label, None, done, is_usual))

    def _chunk_written(
        self,
        subgroup: int,
        index: int,
        resident: Resident,
        tier: int,
        slot: int,
        nbytes: int,
        checksum: int | None,
        error: BaseException | None,
    ) -> None:
        with self._watch:
            if not self._watch.note(error):
                return
            resident.written[index] = Chunk(tier, slot, nbytes, checksum)
            resident.unwritten -= 1
            try:
                self._commit_if_whole(subgroup, resident)
                self._after(subgroup, resident)
            except Exception as failure:  # no memory for the next read, say: the main thread must hear of it
                self._watch.note(failure)
            self._watch.notify()

    def _commit_if_whole(self, subgroup: int, resident: Resident) -> None:
        """When the new copy is complete: point the table at it and free the old slots."""
        if resident.in_use or len(resident.written) < len(self._table.cuts(subgroup)):
            return
        chunks = tuple(resident.written[index] for index in sorted(resident.written))
        for old in self._table.commit(subgroup, chunks):
            self._tiers[old.tier].slots.give(old.slot)
        if self.seal is not None:
            self.seal.hold(subgroup)
        resident.written, resident.asked = {}, set()
        resident.dirty = False
        self.place_chunks()
