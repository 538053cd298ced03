"""The plan: does it fit, how long is an iteration, what is written, what would help."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mlpo_hpc.planner.commit import Commit, foresee_commit, hold, target_of
from mlpo_hpc.planner.job import Job
from mlpo_hpc.planner.machine import PlanTier
from mlpo_hpc.planner.needs import (
    fits_in_memory,
    fitting_weights,
    gpu_bytes,
    host_bytes,
    least_state_bytes,
    room_bytes,
    stored_bytes,
)
from mlpo_hpc.planner.policy import MLP, OURS, ZERO3, Policy
from mlpo_hpc.planner.simulate import Forecast, simulate, weights_of
from mlpo_hpc.planner.upkeep import Schedule, Upkeep, foresee_upkeep
from mlpo_hpc.planner.wear import DAY_S, Wear

SYSTEMS = (ZERO3, MLP, OURS)
TIGHT = 0.9
"""Part of an accelerator's memory above which what is not modelled may not fit."""
WORTH = 1.02
"""A gain below this factor is not told."""


@dataclass(frozen=True)
class Outlook:
    """What one system would do with a job."""

    policy: Policy
    forecast: Forecast
    tier_bytes: dict[str, float]
    """Of one node."""
    text_tokens_ps: float
    """Of the whole job."""

    def written_a_day(self, tier: str) -> float:
        """Bytes that one node writes to a tier in 24 hours."""
        return self.forecast.moved_bytes[tier]["write"] * DAY_S / self.forecast.iteration_s


@dataclass(frozen=True)
class Plan:
    """All that is known about a job before it runs."""

    job: Job
    gpu_bytes: dict[str, float]
    host_bytes: dict[str, float]
    outlooks: dict[str, Outlook]
    """By system, those whose state has room."""
    wear: list[Wear]
    """Of ours."""
    commit: Commit | None
    """A checkpoint of ours; None, as the next: its state has no room."""
    upkeep: Upkeep | None
    problems: list[str]
    """Why it does not fit."""
    warnings: list[str]
    advice: list[tuple[str, float]]
    """What would help, and how many times as many text tokens a second and accelerator there would be, most first."""

    def plain(self) -> dict[str, Any]:
        """All of it, for programs."""
        machine = self.job.machine
        return {
            "fits": not self.problems,
            "problems": self.problems,
            "warnings": self.warnings,
            "parameters": self.job.model.numel,
            "model": self.job.model.model_dump(),
            "machine": asdict(machine),
            "text_tokens": self.job.text_tokens,
            "gpu_bytes": self.gpu_bytes,
            "host_bytes": self.host_bytes,
            "systems": {name: _plain_outlook(outlook) for name, outlook in self.outlooks.items()},
            "wear": [{**asdict(wear), "rated_days": wear.rated_days} for wear in self.wear],
            "checkpoint": _plain_checkpoint(self.commit, self.upkeep) if self.commit and self.upkeep else None,
            "advice": [{"what": what, "gain": gain} for what, gain in self.advice],
        }


def _plain_outlook(outlook: Outlook) -> dict[str, Any]:
    forecast = outlook.forecast
    return {
        **asdict(forecast),
        "iteration_s": forecast.iteration_s,
        "tier_bytes": outlook.tier_bytes,
        "text_tokens_ps": outlook.text_tokens_ps,
    }


def _plain_checkpoint(commit: Commit, upkeep: Upkeep) -> dict[str, Any]:
    fits = upkeep.has_room_for(upkeep.least_count)
    return {**asdict(commit), "upkeep": {**asdict(upkeep), "fits": fits, "full_days": upkeep.full_days}}


def foresee(job: Job, policy: Policy) -> Outlook | None:
    """Simulate a job under a policy; None if its state has no room on the tiers."""
    tiers = job.machine.local_tiers
    if policy.codec and fits_in_memory(job, policy):  # with "tiers": [], as the advice is, nothing is short
        policy = replace(policy, codec=False)
    weights = fitting_weights(job, policy, weights_of(policy, tiers))
    if weights is None:
        return None
    forecast = simulate(job.simulated(policy), tiers, job.work(policy), weights)
    shares = [weight / sum(weights) for weight in weights]
    stored = {tier.name: share * stored_bytes(job, policy) for tier, share in zip(tiers, shares, strict=True)}
    return Outlook(policy, forecast, stored, job.text_tokens / forecast.iteration_s)


