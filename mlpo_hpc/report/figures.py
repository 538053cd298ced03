"""The figures of a run: what a step takes and moves, what each tier gives, and what the drives suffer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mlpo_hpc.planner.wear import DAY_S, Wear
from mlpo_hpc.report.run import Moved, NodeKey, Run, Step


@dataclass(frozen=True)
class TierFigures:
    """One tier, over all steps that count. Bytes are of all nodes together, rates and shares of one node."""

    name: str
    facts: dict[str, Any]
    """What the lowest rank of the last start said."""
    read_bytes: float
    """A step."""
    written_bytes: float
    read_bps: float | None
    """While it moved any, on average of the nodes; None: it moved none."""
    write_bps: float | None
    expected_bps: float | None
    """Each way while the other way is used too, as measured at the start, else as configured; None: not known."""
    busy_s: float
    """A step, of the node whose ranks use it longest: the others wait for it."""
    busy_share: float
    """Of an iteration; 0 to 1."""
    wait_s: float
    """For tokens, a step of a rank."""
    slowest_node: str | None
    """Host that gets the least of it where nodes differ by more than `UNEVEN`."""
    wear: Wear | None
    """Of the node that writes most; None for shared storage, whose drives are the centre's."""

    @property
    def of_expected(self) -> float | None:
        """The slower way, in units of what was expected."""
        rates = [bps for bps in (self.read_bps, self.write_bps) if bps is not None]
        return min(rates) / self.expected_bps if rates and self.expected_bps else None


@dataclass(frozen=True)
class Figures:
    """Medians over all steps that count."""

    iteration_s: float | None
    """None where only one step was done."""
    phases_s: dict[str, float]
    update_floor_s: float | None
    """What the tiers need for the bytes of an update at their expected rates; None: those are not known."""
    found_share: float
    """Part of the state that was in host memory when an update began."""
    text_tokens_ps: float | None
    losses: tuple[float, float] | None
    """First and last that were recorded."""
    tiers: list[TierFigures]

    @property
    def busiest(self) -> TierFigures | None:
        """The tier that is at work the longest; None if none moves anything."""
        return max((tier for tier in self.tiers if tier.busy_s), key=lambda tier: tier.busy_s, default=None)


UNEVEN = 1.2
"""Factor by which a node's rate must fall short of the average to be named."""


def figures_of(run: Run) -> Figures:
    """Sum up a run."""
    steps = run.settled
    iteration_s = _median(step.iteration_s for step in steps)
    losses = [step.loss for step in run.steps if step.loss is not None]
    rates = [s.text_tokens / s.iteration_s for s in steps if s.text_tokens and s.iteration_s]
    tiers = [_tier(name, run, steps) for name in dict.fromkeys(name for step in steps for name in step.tiers)]
    return Figures(
        iteration_s,
        {phase: _median(step.phases_s[phase] for step in steps) or 0.0 for phase in steps[0].phases_s},
        _floor_s(tiers, len(run.starts[-1].nodes)),
        _share(sum(s.memory["found_bytes"] for s in steps), sum(s.memory["state_bytes"] for s in steps)),
        statistics.median(rates) if rates else None,
        (losses[0], losses[-1]) if losses else None,
        tiers,
    )


def _tier(name: str, run: Run, steps: Sequence[Step]) -> TierFigures:
    nodes = {
        node: _of_node(name, node, steps) for node in dict.fromkeys(n for s in steps for n in s.tiers.get(name, ()))
    }
    training_s = math.fsum(step.iteration_s or 0.0 for step in steps)
    at_once = [list(step.tiers[name].values()) for step in steps if step.tiers.get(name)]
    facts: dict[str, Any] = next(
        (ranks[r]["tiers"][name] for ranks in _said(run) for r in sorted(ranks) if name in ranks[r]["tiers"]), {}
    )
    busy_s = math.fsum(max(moved.busy_s for moved in of_nodes) for of_nodes in at_once)
    read_bps, write_bps = (_mean_of_known(moved.bps(way) for moved in nodes.values()) for way in ("read", "write"))
    return TierFigures(
        name,
        facts,
        sum(moved.bytes_read for moved in nodes.values()) / len(steps),
        sum(moved.bytes_written for moved in nodes.values()) / len(steps),
        read_bps,
        write_bps,
        expected_bps(facts),
        busy_s / len(steps),
        min(1.0, _share(busy_s, training_s)),
        statistics.fmean(moved.wait_s for of_nodes in at_once for moved in of_nodes),
        _slowest(nodes),
        None if facts.get("shared") else _wear(name, facts, nodes, steps),
    )


def _said(run: Run) -> list[dict[int, dict[str, Any]]]:
    return [start.ranks for start in reversed(run.starts)]


def _of_node(name: str, node: NodeKey, steps: Sequence[Step]) -> Moved:
    """Sums over the steps."""
    moved = [step.tiers[name][node] for step in steps if node in step.tiers.get(name, ())]

    def total(of: Callable[[Moved], float]) -> float:
        return math.fsum(map(of, moved))

    return Moved(
        total(lambda m: m.bytes_read),
        total(lambda m: m.bytes_written),
        total(lambda m: m.read_s),
        total(lambda m: m.write_s),
        total(lambda m: m.wait_s),
        moved[-1].exclusive,
    )


def expected_bps(facts: dict[str, Any]) -> float | None:
    """Bytes per second of a node, each way at the same time: as measured at the start, else as placement weighs it."""
    if facts.get("measured_bps"):
        return float(facts["measured_bps"])
    if facts.get("read_bps") and facts.get("write_bps"):
        return 2 / (1 / float(facts["read_bps"]) + 1 / float(facts["write_bps"]))
    return None


def _floor_s(tiers: Sequence[TierFigures], num_nodes: int) -> float | None:
    used = [tier for tier in tiers if tier.read_bytes or tier.written_bytes]
    rates = [tier.expected_bps for tier in used if tier.expected_bps]
    if not used or len(rates) < len(used):
        return None
    most = max(sum(tier.read_bytes for tier in used), sum(tier.written_bytes for tier in used))
    return most / num_nodes / sum(rates)


def _slowest(nodes: dict[NodeKey, Moved]) -> str | None:
    rates = {
        node: min(bps for bps in (moved.bps("read"), moved.bps("write")) if bps is not None)
        for node, moved in nodes.items()
        if moved.busy_s and (moved.bps("read") or moved.bps("write"))
    }
    if len(rates) < 2:
        return None
    slowest = min(rates, key=lambda node: rates[node])
    return slowest[0] if rates[slowest] * UNEVEN < statistics.fmean(rates.values()) else None


def _wear(name: str, facts: dict[str, Any], nodes: dict[NodeKey, Moved], steps: Sequence[Step]) -> Wear | None:
    """Each node writes in the steps that it takes part in: after a restart there may be others."""
    took_s = {
        node: math.fsum(step.iteration_s or 0.0 for step in steps if node in step.tiers.get(name, ())) for node in nodes
    }
    rates = [moved.bytes_written / took_s[node] for node, moved in nodes.items() if took_s[node]]
    if not rates:
        return None
    a_day, size = max(rates) * DAY_S, facts.get("filesystem_bytes")
    return Wear(name, a_day, a_day / size if size else None)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _mean_of_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
