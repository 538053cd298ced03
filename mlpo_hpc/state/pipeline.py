"""The pipeline: prefetch, host cache and write-behind of subgroups around the update.

One main thread calls `begin`, `get` and `put`; the I/O threads of the tiers report each chunk.
All bookkeeping is under one lock; no transfer, checksum or update runs under it.

A subgroup is on the tiers only, or *resident*: all of its chunks or some of them are in host memory.

    reading --> host --> in use --> host (kept: neither written nor read)
                  ^                   |
                  +---- writing <-----+     its chunks leave memory one by one, when memory is wanted
                                            for something that is used sooner

The orders of this step and of the following one are one sequence. What is used next is read as far ahead
as memory goes, across the end of the step too, so that neither the storage nor the update waits
for the other there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from mlpo_hpc.state.cache import Pool, keep_suffix
from mlpo_hpc.state.placement import Placement
from mlpo_hpc.state.resident import Phase, Resident
from mlpo_hpc.state.rhythm import Rhythm
from mlpo_hpc.state.room import Room
from mlpo_hpc.state.seal import Seal
from mlpo_hpc.state.table import Table
from mlpo_hpc.state.watch import Watch
from mlpo_hpc.state.write_behind import WriteBehind
from mlpo_hpc.storage.base import FileContainer
from mlpo_hpc.storage.index import Held
from mlpo_hpc.storage.lane import Job, Lane
from mlpo_hpc.storage.pace import Pace
from mlpo_hpc.storage.tier import StorageTier


@dataclass
class Counts:
    """Cache hits and misses since the start."""

    hits: int = 0
    misses: int = 0


class Pipeline(Room):
    """Moves subgroups between host memory and the tiers.

    Parameters
    ----------
    table : Table
        Where state is.
    pool : Pool
        The rank's host memory.
    tiers : list of StorageTier
        Owned; may be empty if all state fits in host memory.
    placement : Placement
        Which tier a chunk is written to.
    reserve_bytes : int
        Host memory not used for keeping state from step to step: the working buffers of an
        order whose head is not what the last step kept.
    prefetch : int or None
        Subgroups read ahead at most; None: as many as memory holds.
    timeout_s : float
        Longest time without progress before `StorageTimeout`.
    """

    def __init__(
        self,
        table: Table,
        pool: Pool,
        tiers: list[StorageTier],
        placement: Placement,
        reserve_bytes: int = 0,
        prefetch: int | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        self.table = table
        self.pool = pool
        self.tiers = tiers
        self.counts = Counts()
        self.rhythm = Rhythm()
        self._prefetch = 2 * len(table) if prefetch is None else prefetch
        self._watch = Watch(timeout_s, self._queues)
        self._writer = WriteBehind(table, tiers, placement, self._watch, self._after_write, self.rhythm.tell)
        self._residents: dict[int, Resident] = {}
        self._awaited: int | None = None
        self._keep_bytes = pool.free_bytes - reserve_bytes
        self.plan(list(range(len(table))))

    def plan(self, order: Sequence[int], following: Sequence[int] | None = None) -> None:
        """Set the order in which subgroups come, and the one after it (by default the reverse)."""
        with self._watch:
            then = list(reversed(order)) if following is None else following
            self._upcoming = [*order, *then]
            self._num_turns = len(order)
            self._places = {subgroup: place for place, subgroup in enumerate(order)}
            self._places_then = {subgroup: place for place, subgroup in enumerate(then)}
            self._position = 0
            self._next_read = len(self._upcoming)
            self._writer.begin()
            sizes = [record.nbytes for record in self.table.records]
            self._keep = keep_suffix(order, sizes, self._keep_bytes)

    def begin(self, order: Sequence[int], following: Sequence[int] | None = None) -> None:
        """Begin a step that will ask for each subgroup once, in this order; prefetch starts."""
        with self._watch:
            self._watch.raise_failure()
            self.plan(order, following)
            self.rhythm.begin()
            self._next_read = 0
            self._read_ahead()

    def create(self, subgroup: int) -> memoryview:
        """Memory, all zero, for a subgroup without state or whose state is not wanted; hand it back with `put`."""
        with self._watch:
            self._clear(subgroup)
            record = self.table[subgroup]
            self._take(subgroup, record.nbytes)
            self._position += 1
            present = set(range(len(self.table.cuts(subgroup))))
            self._residents[subgroup] = Resident(self.pool.reserve(record.most_bytes), [], present, in_use=True)
            return self._residents[subgroup].buffer.view(record.nbytes)

    def get(self, subgroup: int) -> memoryview:
        """Wait until a subgroup's state is in host memory; it is the caller's until `put`.

        Raises
        ------
        StorageError
            What went wrong on a tier, now or earlier.
        """
        with self._watch:
            resident = self._wait_for(subgroup)
            self.counts.misses += resident.was_read
            self.counts.hits += not resident.was_read
            resident.was_read = False
            resident.in_use = True
            if self._position < self._num_turns and self._upcoming[self._position] == subgroup:
                self._position += 1
                self._read_ahead()
            return resident.buffer.view(self.table[subgroup].nbytes)

    def _clear(self, subgroup: int) -> None:
        """Free what memory has of a subgroup, without a look at it."""
        while (resident := self._residents.get(subgroup)) is not None and resident.in_flight:
            self._watch.raise_failure()
            self._watch.wait(self.table[subgroup].label)
        if resident is not None:
            cuts = self.table.cuts(subgroup)
            self.pool.give(sum(cuts[index].stop - cuts[index].start for index in resident.present))
            del self._residents[subgroup]

    def resize(self, subgroup: int, nbytes: int) -> memoryview:
        """Change the size of a subgroup's state while it is in use; what both sizes have in common stays."""
        with self._watch:
            record, resident = self.table[subgroup], self._residents[subgroup]
            if nbytes > record.nbytes:
                self._take(subgroup, nbytes - record.nbytes)
            elif nbytes < record.nbytes:
                resident.buffer.discard(slice(nbytes, record.nbytes))
                self.pool.give(record.nbytes - nbytes)
            record.nbytes = nbytes
            resident.present = set(range(len(self.table.cuts(subgroup)))) - set(resident.absent)
            return resident.buffer.view(nbytes)

    def put_parts(self, subgroup: int, parts: Sequence[slice]) -> None:
        """Hand back bytes of a subgroup in use that were changed and will not be again; `put` follows, with dirty."""
        with self._watch:
            if subgroup in self._keep or not self.tiers:
                return
            self._writer.write(subgroup, self._residents[subgroup], self.table.chunks_within(subgroup, parts))

    def put(self, subgroup: int, dirty: bool = True) -> None:
        """Hand a subgroup back: it stays in host memory if it is to be kept, else it is written."""
        with self._watch:
            self._watch.raise_failure()
            resident = self._residents[subgroup]
            resident.dirty |= dirty
            resident.in_use = False
            if resident.dirty and subgroup not in self._keep and self.tiers:
                self._write(subgroup)
            self._read_ahead()
            self._watch.notify()

    def check(self) -> None:
        """Raise what went wrong on a tier, if anything did."""
        with self._watch:
            self._watch.raise_failure()

    def flush(self) -> None:
        """Wait until nothing is in flight. What the cache keeps stays unwritten.

        Raises
        ------
        StorageError
            What went wrong on a tier, now or earlier.
        """
        with self._watch:
            self._watch.raise_failure()
            while any(resident.in_flight for resident in self._residents.values()):
                self._watch.wait("transfers to end")

    def write_back(self) -> None:
        """Write what is only in host memory, and wait for it.

        Raises
        ------
        StorageError
            What went wrong on a tier, now or earlier.
        """
        with self._watch:
            self._watch.raise_failure()
            for subgroup in self._idle():
                if self._residents[subgroup].dirty:
                    self._write(subgroup)
        self.flush()

    def seal(self, write_back: bool, following: Mapping[int, FileContainer] | None = None) -> Seal:
        """Hold the state as it is now, while no subgroup is in use; close the seal before the next one.

        Parameters
        ----------
        write_back : bool
            Whether what is in host memory alone is written to the tiers; a subgroup is not handed out before that is
            done. Otherwise it is to be read from memory, and the caller lets nobody change it meanwhile.
        following : mapping, optional
            Of a tier's number to the file that it writes to from now on: all of the last one is sealed.
        """
        with self._watch:
            self._watch.raise_failure()
            dirty = [subgroup for subgroup, resident in self._residents.items() if resident.dirty]
            in_memory = [] if write_back and self.tiers else [s for s in dirty if not self._residents[s].in_flight]
            views = {s: self._residents[s].buffer.view(self.table[s].nbytes) for s in in_memory}
            seal = self._writer.seal = Seal(self._watch, self.table, self.tiers, views, self._writer.place_chunks)
            for subgroup in range(len(self.table)):
                if subgroup not in dirty:
                    seal.hold(subgroup)
            for subgroup in sorted(set(dirty) - set(in_memory), key=self._next_use):
                self._write(subgroup, is_usual=False)
            for tier, container in (following or {}).items():
                self.tiers[tier].succeed(container)
            return seal

    def is_wanted(self, lead_s: float = 0.0) -> bool:
        """Whether an update goes on, and gets on, or is expected. Without the lock: a hint.

        Parameters
        ----------
        lead_s : float
            How long before it is expected it counts.
        """
        if self.rhythm.is_stepping:
            return not self._writer.lacks_slots
        return self.rhythm.is_near(lead_s)

    def pace(self, lanes: Sequence[Lane]) -> Pace:
        """How traffic that can wait goes on through some lanes beside updates; without lanes nothing holds it up."""
        return Pace(lanes, self.is_wanted, self.rhythm.news)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._watch.closed

    def resident_bytes(self) -> int:
        """State that is in host memory now."""
        with self._watch:
            return sum(
                cut.stop - cut.start
                for subgroup, resident in self._residents.items()
                for number, cut in enumerate(self.table.cuts(subgroup))
                if number in resident.present
            )

    def held(self, tier: int) -> dict[int, Held]:
        """What the slots of a tier hold, of subgroups whose newest state is on the tiers."""
        with self._watch:
            dirty = {subgroup for subgroup, resident in self._residents.items() if resident.dirty}
            return {
                chunk.slot: Held(subgroup, number, chunk.nbytes, chunk.checksum or 0)
                for subgroup, record in enumerate(self.table.records)
                if subgroup not in dirty
                for number, chunk in enumerate(record.chunks)
                if chunk.tier == tier
            }

    def close(self) -> None:
        """End the I/O threads and free files and memory, of all tiers even if one fails to. Idempotent.

        Raises
        ------
        StorageError
            If a file could not be closed.
        """
        with self._watch:
            if self._watch.closed:
                return
            self._watch.closed = True
        with ExitStack() as endings:
            endings.callback(self._residents.clear)
            for tier in self.tiers:
                endings.callback(tier.close)

    # ---- reading --------------------------------------------------------------------------

    def _wait_for(self, subgroup: int) -> Resident:
        self._awaited = subgroup
        try:
            while True:
                self._watch.raise_failure()
                resident = self._residents.get(subgroup)
                if resident is not None and resident.phase is Phase.HOST:
                    return resident
                if resident is not None and resident.in_use:
                    raise RuntimeError(f"{self.table[subgroup].label} is in use already")
                if self._bring(subgroup) or (resident is not None and resident.in_flight):
                    self._watch.wait(self.table[subgroup].label)
                else:
                    self._make_room(subgroup)
        finally:
            self._awaited = None

    def _read_ahead(self) -> None:
        """Read what is used next while memory lasts, strictly in order; first what the main thread waits for."""
        if self._awaited is not None and not self._bring(self._awaited):
            return
        end = min(len(self._upcoming), self._position + self._prefetch)
        while self._next_read < end:
            subgroup = self._upcoming[self._next_read]
            again = self._next_read >= self._num_turns  # of the following step: not before its turn in this one
            if again and self._places[subgroup] >= self._position:
                return
            if self._next_read >= self._position and not self._bring(subgroup):
                return
            self._next_read += 1

    def _bring(self, subgroup: int) -> bool:
        """Read what is missing of a subgroup as far as there is memory; whether all of it is there or will be."""
        resident = self._residents.get(subgroup)
        if resident is not None and (resident.in_use or (resident.unwritten and resident.absent)):
            return False
        record, cuts = self.table[subgroup], self.table.cuts(subgroup)
        for index in list(range(len(cuts)) if resident is None else resident.absent):
            cut = cuts[index]
            if not self._find_memory(subgroup, cut.stop - cut.start):
                return False
            resident = self._residents.get(subgroup)
            if resident is None:
                resident = self._residents[subgroup] = Resident(
                    self.pool.reserve(record.most_bytes), list(range(len(cuts)))
                )
            resident.absent.remove(index)
            resident.reading += 1
            resident.was_read = True
            chunk, view = record.chunks[index], resident.buffer.view(record.nbytes)[cut]
            done = partial(self._chunk_read, subgroup, index)
            self.tiers[chunk.tier].reads.submit(Job(chunk.slot, view, record.label, chunk.checksum, done))
        return True

    def _chunk_read(self, subgroup: int, index: int, _checksum: int | None, error: BaseException | None) -> None:
        with self._watch:
            if not self._watch.note(error):
                return
            resident = self._residents[subgroup]
            resident.reading -= 1
            resident.present.add(index)
            self._watch.notify()

    # ---- writing --------------------------------------------------------------------------

    def _write(self, subgroup: int, is_usual: bool = True) -> None:
        resident = self._residents[subgroup]
        self._writer.write(subgroup, resident, range(len(self.table.cuts(subgroup))), is_usual)
        self._forget(subgroup, resident)

    def _after_write(self, subgroup: int, resident: Resident) -> None:
        """A chunk was written: its memory can be had."""
        self._forget(subgroup, resident)
        self._read_ahead()

    def _queues(self) -> str:
        return ", ".join(tier.status() for tier in self.tiers)
