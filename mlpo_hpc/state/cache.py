"""Host memory: exact-size buffers from one accounted pool, and which subgroups stay in it."""

from __future__ import annotations

import mmap
from collections.abc import Sequence


class Buffer:
    """Page-aligned private memory of a given size, zero when new."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A forked data loader would keep the old pages while we rewrite ours, and open(2) forbids
        # O_DIRECT on private memory beside a fork.
        self._map.madvise(mmap.MADV_DONTFORK)

    def view(self, nbytes: int) -> memoryview:
        """The first bytes. Memory is unmapped when the buffer and its last view are gone."""
        return memoryview(self._map)[:nbytes]


class Pool:
    """All memory of one rank for buffers and cache, never more than its budget.

    Not thread-safe: the pipeline calls it under its lock.

    Parameters
    ----------
    budget_bytes : int
        The rank's share of ``host_memory``.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.peak_bytes = 0
        self._used_bytes = 0
        self._free: list[Buffer] = []

    @property
    def allocated_bytes(self) -> int:
        """Memory held now, in use or free for reuse."""
        return self._used_bytes + sum(buffer.nbytes for buffer in self._free)

    def acquire(self, nbytes: int) -> Buffer | None:
        """A buffer of exactly `nbytes`, or None if the budget does not allow one now."""
        buffer = self._reuse(nbytes) or self._allocate(nbytes)
        if buffer is not None:
            self._used_bytes += buffer.nbytes
            self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        return buffer

    def release(self, buffer: Buffer) -> None:
        """Take a buffer back; its memory stays for reuse."""
        self._used_bytes -= buffer.nbytes
        self._free.append(buffer)

    def _reuse(self, nbytes: int) -> Buffer | None:
        for index, buffer in enumerate(self._free):
            if buffer.nbytes == nbytes:
                return self._free.pop(index)
        return None

    def _allocate(self, nbytes: int) -> Buffer | None:
        if self._used_bytes + nbytes > self.budget_bytes:
            return None
        while self.allocated_bytes + nbytes > self.budget_bytes:
            self._free.pop()
        return Buffer(nbytes)


def step_order(num_subgroups: int, policy: str, flipped: bool) -> list[int]:
    """Order of subgroups in a step: ascending, or descending where `alternate` has flipped it.

    Source: MLP-Offload, "cache-friendly order" (arXiv 2509.02480).
    """
    ascending = list(range(num_subgroups))
    return ascending[::-1] if policy == "alternate" and flipped else ascending


def keep_suffix(order: Sequence[int], sizes: Sequence[int], capacity_bytes: int) -> set[int]:
    """Subgroups at the end of an order that fit into host memory together, so they need no write.

    Parameters
    ----------
    order : sequence of int
        The order of this step.
    sizes : sequence of int
        Bytes of each subgroup's state, indexed by subgroup.
    capacity_bytes : int
        Host memory that may hold state when the step ends.
    """
    kept: set[int] = set()
    room = capacity_bytes
    for subgroup in reversed(order):
        room -= sizes[subgroup]
        if room < 0:
            break
        kept.add(subgroup)
    return kept