def make_plan(job: Job, systems: Sequence[Policy] = SYSTEMS, schedule: Schedule | None = None) -> Plan:
    """Plan a job; ours is what is checked, warned of and improved, the other systems are for comparison.

    Parameters
    ----------
    job : Job
        With at least one tier.
    systems : sequence of Policy
        Those to simulate; ours among them.
    schedule : Schedule, optional
        Of its checkpoints.
    """
    schedule = schedule or Schedule()
    on_gpu, on_host = gpu_bytes(job), host_bytes(job)
    found = {policy.name: foresee(job, policy) for policy in systems}
    outlooks = {name: outlook for name, outlook in found.items() if outlook is not None}
    ours = outlooks.get(OURS.name)
    commit = _commit(job, ours, sum(on_host.values())) if ours else None
    upkeep = _upkeep(job, ours, commit, schedule) if ours and commit else None
    wear = _wear(job, ours, upkeep) if ours and upkeep else []
    problems = _problems(job, sum(on_gpu.values()), sum(on_host.values()), ours)
    warnings = _warnings(job, sum(on_gpu.values()), wear)
    if commit and upkeep and schedule.is_asked:
        problems += _checkpoint_problems(commit, upkeep)
        warnings += _checkpoint_warnings(job, commit, upkeep)
    advice = _advice(job, ours) if ours else []
    return Plan(job, on_gpu, on_host, outlooks, wear, commit, upkeep, problems, warnings, advice)


def _commit(job: Job, ours: Outlook, on_host: float) -> Commit:
    holding = hold(ours.forecast, {} if fits_in_memory(job, OURS) else ours.tier_bytes, job.items)
    machine = job.machine
    return foresee_commit(ours.forecast, machine.local_tiers, holding, machine.nodes, machine.node_bytes - on_host)


def _upkeep(job: Job, ours: Outlook, commit: Commit, schedule: Schedule) -> Upkeep:
    target, nodes = target_of(job.machine.tiers), job.machine.nodes
    room = None
    if target.capacity_bytes is not None and (target.shared or nodes == 1):
        room = target.capacity_bytes - nodes * ours.tier_bytes[target.name]
    return foresee_upkeep(schedule, commit, ours.forecast.iteration_s, room)


def _checkpoint_problems(commit: Commit, upkeep: Upkeep) -> list[str]:
    count = upkeep.least_count
    if upkeep.has_room_for(count):
        return []
    return [
        f"{count} checkpoints, the one in the making too, need {count * commit.nbytes / 1e9:,.0f} GB on {commit.tier}, "
        f"which has room for {max(0.0, upkeep.room_bytes or 0.0) / 1e9:,.0f} beside state: keep fewer, or "
        "save on another file system"
    ]


def _checkpoint_warnings(job: Job, commit: Commit, upkeep: Upkeep) -> list[str]:
    found, needed = [], commit.manners[upkeep.commit].iterations
    if job.machine.nodes > 1 and not target_of(job.machine.tiers).shared:
        found.append("no tier is shared, and checkpoints need a directory that all nodes see: give it as a tier too")
    if upkeep.every is not None and upkeep.every < needed:
        found.append(
            f"a checkpoint is committed within {needed} iterations: one every {upkeep.every} waits for the one before"
        )
    if upkeep.has_room_for(upkeep.least_count):
        found += _space_warnings(commit, upkeep)
    return found + (_background_warnings(job, commit) if upkeep.commit == "background" else [])


def _space_warnings(commit: Commit, upkeep: Upkeep) -> list[str]:
    found = []
    if not upkeep.has_room_for(upkeep.most_count):
        found.append(
            f"{commit.tier} has no room for {upkeep.most_count} checkpoints: the oldest goes before the new one is "
            "committed"
        )
    if upkeep.full_days is not None:
        found.append(f"{commit.tier} is full of checkpoints that stay after {upkeep.full_days:,.1f} days of training")
    return found


def _background_warnings(job: Job, commit: Commit) -> list[str]:
    found = []
    if not commit.can_copy:
        found.append(
            "host memory has no room for a copy of what the next update changes: with each checkpoint that update "
            "waits until it is written"
        )
    if not fits_in_memory(job, OURS) and not _has_room_twice(job):
        found.append("the tiers have no room for old and new state: updates wait while a checkpoint is copied")
    return found


def _has_room_twice(job: Job) -> bool:
    rooms = [room_bytes(tier, job.machine.nodes) for tier in job.machine.tiers]
    known = [room for room in rooms if room is not None]
    return len(known) < len(rooms) or sum(known) >= stored_bytes(job, OURS) + OURS.read_bytes * job.items


