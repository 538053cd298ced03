"""Host memory: one accounted budget, buffers whose parts come and go, and which subgroups stay in it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Sequence

import numpy as np

HUGE_PAGE_BYTES = 2**21  # of x86-64, and of arm64 with small pages; elsewhere the advice has no effect


class Buffer:
    """Page-aligned private memory of a given size, zero when new. It takes room only where it is used.

    In huge pages as far as it goes: reading into new memory with O_DIRECT is half as fast again with them, for pages
    are made and pinned one by one.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        huge_bytes = nbytes - nbytes % HUGE_PAGE_BYTES
        spare = HUGE_PAGE_BYTES if huge_bytes else 0
        self._map = mmap.mmap(-1, nbytes + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._begin = -_address(self._map) % HUGE_PAGE_BYTES if huge_bytes else 0
        # A forked data loader would keep the old pages while we rewrite ours, and open(2) forbids
        # O_DIRECT on private memory beside a fork.
        self._map.madvise(mmap.MADV_DONTFORK)
        if huge_bytes:
            with contextlib.suppress(OSError):  # of a kernel without them
                self._map.madvise(mmap.MADV_HUGEPAGE, self._begin, huge_bytes)

    def view(self, nbytes: int) -> memoryview:
        """The first bytes. Memory is unmapped when the buffer and its last view are gone."""
        return memoryview(self._map)[self._begin : self._begin + nbytes]

    def fill(self, data: memoryview) -> memoryview:
        """A copy of some bytes, at the beginning; other threads go on meanwhile."""
        copy = self.view(len(data))
        np.copyto(np.frombuffer(copy, np.uint8), np.frombuffer(data, np.uint8))
        return copy

    def discard(self, part: slice) -> None:
        """Give the pages of a part back to the system; it reads as zeros from then on."""
        self._map.madvise(mmap.MADV_DONTNEED, self._begin + part.start, part.stop - part.start)


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


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
        self.used_bytes = 0
        self.peak_bytes = 0

    @property
    def free_bytes(self) -> int:
        """What may still be taken."""
        return self.budget_bytes - self.used_bytes

    def take(self, nbytes: int) -> bool:
        """Count memory as used; False if the budget does not allow it now."""
        if nbytes > self.free_bytes:
            return False
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return True

    def give(self, nbytes: int) -> None:
        """Count memory as free again."""
        self.used_bytes -= nbytes

    def reserve(self, nbytes: int) -> Buffer:
        """A buffer of which nothing is used yet; whoever uses a part of it takes room for that before."""
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
