"""What only all answers together tell: who is missing, how cores are shared, what nodes have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ClusterShell.NodeSet import NodeSet

from mlpo_hpc.cluster.cores import fair_cores, thread_advice
from mlpo_hpc.config import Tier
from mlpo_hpc.doctor.finding import Finding, split_advice
from mlpo_hpc.doctor.meeting import Answer
from mlpo_hpc.doctor.memory import gigabytes
from mlpo_hpc.doctor.plan import Plan
from mlpo_hpc.doctor.room import judge_devices, judge_space
from mlpo_hpc.doctor.start import Start

Found = Iterator[tuple[str, Finding]]
"""Host and finding; no host: it concerns the whole job."""
LEAST_CORES = 2
"""For a rank: one moves bytes while the other computes."""


def by_node(answers: Sequence[Answer]) -> dict[tuple[str, str], list[Answer]]:
    """Ranks of each node."""
    nodes: dict[tuple[str, str], list[Answer]] = {}
    for answer in sorted(answers, key=lambda answer: answer.rank):
        nodes.setdefault((answer.host, answer.machine), []).append(answer)
    return nodes


def fold(hosts: Sequence[str]) -> str:
    """Names in short: ``n[1-4,7]``."""
    return str(NodeSet.fromlist(hosts))


def judge_nodes(answers: Sequence[Answer], start: Start, hosts: Sequence[str], silence: tuple[str, str]) -> Found:
    """Finding ``nodes``.

    Parameters
    ----------
    answers : sequence of Answer
        That came; the first rank's own is among them.
    start : Start
        Of the first rank.
    hosts : sequence of str
        Of all ranks, as far as that is known: by rank, or each node once.
    silence : tuple of str
        Why others did not answer, and what to do.
    """
    missing = sorted(set(range(start.size)) - {answer.rank for answer in answers})
    if not missing:
        if start.size > 1:
            yield "", Finding(check="nodes", verdict="ok", seen=f"all {start.size} ranks answered")
        return
    heard = {answer.host.partition(".")[0] for answer in answers}  # Slurm tells short names
    known = len(hosts) == start.size
    silent = {hosts[rank] for rank in missing} if known else set(hosts) - heard
    reason, advice = silence
    seen = f"rank {fold_numbers(missing)}: {reason}"
    for host in sorted(silent) or [""]:
        yield host, Finding(check="nodes", verdict="fail", seen=seen, advice=advice)


def fold_numbers(numbers: Sequence[int]) -> str:
    """Numbers in short: ``1-4,7``."""
    return str(NodeSet.fromlist([f"r{number}" for number in numbers])).removeprefix("r").strip("[]")


def judge_cores(ranks: Sequence[Answer], start: Start) -> Finding:
    """Finding ``cores`` of one node.

    Parameters
    ----------
    ranks : sequence of Answer
        Of the node.
    start : Start
        Of the first rank of all.
    """
    everyone = [answer.cores for answer in ranks]
    shares = [fair_cores(mine, everyone) for mine in everyone]
    least = shares.index(min(shares))
    cores, used = shares[least], len({core for mine in everyone for core in mine})
    seen = f"{cores} of {used} cores a rank"
    if not start.launcher:
        return Finding(check="cores", verdict="ok", seen=f"{used} cores")
    if len(ranks) < ranks[0].local_size:
        return Finding(check="cores", verdict="skipped", seen="not all ranks of the node answered")
    if cores < LEAST_CORES:
        advice = "give srun -c (it has not taken --cpus-per-task from sbatch since Slurm 22.05: export "
        advice += "SRUN_CPUS_PER_TASK), or mpirun --bind-to none; or start fewer ranks on a node"
        return Finding(check="cores", verdict="warn", seen=seen, advice=advice)
    threads = ranks[least].threads or len(everyone[least])
    text, advice = split_advice(thread_advice(threads, cores))
    if text:
        return Finding(check="cores", verdict="warn", seen=f"{seen}; {text}", advice=advice)
    return Finding(check="cores", verdict="ok", seen=seen)


def judge_versions(firsts: Sequence[Answer]) -> Found:
    """Findings ``versions`` where nodes differ."""
    if len({answer.versions for answer in firsts}) > 1:
        advice = "load the same module and environment on all nodes: training refuses to start"
        for answer in firsts:
            yield answer.host, Finding(check="versions", verdict="fail", seen=answer.versions, advice=advice)


def judge_sharing(firsts: Sequence[Answer], tiers: Sequence[Tier]) -> Found:
    """Findings ``sharing``: whether the other nodes see what the first one made.

    Parameters
    ----------
    firsts : sequence of Answer
        The first rank of each node, that of the first node first.
    tiers : sequence of Tier
        Of the plan.
    """
    for tier in tiers:
        told = [
            (answer.host, _sharing(tier, answer.marks[tier.name])) for answer in firsts[1:] if tier.name in answer.marks
        ]
        agreed = len({finding for _, finding in told}) == 1
        yield from [("", told[0][1])] if agreed else told


def _sharing(tier: Tier, sees: bool) -> Finding:
    if tier.kind == "shared" and not sees:
        seen = "it is 'shared', but what the first node writes there is not seen"
        advice = "point 'dir' to a file system that all nodes mount, or say 'node_local'"
        return Finding(check="sharing", verdict="fail", seen=seen, advice=advice, subject=tier.name)
    if tier.kind == "node_local" and sees:
        seen = "it is 'node_local', but nodes see the same files: they share its bandwidth"
        advice = "say 'shared', or point 'dir' to a drive of the node"
        return Finding(check="sharing", verdict="warn", seen=seen, advice=advice, subject=tier.name)
    seen = "the nodes see the same files" if sees else "another directory on each node"
    return Finding(check="sharing", verdict="ok", seen=seen, subject=tier.name)


def judge_devices_of(firsts: Sequence[Answer]) -> Found:
    """Findings ``tier`` for those that share a device with another tier of their node."""
    for answer in firsts:
        yield from ((answer.host, finding) for finding in judge_devices(answer.rooms))


def judge_rooms(nodes: Sequence[Sequence[Answer]], plan: Plan, state_bytes: int, num_nodes: int, size: int) -> Found:
    """Findings ``space``.

    Parameters
    ----------
    nodes : sequence of sequence of Answer
        Ranks of each node.
    plan : Plan
        The first rank's.
    state_bytes : int
        Of the whole model.
    num_nodes, size : int
        Nodes and ranks that share it.
    """
    for ranks in nodes:
        first = ranks[0]
        part = len(ranks) / size if len(nodes) == num_nodes else 1 / num_nodes
        if plan.config.tiers is None and not plan.tiers:
            seen = f"{gigabytes(part * state_bytes)} of state a node; no tiers are configured"
            yield "", Finding(check="space", verdict="skipped", seen=seen)
        elif len(first.rooms) < len(plan.tiers):
            seen = f"{gigabytes(part * state_bytes)} of state a node; not all tiers can be looked at"
            yield first.host, Finding(check="space", verdict="skipped", seen=seen)
        else:
            rooms = list(first.rooms.values())
            yield first.host, judge_space(int(part * state_bytes), rooms, first.budget_bytes, num_nodes)
