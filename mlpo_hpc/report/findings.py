"""What the figures of a run mean: what binds it, and what to do."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal

from mlpo_hpc.planner.wear import RATED_DRIVE_WRITES
from mlpo_hpc.report.figures import Figures, TierFigures
from mlpo_hpc.report.run import Run

LARGE = 1 / 2
"""Part of an iteration from which on the update is what to look at."""
AT_WORK = 0.6
"""Part of an update in which the busiest tier is at work, from which on storage is what binds it."""
EVEN = 0.85
"""Tiers whose time at work differs by less than this factor are balanced."""
SHORT = 0.7
"""Part of its expected rate below which a tier is told."""
WAITED = 0.1
"""Part of an iteration from which on waiting for tokens is told."""


@dataclass(frozen=True)
class Finding:
    """One sentence on a run."""

    kind: Literal["storage", "compute", "good", "warning"]
    text: str


def findings_of(run: Run, figures: Figures) -> list[Finding]:
    """The verdict first, then what should be known beside it."""
    verdict = _verdict(figures)
    slow = _slow_tiers(figures) if verdict.kind == "storage" else []
    return [verdict, *_losses(run), *slow, *_wear(figures), *_journals(run)]


def _verdict(figures: Figures) -> Finding:
    update_s, iteration_s, busiest = figures.phases_s["update"], figures.iteration_s, figures.busiest
    if iteration_s is None:
        return Finding("warning", "Only one step was done: what binds the run shows from the second step on.")
    share = update_s / iteration_s
    if busiest is None:
        return Finding(
            "good",
            f"Not bound by storage: no state moves to or from a tier. The update is {share:.0%} of an iteration.",
        )
    if share < LARGE:
        return Finding(
            "good",
            f"Bound by forward and backward, not by storage: the update is {share:.0%} of an iteration.",
        )
    at_work = min(1.0, busiest.busy_s / update_s)
    if at_work < AT_WORK:
        return Finding(
            "compute",
            f"Bound by the update itself, not by storage: it is {share:.0%} of an iteration, but the busiest tier "
            f"({busiest.name}) is at work in only {at_work:.0%} of that time. More cores a rank would help.",
        )
    return Finding(
        "storage",
        f"Bound by storage: the update is {share:.0%} of an iteration, and {_who(figures, busiest)} at work as long "
        f"as {at_work:.0%} of it. {_what_helps(figures, busiest)}",
    )


def _who(figures: Figures, busiest: TierFigures) -> str:
    used = [tier for tier in figures.tiers if tier.busy_s]
    if len(used) > 1 and min(tier.busy_s for tier in used) > EVEN * busiest.busy_s:
        return f"all {len(used)} tiers are evenly"
    return f"{busiest.name}, the bottleneck, is"


def _what_helps(figures: Figures, busiest: TierFigures) -> str:
    if figures.update_floor_s and figures.phases_s["update"] > figures.update_floor_s:
        times = figures.phases_s["update"] / figures.update_floor_s
        ratio = f"The update takes {times:.2f} times what the tiers need for its bytes"
        return (
            f"{ratio} at their expected rates. More host memory, another tier or more micro-batches an iteration help."
        )
    return "More host memory, another tier or more micro-batches an iteration would help."


def _losses(run: Run) -> list[Finding]:
    bad = [step.number for step in run.steps if step.loss is not None and math.isnan(step.loss)]
    if bad:
        return [Finding("warning", f"The loss is no finite number in {len(bad)} steps, first in step {bad[0]}.")]
    if all(step.loss is None for step in run.steps):
        how = "engine.optimizer.record_loss(loss, text_tokens) after engine.step() records it"
        return [Finding("warning", f"No loss was recorded: {how}.")]
    return []


def _slow_tiers(figures: Figures) -> list[Finding]:
    found = []
    for tier in figures.tiers:
        if tier.of_expected is not None and tier.of_expected < SHORT:
            source = "measured at the start" if tier.facts.get("measured_bps") else "configured"
            rate = f"{tier.of_expected:.0%} of the {(tier.expected_bps or 0) / 1e9:.2f} GB/s that were {source}"
            found.append(Finding("warning", f"{tier.name} gives {rate}: other jobs, or other ranks, may use it too."))
        if tier.slowest_node is not None:
            found.append(Finding("warning", f"{tier.name} is slower on {tier.slowest_node} than on the other nodes."))
        if figures.iteration_s and tier.wait_s > WAITED * figures.iteration_s:
            found.append(
                Finding("warning", f"A rank's threads wait {tier.wait_s:.2f} s a step for their turn on {tier.name}.")
            )
    return found


def _wear(figures: Figures) -> list[Finding]:
    return [
        Finding(
            "warning",
            f"{tier.name}: {tier.wear.drive_writes:,.1f} drive writes a day; a drive rated for one, over five years, "
            f"is worn out after {tier.wear.rated_days:,.0f} days of training.",
        )
        for tier in figures.tiers
        if tier.wear is not None
        and tier.wear.drive_writes is not None
        and tier.wear.rated_days is not None
        and tier.wear.drive_writes > RATED_DRIVE_WRITES
    ]


def _journals(run: Run) -> list[Finding]:
    found = []
    if run.num_torn:
        found.append(Finding("warning", f"Lines cut short or damaged, and left out: {run.num_torn}."))
    for start in run.starts:
        missing = start.first["world_size"] - len(start.ranks)
        if missing:
            text = (
                f"{missing} of {start.first['world_size']} ranks' journals are missing: bytes are those of the others"
            )
            found.append(Finding("warning", f"{text}. Is 'telemetry.dir' on storage that all nodes share?"))
            break
    if run.num_redone:
        found.append(Finding("warning", f"Steps that were done again after a restart: {run.num_redone}."))
    starts = run.starts
    if any(later.began_s < earlier.ended_s for earlier, later in itertools.pairwise(starts)):
        found.append(Finding("warning", "Starts overlap in time: two runs wrote here, and their steps are mixed."))
    return found
