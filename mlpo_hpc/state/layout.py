"""The layout: how large chunks are, how many slots each tier gets, and the least host memory that works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlpo_hpc.errors import TierFull
from mlpo_hpc.state.cache import HUGE_PAGE_BYTES
from mlpo_hpc.state.placement import SPARE_RECORDS, divide_slots
from mlpo_hpc.state.table import cuts
from mlpo_hpc.storage.base import ALIGNMENT_BYTES, round_up

CHUNKS_PER_RECORD = 16
"""Chunks that the largest record is cut into at least, so that several tiers can share it."""
LEAST_CHUNK_BYTES = 2**20
"""Smaller transfers waste a drive's bandwidth (unless `chunk_bytes` asks for them)."""


@dataclass(frozen=True)
class Layout:
    """What one rank lays out on its tiers."""

    chunk_bytes: int
    slots: list[int]
    """Slots of each tier."""


def least_host_bytes(sizes: Sequence[int], scratch_bytes: int, have_tiers: bool) -> int:
    """Host memory of one rank with which every step can finish.

    Two of the largest subgroup's state (one is updated while the other moves) and one 32-bit
    gradient; without tiers, all state.
    """
    states = min(sum(sizes), 2 * max(sizes)) if have_tiers else sum(sizes)
    return states + round_up(scratch_bytes)


def pick_chunk_bytes(sizes: Sequence[int], largest_bytes: int) -> int:
    """Chunk size: small enough that tiers share a record, large enough for bandwidth."""
    shared = max(LEAST_CHUNK_BYTES, round_up(-(-max(sizes) // CHUNKS_PER_RECORD)))
    if shared > HUGE_PAGE_BYTES:  # so that no huge page belongs to two: it is freed as a whole
        shared -= shared % HUGE_PAGE_BYTES
    limit = max(ALIGNMENT_BYTES, largest_bytes - largest_bytes % ALIGNMENT_BYTES)
    return min(limit, shared)


def lay_out(
    sizes: Sequence[int],
    largest_chunk_bytes: int,
    weights: Sequence[float],
    room_bytes: Sequence[int],
    free: bool = False,
    seals: bool = False,
) -> Layout:
    """Divide the slots for all subgroups, and for new copies in flight, among the tiers.

    Parameters
    ----------
    sizes : sequence of int
        Bytes of each subgroup's state.
    largest_chunk_bytes : int
        As configured.
    weights : sequence of float
        Share of each tier.
    room_bytes : sequence of int
        What this rank may use on each tier.
    free : bool
        Whether the share of a tier may change later: each gets slots for all, as far as it has room. Slots that
        are not used take no space.
    seals : bool
        Whether updates go on while a checkpoint holds what was there before: as far as there is room, each record gets
        slots twice. With fewer, updates wait until enough of it is copied.

    Raises
    ------
    TierFull
        If the tiers together are too small.
    """
    chunk_bytes = pick_chunk_bytes(sizes, largest_chunk_bytes)
    chunks = [len(cuts(size, chunk_bytes)) for size in sizes]
    needed = sum(chunks) + SPARE_RECORDS * max(chunks)
    wanted = needed + seals * sum(chunks)
    limits = [room // chunk_bytes for room in room_bytes]
    slots = divide_slots(max(needed, min(wanted, sum(limits))), weights, limits)
    if slots is not None and free:
        slots = [min(limit, wanted) for limit in limits]
    if slots is None:
        raise TierFull(f"needs {needed * chunk_bytes:,} bytes on its tiers, which have room for {sum(room_bytes):,}")
    return Layout(chunk_bytes, slots)


LEAST_SUBGROUPS = 16
"""Subgroups of a rank below which there is little to overlap and to keep."""
RECORDS_IN_BUDGET = 4
"""Records that should fit into a rank's host memory beside a 32-bit gradient."""
FP32_ADAM_BYTES = 12


def choose_subgroup_size(numels: Sequence[Sequence[int]], share_bytes: int) -> int:
    """DeepSpeed's ``sub_group_size`` for a budget.

    Parameters
    ----------
    numels : sequence of sequence of int
        Items of each parameter's partition on a rank, by parameter group.
    share_bytes : int
        The rank's host memory.

    Returns
    -------
    int
        So that four records fit into the budget and there are 16 subgroups, as far as the sizes
        of the parameters allow: DeepSpeed does not cut a parameter.
    """
    total = sum(map(sum, numels))
    most = min(LEAST_SUBGROUPS, sum(map(len, numels)))
    size = min(-(-total // LEAST_SUBGROUPS), share_bytes // (RECORDS_IN_BUDGET * FP32_ADAM_BYTES + 4))
    while size > 1 and count_subgroups(numels, size) < most:
        size -= -(-size // 20)
    return max(1, size)


def count_subgroups(numels: Sequence[Sequence[int]], size: int) -> int:
    """Subgroups that DeepSpeed makes: it adds parameters until one holds `size` items or more."""
    count = 0
    for group in numels:
        held = 0
        for numel in group:
            held += numel
            if held >= size:
                count, held = count + 1, 0
        count += held > 0
    return count
