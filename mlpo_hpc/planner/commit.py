"""One checkpoint: what is moved for it, and how long until it is committed, while training waits or goes on.

What lies on the tier beside which checkpoints are saved becomes a part of them as it is; the 16-bit weights, and what
lies on other tiers, are written there. What is in host memory alone is written there too if training waits. In the
background it is written to the tiers before the next update, which may have to wait for that; all else goes on while
the tiers are idle, or else in one part of `SHARE` of the time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mlpo_hpc.cluster.memory import SPARE_FACTOR
from mlpo_hpc.planner.job import WEIGHT_BYTES
from mlpo_hpc.planner.machine import WAYS, PlanTier
from mlpo_hpc.planner.policy import OURS
from mlpo_hpc.planner.simulate import Forecast
from mlpo_hpc.state.rhythm import LEAST_LEAD_S
from mlpo_hpc.storage.pace import LEAST_PATIENCE_S, SHARE

LEAD_FACTOR = 2
"""Times a step and a save, for the stop signal to come early enough: docs/requeue.md."""


@dataclass(frozen=True)
class Holding:
    """Where the state of one node is when a checkpoint is asked for, in bytes.

    Parameters
    ----------
    items : float
        Parameters whose state it is.
    memory_bytes : float
        State that is in host memory alone.
    tier_bytes : mapping
        State by tier, as soon as that of memory is there too; empty, if memory holds all of it and no tier is used.
    """

    items: float
    memory_bytes: float
    tier_bytes: Mapping[str, float]

    @property
    def weight_bytes(self) -> float:
        """The 16-bit weights."""
        return WEIGHT_BYTES * self.items

    @property
    def unstored_bytes(self) -> float:
        """State that no tier will have."""
        return 0.0 if self.tier_bytes else self.memory_bytes

    def sealed_bytes(self, tier: str) -> float:
        """What a checkpoint in the background sends from memory to a tier."""
        return self.memory_bytes * self.tier_bytes[tier] / sum(self.tier_bytes.values()) if self.tier_bytes else 0.0


def hold(forecast: Forecast, shares: Mapping[str, float], items: float) -> Holding:
    """What of our state is where: in memory what is not written in a step, the rest by the shares of the tiers.

    Parameters
    ----------
    forecast : Forecast
        Of the node's iterations.
    shares : mapping
        Of the tiers, any scale; empty, if none is used.
    items : float
        Parameters whose state the node has.
    """
    state_bytes = OURS.read_bytes * items
    written_bytes = sum(moved["write"] for moved in forecast.moved_bytes.values())
    memory_bytes = max(0.0, state_bytes - written_bytes)  # some of what was written may be of the step before
    total = sum(shares.values())
    return Holding(items, memory_bytes, {tier: state_bytes * share / total for tier, share in shares.items()})


@dataclass(frozen=True)
class Manner:
    """What one checkpoint costs with one setting of ``checkpoint.commit``."""

    iterations: int
    """Within which it is committed, beginning with the one after the save; 0: before it."""
    slowed_s: float
    """Training takes so much longer at least."""
    written_bytes: dict[str, float] = field(default_factory=dict)
    """Of one node for it, by tier."""


@dataclass(frozen=True)
class Commit:
    """A checkpoint of a job."""

    tier: str
    """On whose file system it is."""
    nbytes: float
    """Of the whole job."""
    manners: dict[str, Manner]
    """By ``checkpoint.commit``."""
    can_copy: bool
    """Whether the node has memory for a copy of the weights: in the background no update waits for them then."""
    lead_s: int
    """From the signal to the time limit: enough for an iteration and a save, twice."""


def target_of(tiers: Sequence[PlanTier]) -> PlanTier:
    """The tier beside which checkpoints are taken to be: the first that all nodes share, else the first."""
    return next((tier for tier in tiers if tier.shared), tiers[0])


def foresee_commit(
    forecast: Forecast, tiers: Sequence[PlanTier], holding: Holding, nodes: int, spare_bytes: float
) -> Commit:
    """A checkpoint of ours beside training as it was simulated.

    Parameters
    ----------
    forecast : Forecast
        Of a node's iterations.
    tiers : sequence of PlanTier
        As this node sees them.
    holding : Holding
        What it has where.
    nodes : int
        All alike.
    spare_bytes : float
        Host memory of a node that nothing else takes.
    """
    can_copy = spare_bytes >= SPARE_FACTOR * (holding.weight_bytes + holding.unstored_bytes)
    waiting = _waiting(tiers, holding)
    manners = {"wait": waiting, "background": _background(forecast, tiers, holding, can_copy)}
    nbytes = (OURS.read_bytes + WEIGHT_BYTES) * holding.items * nodes
    lead_s = math.ceil(LEAD_FACTOR * (forecast.iteration_s + waiting.slowed_s))
    return Commit(target_of(tiers).name, nbytes, manners, can_copy, lead_s)


def _waiting(tiers: Sequence[PlanTier], holding: Holding) -> Manner:
    target = target_of(tiers)
    linked_bytes = holding.tier_bytes.get(target.name, 0.0) - holding.sealed_bytes(target.name)
    written_bytes = holding.weight_bytes + OURS.read_bytes * holding.items - linked_bytes
    return Manner(0, written_bytes / target.write_bps, {target.name: written_bytes})


# ---- beside training ----------------------------------------------------------------------

Bytes = Mapping[tuple[str, str], float]
"""By tier and way."""


@dataclass(frozen=True)
class Timetable:
    """One way of a tier, or both on a half-duplex one, in seconds that it is at work."""

    passes_s: float
    update_s: float
    """Of each iteration."""
    busy_s: float
    """In each iteration, for training."""
    urgent_s: float
    """For the checkpoint, before the next update."""
    later_s: float
    """For the checkpoint, while there is nothing else to do."""

    @property
    def idle_s(self) -> float:
        """In each iteration, beside the update."""
        return max(0.0, min(self.passes_s, self.passes_s + self.update_s - self.busy_s))

    @property
    def left_s(self) -> float:
        """Of that, for what can wait: it leaves tiers alone shortly before an update, for half of it at most."""
        return max(self.idle_s / 2, self.idle_s - LEAST_LEAD_S)

    @property
    def given_s(self) -> float:
        """In each iteration, of the time in which it is at work, unless that is short."""
        return self.busy_s / SHARE if self.update_s > LEAST_PATIENCE_S or not self.idle_s else 0.0

    @property
    def stall_s(self) -> float:
        """What is urgent and does not fit beside an iteration."""
        return max(0.0, self.urgent_s - self.idle_s)

    @property
    def iterations(self) -> float:
        """Until all that the checkpoint needs is done."""
        return (self.urgent_s - self.stall_s + self.later_s) / (self.left_s + self.given_s)

    @property
    def paced_s(self) -> float:
        """Taken from training meanwhile."""
        return self.iterations * self.given_s


def _background(forecast: Forecast, tiers: Sequence[PlanTier], holding: Holding, can_copy: bool) -> Manner:
    target = target_of(tiers).name
    urgent = {(tier.name, "write"): holding.sealed_bytes(tier.name) for tier in tiers}
    later = {(tier, "read"): nbytes for tier, nbytes in holding.tier_bytes.items() if tier != target}
    later[target, "write"] = sum(later.values())
    (later if can_copy else urgent)[target, "write"] += holding.weight_bytes + holding.unstored_bytes
    tables = [table for tier in tiers for table in _timetables(forecast, tier, urgent, later)]
    iterations = max(1, math.ceil(max(table.iterations for table in tables)))
    slowed_s = max(table.stall_s for table in tables) + max(table.paced_s for table in tables)
    ways = [(tier.name, "write") for tier in tiers]
    return Manner(iterations, slowed_s, {way[0]: urgent[way] + later.get(way, 0.0) for way in ways})


def _timetables(forecast: Forecast, tier: PlanTier, urgent: Bytes, later: Bytes) -> list[Timetable]:
    """Those of one tier."""
    moved = {(tier.name, way): nbytes for way, nbytes in forecast.moved_bytes[tier.name].items()}

    def work_s(wanted: Bytes, ways: Sequence[str]) -> float:
        return sum(wanted.get((tier.name, way), 0.0) / tier.rate_bps(way) for way in ways)

    passes_s = forecast.forward_s + forecast.backward_s
    together = [(way,) for way in WAYS] if tier.full_duplex else [WAYS]
    return [
        Timetable(passes_s, forecast.update_s, work_s(moved, ways), work_s(urgent, ways), work_s(later, ways))
        for ways in together
    ]
