"""Room in host memory: what is used last leaves it, chunk by chunk, for what is used sooner."""

from __future__ import annotations

from mlpo_hpc.errors import MlpoError, here
from mlpo_hpc.state.cache import Pool
from mlpo_hpc.state.resident import Resident
from mlpo_hpc.state.table import Table
from mlpo_hpc.state.watch import Watch
from mlpo_hpc.storage.tier import StorageTier


class Room:
    """The part of `Pipeline` that finds memory; called under its lock."""

    table: Table
    pool: Pool
    tiers: list[StorageTier]
    _watch: Watch
    _residents: dict[int, Resident]
    _awaited: int | None
    _places: dict[int, int]
    _places_then: dict[int, int]
    _position: int
    _num_turns: int

    def _write(self, subgroup: int) -> None:
        raise NotImplementedError

    def _next_use(self, subgroup: int) -> int:
        """Turns until a subgroup is needed: in this order, or in the following one if it had its turn."""
        place = self._places[subgroup]
        return place if place >= self._position else self._num_turns + self._places_then[subgroup]

    def _take(self, subgroup: int, nbytes: int) -> None:
        """Take memory for a subgroup; wait for it if need be."""
        while not self._find_memory(subgroup, nbytes):
            self._watch.raise_failure()
            self._make_room(subgroup)

    def _find_memory(self, subgroup: int, nbytes: int) -> bool:
        """Take memory for a subgroup, if need be of chunks on the tiers that are used later."""
        while not self.pool.take(nbytes):
            use = self._next_use(subgroup)
            later = [s for s, r in self._residents.items() if self._next_use(s) > use and self._can_spare(s, r)]
            if not later:
                return False
            self._drop_chunk(max(later, key=self._next_use))
        return True

    def _can_spare(self, subgroup: int, resident: Resident) -> bool:
        return subgroup != self._awaited and bool(resident.spare())

    def _make_room(self, subgroup: int) -> None:
        """Wait for memory; if nothing in flight will free any, write out what is used last."""
        if not any(resident.in_flight for resident in self._residents.values()):
            idle = [other for other in self._idle() if other != subgroup]
            if not idle or not self.tiers:
                raise MlpoError(
                    f"host memory of {self.pool.budget_bytes} bytes cannot hold {self.table[subgroup].label} "
                    f"({self.table[subgroup].nbytes} bytes) on {here()}. What to do: raise 'host_memory'."
                )
            victim = max(idle, key=self._next_use)
            if not self._residents[victim].dirty:
                self._drop_chunk(victim)
                return
            self._write(victim)
        self._watch.wait(f"memory for {self.table[subgroup].label}")

    def _idle(self) -> list[int]:
        return [s for s, r in self._residents.items() if not r.in_use and not r.in_flight]

    def _drop_chunk(self, subgroup: int) -> None:
        """Free the memory of a chunk that the tiers have, of the last one: what is read next begins with the first."""
        resident = self._residents[subgroup]
        index = max(resident.spare())
        cut = self.table.cuts(subgroup)[index]
        resident.drop(index)
        resident.buffer.discard(cut)
        self.pool.give(cut.stop - cut.start)
        self._forget(subgroup, resident)

    def _forget(self, subgroup: int, resident: Resident) -> None:
        """Forget a subgroup of which nothing is in memory any more, or on its way."""
        if not (resident.present or resident.in_flight or resident.in_use or resident.dirty):
            del self._residents[subgroup]
