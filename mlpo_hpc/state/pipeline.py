"""The pipeline: prefetch, host cache and write-behind of subgroups around the update.

One main thread calls `begin`, `get` and `put`; the I/O threads of the tiers report each chunk.
All bookkeeping is under one lock; no transfer, checksum or update runs under it.

A subgroup is either on the tiers only, or *resident* in a buffer of the pool:

    reading --> host --> in use --> host (kept)
                  ^                   |
                  +---- writing <-----+ --> on the tiers only, its buffer free
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from mlpo_hpc.errors import MlpoError, here
from mlpo_hpc.state.cache import Buffer, Pool, keep_suffix
from mlpo_hpc.state.placement import choose
from mlpo_hpc.state.resident import Phase, Resident
from mlpo_hpc.state.table import Chunk, Table
from mlpo_hpc.state.watch import Watch
from mlpo_hpc.storage.index import Held
from mlpo_hpc.storage.lane import Job
from mlpo_hpc.storage.tier import StorageTier


@dataclass
class Counts:
    """Cache hits and misses since the start."""

    hits: int = 0
    misses: int = 0


class Pipeline:
    """Moves subgroups between host memory and the tiers.

    Parameters
    ----------
    table : Table
        Where state is.
    pool : Pool
        The rank's host memory.
    tiers : list of StorageTier
        Owned; may be empty if all state fits in host memory.
    weights : sequence of float
        Placement weight of each tier.
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
        weights: Sequence[float],
        reserve_bytes: int = 0,
        prefetch: int | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        self.table = table
        self.pool = pool
        self.tiers = tiers
        self.counts = Counts()
        self._weights = weights
        self._prefetch = len(table) if prefetch is None else prefetch
        self._watch = Watch(timeout_s, self._queues)
        self._residents: dict[int, Resident] = {}
        self._unplaced: deque[tuple[int, int]] = deque()
        self._keep_bytes = pool.budget_bytes - pool.allocated_bytes - reserve_bytes
        self.plan(list(range(len(table))))

    def plan(self, order: Sequence[int], following: Sequence[int] | None = None) -> None:
        """Set the order in which subgroups come, and the one after it (by default the reverse)."""
        with self._watch:
            self._order = list(order)
            self._places = {subgroup: place for place, subgroup in enumerate(order)}
            then = list(reversed(self._order)) if following is None else following
            self._places_then = {subgroup: place for place, subgroup in enumerate(then)}
            self._position = 0
            self._next_read = len(self._order)
            self._placed_bytes = [0] * len(self.tiers)
            sizes = [record.nbytes for record in self.table.records]
            self._keep = keep_suffix(order, sizes, self._keep_bytes)

    def begin(self, order: Sequence[int], following: Sequence[int] | None = None) -> None:
        """Begin a step that will ask for each subgroup once, in this order; prefetch starts."""
        with self._watch:
            self._watch.raise_failure()
            self.plan(order, following)
            self._next_read = 0
            self._read_ahead()

    def create(self, subgroup: int) -> memoryview:
        """Memory for a subgroup that has no state yet; hand it back with `put`."""
        with self._watch:
            while (buffer := self._find_memory(subgroup)) is None:
                self._make_room(subgroup)
            self._position += 1
            self._residents[subgroup] = Resident(buffer, Phase.IN_USE)
            return buffer.view(self.table[subgroup].nbytes)

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
            resident.phase = Phase.IN_USE
            if self._order[self._position : self._position + 1] == [subgroup]:
                self._position += 1
                self._read_ahead()
            return resident.buffer.view(self.table[subgroup].nbytes)

    def put(self, subgroup: int, dirty: bool = True) -> None:
        """Hand a subgroup back: it stays in host memory if it is to be kept, else it is written."""
        with self._watch:
            self._watch.raise_failure()
            resident = self._residents[subgroup]
            resident.dirty |= dirty
            resident.phase = Phase.HOST
            if resident.dirty and subgroup not in self._keep and self.tiers:
                self._write(subgroup)
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
            while any(r.phase in (Phase.WRITING, Phase.READING) for r in self._residents.values()):
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
            for subgroup in self._idle(dirty=True):
                self._write(subgroup)
                self._residents[subgroup].wanted = True
        self.flush()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._watch.closed

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

    # ---- reading ahead --------------------------------------------------------------------

    def _next_use(self, subgroup: int) -> int:
        """Turns until a subgroup is needed: in this order, or in the following one if it had its turn."""
        place = self._places[subgroup]
        return place if place >= self._position else len(self._order) + self._places_then[subgroup]

    def _read_ahead(self) -> None:
        """Start reading the next subgroups while memory lasts, strictly in order."""
        while self._next_read < min(len(self._order), self._position + self._prefetch):
            subgroup = self._order[self._next_read]
            resident = self._residents.get(subgroup)
            if resident is not None:
                resident.wanted |= resident.phase is Phase.WRITING and self._next_read >= self._position
            elif self._next_read >= self._position and not self._admit(subgroup):
                return
            self._next_read += 1

    # ---- memory ---------------------------------------------------------------------------

    def _find_memory(self, subgroup: int) -> Buffer | None:
        """A buffer for a subgroup, if need be in place of clean state that is used later."""
        nbytes = self.table[subgroup].nbytes
        while (buffer := self.pool.acquire(nbytes)) is None:
            later = [s for s in self._idle(dirty=False) if self._next_use(s) > self._next_use(subgroup)]
            if not later:
                return None
            self._drop(max(later, key=self._next_use))
        return buffer

    def _make_room(self, subgroup: int) -> None:
        """Wait for memory; if nothing in flight will free any, write out what is used last."""
        in_flight = any(r.phase in (Phase.WRITING, Phase.READING) for r in self._residents.values())
        if not in_flight:
            idle = [*self._idle(dirty=True), *self._idle(dirty=False)]
            if not idle or not self.tiers:
                raise MlpoError(
                    f"host memory of {self.pool.budget_bytes} bytes cannot hold {self.table[subgroup].label} "
                    f"({self.table[subgroup].nbytes} bytes) on {here()}. What to do: raise 'host_memory'."
                )
            victim = max(idle, key=self._next_use)
            if self._residents[victim].dirty:
                self._write(victim)
            else:
                self._drop(victim)
                return
        self._watch.wait(f"memory for {self.table[subgroup].label}")

    def _idle(self, dirty: bool) -> list[int]:
        return [s for s, r in self._residents.items() if r.phase is Phase.HOST and r.dirty is dirty]

    def _drop(self, subgroup: int) -> None:
        self.pool.release(self._residents.pop(subgroup).buffer)

    # ---- reading --------------------------------------------------------------------------

    def _wait_for(self, subgroup: int) -> Resident:
        while True:
            self._watch.raise_failure()
            resident = self._residents.get(subgroup)
            if resident is None:
                if not self._admit(subgroup):
                    self._make_room(subgroup)
            elif resident.phase is Phase.HOST:
                return resident
            elif resident.phase is Phase.IN_USE:
                raise RuntimeError(f"{self.table[subgroup].label} is in use already")
            else:
                resident.wanted = True
                self._watch.wait(f"{self.table[subgroup].label} ({resident.phase.value})")

    def _admit(self, subgroup: int) -> bool:
        """Start reading a subgroup; False if there is no memory for it now."""
        buffer = self._find_memory(subgroup)
        if buffer is None:
            return False
        record = self.table[subgroup]
        cuts = self.table.cuts(subgroup)
        view = buffer.view(record.nbytes)
        self._residents[subgroup] = Resident(buffer, Phase.READING, pending=len(cuts), was_read=True)
        for cut, chunk in zip(cuts, record.chunks, strict=True):
            done = partial(self._chunk_read, subgroup)
            self.tiers[chunk.tier].reads.submit(Job(chunk.slot, view[cut], record.label, chunk.checksum, done))
        return True

    def _chunk_read(self, subgroup: int, _checksum: int | None, error: BaseException | None) -> None:
        with self._watch:
            if not self._watch.note(error):
                return
            resident = self._residents[subgroup]
            resident.pending -= 1
            if not resident.pending:
                resident.phase = Phase.HOST
                self._watch.notify()

    # ---- writing --------------------------------------------------------------------------

    def _write(self, subgroup: int) -> None:
        """Queue all chunks of a subgroup for writing into free slots; its old copy stays valid."""
        resident = self._residents[subgroup]
        resident.phase = Phase.WRITING
        resident.wanted = False
        resident.written = {}
        resident.pending = len(self.table.cuts(subgroup))
        self._unplaced.extend((subgroup, index) for index in range(resident.pending))
        self._place_chunks()

    def _place_chunks(self) -> None:
        """Give waiting chunks to tiers, first come first served, so that one record at least gets through."""
        while self._unplaced:
            subgroup, index = self._unplaced[0]
            cut = self.table.cuts(subgroup)[index]
            free = [len(tier.slots) for tier in self.tiers]
            tier = choose(self._weights, self._placed_bytes, free, cut.stop - cut.start)
            if tier is None:
                return
            self._unplaced.popleft()
            self._submit_write(subgroup, index, cut, tier)

    def _submit_write(self, subgroup: int, index: int, cut: slice, tier: int) -> None:
        record = self.table[subgroup]
        self._placed_bytes[tier] += cut.stop - cut.start
        slot = self.tiers[tier].slots.take()
        view = self._residents[subgroup].buffer.view(record.nbytes)[cut]
        done = partial(self._chunk_written, subgroup, index, tier, slot, cut.stop - cut.start)
        self.tiers[tier].writes.submit(Job(slot, view, record.label, None, done))

    def _chunk_written(
        self,
        subgroup: int,
        index: int,
        tier: int,
        slot: int,
        nbytes: int,
        checksum: int | None,
        error: BaseException | None,
    ) -> None:
        with self._watch:
            if not self._watch.note(error):
                return
            resident = self._residents[subgroup]
            resident.written[index] = Chunk(tier, slot, nbytes, checksum)
            resident.pending -= 1
            if not resident.pending:
                try:
                    self._commit(subgroup, resident)
                except Exception as failure:  # no memory for the next read, say: the main thread must hear of it
                    self._watch.note(failure)

    def _commit(self, subgroup: int, resident: Resident) -> None:
        """The new copy is complete: point the table at it, free the old slots and the buffer."""
        chunks = tuple(resident.written[index] for index in sorted(resident.written))
        for old in self.table.commit(subgroup, chunks):
            self.tiers[old.tier].slots.give(old.slot)
        resident.dirty = False
        resident.phase = Phase.HOST
        if not resident.wanted:
            self._drop(subgroup)
        self._place_chunks()
        self._read_ahead()
        self._watch.notify()

    def _queues(self) -> str:
        return ", ".join(tier.status() for tier in self.tiers)
