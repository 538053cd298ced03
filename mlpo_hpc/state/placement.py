"""Placement: which tier a chunk goes to. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence

SPARE_RECORDS = 2
"""Records whose old copies still hold their slots while new ones are written."""


def choose(weights: Sequence[float], placed_bytes: Sequence[int], free_slots: Sequence[int], nbytes: int) -> int | None:
    """Tier that stays closest to its weight after taking the chunk, among those with a free slot.

    Parameters
    ----------
    weights : sequence of float
        Share of each tier, any scale; 0: only when no other has room.
    placed_bytes : sequence of int
        Bytes given to each tier since the step began.
    free_slots : sequence of int
        Free slots of each tier.
    nbytes : int
        Size of the chunk.

    Returns
    -------
    int or None
        None if no tier has a free slot now.
    """
    fits = [tier for tier, free in enumerate(free_slots) if free > 0]
    if not fits:
        return None

    def finish(tier: int) -> tuple[float, int]:
        weight = weights[tier]
        return ((placed_bytes[tier] + nbytes) / weight if weight > 0 else math.inf, tier)

    return min(fits, key=finish)


def divide_slots(num_slots: int, weights: Sequence[float], limits: Sequence[int]) -> list[int] | None:
    """Share slots among tiers by weight, no tier above its limit; what does not fit goes to the others.

    Returns
    -------
    list of int or None
        Slots of each tier, together at least `num_slots`; None if the limits are too small.
    """
    if sum(limits) < num_slots:
        return None
    slots = [0] * len(weights)
    open_tiers = {tier for tier, limit in enumerate(limits) if limit > 0}
    while (missing := num_slots - sum(slots)) > 0:
        # Weights of the tiers that still have room; equal shares if only weightless ones are left.
        total = sum(weights[tier] for tier in open_tiers)
        for tier in sorted(open_tiers):
            share = weights[tier] / total if total > 0 else 1 / len(open_tiers)
            slots[tier] = min(limits[tier], slots[tier] + math.ceil(missing * share))
            if slots[tier] >= limits[tier]:
                open_tiers = open_tiers - {tier}
    return slots