def _problems(job: Job, on_gpu: float, on_host: float, ours: Outlook | None) -> list[str]:
    machine, found = job.machine, []
    if on_gpu > machine.gpu_bytes:
        found.append(
            f"each accelerator needs {on_gpu / 1e9:.0f} GB and has {machine.gpu_bytes / 1e9:.0f}: "
            "more nodes, shorter sequences or a smaller micro-batch"
        )
    if on_host > machine.node_bytes:
        found.append(
            f"each node needs {on_host / 1e9:.0f} GB of host memory and has {machine.node_bytes / 1e9:.0f}: "
            "more nodes, or a smaller --host-memory"
        )
    least = least_state_bytes(job, OURS)
    if job.state_host_bytes < least:
        found.append(
            f"state needs {least / 1e9:.1f} GB of host memory on each node and gets {job.state_host_bytes / 1e9:.1f}: "
            "more nodes, or a smaller --sub-group-size"
        )
    if ours is None:
        rooms = sum(room_bytes(tier, machine.nodes) or 0.0 for tier in machine.tiers)
        found.append(
            f"state needs {stored_bytes(job, OURS) / 1e9:,.0f} GB of each node's tiers, which have room for "
            f"{rooms / 1e9:,.0f}: more nodes, or another tier"
        )
    return found


def _warnings(job: Job, on_gpu: float, wear: Sequence[Wear]) -> list[str]:
    found = []
    if fits_in_memory(job, OURS):
        found.append('all state fits into host memory: "tiers": [] needs no storage, and nothing is faster')
    if TIGHT * job.machine.gpu_bytes < on_gpu <= job.machine.gpu_bytes:
        found.append("accelerator memory is tight: what drivers and allocators take is not counted")
    return found + [drive.warning for drive in wear if drive.warning]


def _wear(job: Job, outlook: Outlook, upkeep: Upkeep) -> list[Wear]:
    """Of each tier with drives of the node's own, by training and checkpoints together."""
    found = []
    for tier in job.machine.tiers:
        if not tier.shared:
            written = outlook.written_a_day(tier.name) + upkeep.written_bytes.get(tier.name, 0.0)
            found.append(Wear(tier.name, written, written / tier.capacity_bytes if tier.capacity_bytes else None))
    return found


def _advice(job: Job, ours: Outlook) -> list[tuple[str, float]]:
    """Each change alone, simulated; those that gain, most first."""
    now = ours.text_tokens_ps / job.machine.ranks
    found = []
    for what, changed in _changes(job):
        outlook = foresee(changed, OURS)
        if outlook is not None and sum(gpu_bytes(changed).values()) <= job.machine.gpu_bytes:
            found.append((what, outlook.text_tokens_ps / changed.machine.ranks / now))
    return sorted((entry for entry in found if entry[1] > WORTH), key=lambda entry: -entry[1])


def _changes(job: Job) -> list[tuple[str, Job]]:
    """What one could change, in words and as a job."""
    machine, first = job.machine, job.machine.tiers[0]
    changes = [
        ("4 times as many micro-batches an iteration", replace(job, accumulation=4 * job.accumulation)),
        ("micro-batches of twice the size", replace(job, micro_batch=2 * job.micro_batch)),
        ("half as much host memory again for state", replace(job, host_bytes=int(1.5 * job.state_host_bytes))),
        ("twice the nodes", replace(job, machine=replace(machine, nodes=2 * machine.nodes))),
        (f"{first.name} twice as fast (a second drive)", _with_tiers(job, lambda tier: _twice(tier, first))),
    ]
    if len(machine.tiers) == 1:
        slower = replace(first, name="second", read_bps=first.read_bps / 2, write_bps=first.write_bps / 2)
        beside = replace(job, machine=replace(machine, tiers=(first, slower)))
        changes.append((f"a second tier beside it, half as fast as {first.name}", beside))
    return changes


def _with_tiers(job: Job, change: Callable[[PlanTier], PlanTier]) -> Job:
    return replace(job, machine=replace(job.machine, tiers=tuple(map(change, job.machine.tiers))))


def _twice(tier: PlanTier, chosen: PlanTier) -> PlanTier:
    if tier is not chosen:
        return tier
    capacity = None if tier.capacity_bytes is None else 2 * tier.capacity_bytes
    return replace(tier, read_bps=2 * tier.read_bps, write_bps=2 * tier.write_bps, capacity_bytes=capacity)
