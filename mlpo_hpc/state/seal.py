"""A seal: the state of one moment, held on the tiers while training goes on.

Its slots are not written to until they are released; what is newer goes to other ones. What was in host memory alone
at that moment is either written to the tiers at once, before it is used again, or read from memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from mlpo_hpc.state.table import Chunk, Table
from mlpo_hpc.state.watch import Watch
from mlpo_hpc.storage.tier import StorageTier


class Seal:
    """Made by `Pipeline.seal`; its methods may be called from any thread.

    Parameters
    ----------
    watch : Watch
        The pipeline's.
    table : Table
        Where state is.
    tiers : sequence of StorageTier
        Where the slots are.
    memory : mapping
        State that is to be read from host memory, by subgroup. Whoever sealed it sees to it that it stays as it is.
    slots_came : callable
        Called under the lock when slots were released.
    """

    def __init__(
        self,
        watch: Watch,
        table: Table,
        tiers: Sequence[StorageTier],
        memory: Mapping[int, memoryview],
        slots_came: Callable[[], None],
    ) -> None:
        self._watch = watch
        self._table = table
        self._tiers = tiers
        self._slots_came = slots_came
        self._closed = False
        self.sizes = [record.nbytes for record in table.records]
        """Bytes of each subgroup's state."""
        self.memory = memory
        self._held: dict[int, dict[int, Chunk]] = {}
        self._pinned = {number: tier.slots.pin() for number, tier in enumerate(tiers)}

    @property
    def is_closed(self) -> bool:
        """Whether nothing is held any more."""
        return self._closed

    def hold(self, subgroup: int) -> None:
        """Hold what the table says of a subgroup, once; under the pipeline's lock."""
        if self._closed or subgroup in self._held or subgroup in self.memory:
            return
        self._held[subgroup] = dict(enumerate(self._table[subgroup].chunks))
        for chunk in self._held[subgroup].values():
            self._tiers[chunk.tier].slots.hold(chunk.slot)

    def chunks(self, subgroup: int) -> tuple[Chunk, ...]:
        """Where a subgroup's state lies, as soon as all of it is there.

        Raises
        ------
        StorageError
            What went wrong on a tier.
        """
        with self._watch:
            while subgroup not in self._held:
                self._watch.wait(f"{self._table[subgroup].label} to be written for a checkpoint")
            return tuple(self._held[subgroup].values())

    def release(self, subgroup: int, but: Collection[int] = ()) -> None:
        """Let the slots of a subgroup be written to again, except those on some tiers."""
        with self._watch:
            kept = {}
            for index, chunk in self._held[subgroup].items():
                if chunk.tier in but:
                    kept[index] = chunk
                else:
                    self._tiers[chunk.tier].slots.release(chunk.slot)
            self._held[subgroup] = kept
            self._slots_came()

    def close(self) -> None:
        """Release all. Idempotent."""
        with self._watch:
            self._closed = True  # a write that ends now holds nothing any more
        self.memory = {}
        for subgroup in self._held:
            self.release(subgroup)
        with self._watch:
            pinned, self._pinned = self._pinned, {}
            for number, generation in pinned.items():
                self._tiers[number].slots.unpin(generation)
