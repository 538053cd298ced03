"""Weak scaling: the same parameters on each of more and more nodes, which share one parallel file system."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlpo_hpc.planner.job import Job
from mlpo_hpc.planner.policy import MLP, OURS, ZERO3, Policy
from mlpo_hpc.planner.simulate import simulate, weights_of

NODES = tuple(2**power for power in range(11))


@dataclass(frozen=True)
class Line:
    """A system in the picture."""

    policy: Policy
    look: str
    meaning: str
    shares_of_one: bool = False
    """Whether state is shared out as it is right for one node, however many there are."""


LINES = {
    "zero3": Line(ZERO3, "s:", ZERO3.meaning),
    "mlp, as on one node": Line(MLP, "x--", "MLP-Offload with the ratio that is right for one node", True),
    "mlp": Line(MLP, "^--", "MLP-Offload with a ratio set anew for each number of nodes"),
    "ours": Line(OURS, "o-", OURS.meaning),
}


def update_seconds(job: Job, nodes: Sequence[int] = NODES) -> dict[str, list[float]]:
    """Seconds of an update by line, for each number of nodes; all else as on one node."""
    return {name: [_update_s(job, line, count) for count in nodes] for name, line in LINES.items()}


def _update_s(job: Job, line: Line, nodes: int) -> float:
    alone = job.machine.tiers
    tiers = tuple(tier.for_nodes(nodes) for tier in alone)
    weights = weights_of(line.policy, alone if line.shares_of_one else tiers)
    return simulate(job.simulated(line.policy), tiers, job.work(line.policy), weights).update_s


def draw_weak_scaling(job: Job, path: str | Path) -> dict[str, list[float]]:
    """Draw `update_seconds` over the number of nodes into a PNG file; what was drawn is returned."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = update_seconds(job)
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, line in LINES.items():
        axes.plot(NODES, found[name], line.look, label=line.meaning)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(NODES, [str(count) for count in NODES])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="nodes", ylabel="seconds of an update", title=_title(job))
    axes.grid(alpha=0.3, which="both")
    axes.legend(loc="upper left", fontsize="small")
    figure.savefig(path, dpi=110)
    return found


def _title(job: Job) -> str:
    tiers = [
        f"{tier.name} {tier.read_bps / 1e9:g}/{tier.write_bps / 1e9:g} GB/s a node"
        + (f", {tier.total_bps / 1e9:g} GB/s for all" if tier.total_bps is not None else "")
        for tier in job.machine.tiers
    ]
    return f"{job.items / 1e9:.0f} B parameters a node\n{'; '.join(tiers)}"
