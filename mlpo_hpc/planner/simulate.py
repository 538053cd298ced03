"""A node's iterations, simulated, and the least time that an update can take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from mlpo_hpc.planner.clock import Clock, Process
from mlpo_hpc.planner.drive import Drive
from mlpo_hpc.planner.machine import WAYS, PlanTier
from mlpo_hpc.planner.policy import Policy
from mlpo_hpc.planner.rank import Rank, Share, have_ended

STEPS = 4
"""Simulated iterations."""
COUNTED = 2
"""The last ones: one of each order, when what lies where has settled."""


@dataclass(frozen=True)
class Work:
    """What a node has to do in an iteration.

    Parameters
    ----------
    items : float
        Parameters whose state it has.
    ranks : int
        Of the node.
    num_subgroups : int
        Of each rank.
    host_bytes : float
        Host memory for state, of the node: buffers and cache together.
    forward_s, backward_s : float
        Computation of all micro-batches, in seconds.
    update_items_ps : float
        Parameters a second that the node's CPUs update, decoding and encoding counted.
    """

    items: float
    ranks: int
    num_subgroups: int
    host_bytes: float
    forward_s: float
    backward_s: float
    update_items_ps: float


@dataclass(frozen=True)
class Forecast:
    """One iteration, settled."""

    forward_s: float
    backward_s: float
    update_s: float
    floor_s: float
    """In which the tiers, all at their full speed, bring and take what is not in host memory when the update begins."""
    found_share: float
    """Of the state, that is in host memory then."""
    moved_bytes: dict[str, dict[str, float]]
    """Of the node, by tier and way."""

    @property
    def iteration_s(self) -> float:
        """All three phases."""
        return self.forward_s + self.backward_s + self.update_s


def weights_of(policy: Policy, tiers: Sequence[PlanTier]) -> list[float]:
    """Share of each tier in the state, any scale."""
    if policy.shares == "first":
        return [1.0] + [0.0] * (len(tiers) - 1)
    if policy.shares == "bandwidth":
        return [tier.pass_bps for tier in tiers]
    slowest_bps = min(tier.pass_bps for tier in tiers)
    return list(policy.ratio or [float(round(tier.pass_bps / slowest_bps)) for tier in tiers])


def floor_s(policy: Policy, tiers: Sequence[PlanTier], items: float) -> float:
    """Seconds in which so many parameters' state comes and goes at the best shares, each tier at full speed.

    Source: the model in docs/performance.md.
    """
    used = tiers[:1] if policy.shares == "first" else tiers
    return items / sum(1 / tier.item_s(policy.read_bytes, policy.written_bytes) for tier in used)


def simulate(policy: Policy, tiers: Sequence[PlanTier], work: Work, weights: Sequence[float] | None = None) -> Forecast:
    """Simulate a node until its iterations repeat themselves.

    Parameters
    ----------
    policy : Policy
        How it offloads.
    tiers : sequence of PlanTier
        As this node sees them.
    work : Work
        What it has to do.
    weights : sequence of float, optional
        Share of each tier, where it is not what the policy says.
    """
    clock = Clock()
    drives = [Drive(clock, tier.with_ranks(work.ranks, policy.permits)) for tier in tiers]
    share = _share(work)
    shares = weights_of(policy, tiers) if weights is None else weights
    ranks = [Rank(clock, drives, shares, policy, share) for _ in range(work.ranks)]
    for rank in ranks:
        clock.start(rank.run(STEPS, ranks))
    clock.start(_count_anew(ranks, drives))
    clock.run()
    counted = [times for rank in ranks for times in rank.times[-COUNTED:]]
    return Forecast(
        work.forward_s,
        fmean(times.backward_s for times in counted),
        fmean(max(rank.times[-number].update_s for rank in ranks) for number in range(1, COUNTED + 1)),
        floor_s(policy, tiers, work.items * (1 - fmean(times.found_share for times in counted))),
        fmean(times.found_share for times in counted),
        {
            tier.name: {way: drive.moved_bytes[way] / COUNTED for way in WAYS}
            for tier, drive in zip(tiers, drives, strict=True)
        },
    )


def _count_anew(ranks: Sequence[Rank], drives: Sequence[Drive]) -> Process:
    """Bytes count from the first iteration that counts."""
    yield partial(have_ended, ranks, STEPS - COUNTED)
    for drive in drives:
        drive.moved_bytes = dict.fromkeys(WAYS, 0.0)


def _share(work: Work) -> Share:
    """Of one rank."""
    subgroup_items = work.items / work.ranks / work.num_subgroups
    update_s = subgroup_items * work.ranks / work.update_items_ps
    return Share(
        work.num_subgroups,
        subgroup_items,
        work.host_bytes / work.ranks,
        work.forward_s,
        work.backward_s,
        update_s,
    )
