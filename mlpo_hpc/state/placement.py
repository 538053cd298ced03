"""Placement: which tier a chunk goes to, decided anew at every write."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

from mlpo_hpc.storage.tier import StorageTier

SPARE_RECORDS = 2
"""Records whose old copies still hold their slots while new ones are written."""
MOST_KEPT_STEPS = 16
"""Steps beside saves before it is looked again at what tiers give beside them."""
REMEMBERED = 4
"""Steps without one whose rates are averaged for those beside it, for no step after will even out what one was off."""


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


class Placement:
    """Shares out what is written in a step by fixed weights.

    Parameters
    ----------
    weights : sequence of float
        Share of each tier, any scale.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = list(weights)
        self._placed_bytes = [0] * len(self._weights)

    @property
    def weights(self) -> list[float]:
        """Share of each tier now."""
        return self._weights

    def begin(self, beside_save: bool = False) -> None:
        """A step begins, beside a save or not."""
        self._placed_bytes = [0] * len(self._weights)

    def pick(self, free_slots: Sequence[int], nbytes: int) -> int | None:
        """Tier for a chunk, which is then counted as placed there; None if none has a free slot."""
        tier = choose(self.weights, self._placed_bytes, free_slots, nbytes)
        if tier is not None:
            self._placed_bytes[tier] += nbytes
        return tier


class Adaptive(Placement):
    """Shares out by what each tier gives now: a chunk goes where it will be done first, write and following read.

    A tier moves what it was given in a step once out and, in the next step, once in, the one beside the
    other: the slower way counts. Rates are those of this rank in this step and the one before while it had any to
    move on the tier, waiting for turns included, so that a device that others use too, that is half duplex or becomes
    slow is reckoned with as it is. Until a tier has moved enough, its weight is what was measured or given before.
    What a save moves is soon over, and unlike what comes: beside it shares stay as they were, until a step without it
    has been.

    Parameters
    ----------
    weights : sequence of float
        What each tier gives at the start, in bytes per second.
    tiers : sequence of StorageTier
        Asked for their rates.
    """

    def __init__(self, weights: Sequence[float], tiers: Sequence[StorageTier]) -> None:
        super().__init__(weights)
        self._tiers = tiers
        self._kept: list[float] | None = None
        self._kept_steps = 0
        self._before: deque[list[float]] = deque(maxlen=REMEMBERED)
        self._was_beside = False

    @property
    def weights(self) -> list[float]:
        """Bytes per second of each tier."""
        if self._kept is not None:
            return self._kept
        return [tier.recent_bps() or weight for tier, weight in zip(self._tiers, self._weights, strict=True)]

    def begin(self, beside_save: bool = False) -> None:
        """What is still queued from the last step counts too, but not what is of a save."""
        is_first_after = self._was_beside and not beside_save
        if is_first_after and self._kept is None:
            self._kept = self.weights
        for tier in self._tiers:
            tier.begin_step(is_new=is_first_after)
        self._was_beside = beside_save
        are_known = all(tier.recent_bps() for tier in self._tiers)
        if beside_save and self._kept_steps < MOST_KEPT_STEPS:
            self._kept = self._kept or self._usual_weights(are_known)
            self._kept_steps += 1
        elif are_known and not is_first_after:
            if beside_save:  # for long: that is what is usual now
                self._before.clear()
            self._kept, self._kept_steps = None, 0
            self._before.append(self.weights)
        self._placed_bytes = [0 if beside_save else tier.writes.meter.backlog_bytes for tier in self._tiers]

    def _usual_weights(self, are_known: bool) -> list[float]:
        if are_known or not self._before:
            self._before.append(self.weights)
        return [statistics.fmean(each) for each in zip(*self._before, strict=True)]


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
