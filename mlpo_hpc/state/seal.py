"""A seal: the state of one moment, held on the tiers while training goes on.

Its slots are not written to until they are released; what is newer goes to other ones. What was in host memory alone
at that moment is either written to the tiers at once, before it is used again, or read from memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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

    def release(self, subgroup: int) -> None:
        """Let the slots of a subgroup be written to again."""
        with self._watch:
            for chunk in self._held[subgroup].values():
                self._tiers[chunk.tier].slots.release(chunk.slot)
            self._held[subgroup] = {}
            self._slots_came()

    def close(self) -> None:
        """Release all. Idempotent."""
        with self._watch:
            self._closed = True
        for subgroup in self._held:
            self.release(subgroup)
