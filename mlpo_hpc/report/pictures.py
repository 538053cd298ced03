"""The pictures of a run: loss, phases, tiers, host memory, waits for tokens."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from html import escape

from mlpo_hpc.report.chart import Chart, Number, Series
from mlpo_hpc.report.figures import TierFigures
from mlpo_hpc.report.run import Moved, Run, Step

HALF = 470
"""Width of a chart that has another one beside it."""
NUM_TIER_STYLES = 4
UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def draw_loss(run: Run) -> str:
    """Loss over steps; gaps where none was recorded, or it was no finite number."""
    losses = [step.loss if step.loss is not None and math.isfinite(step.loss) else None for step in run.steps]
    return _figure(run, "", [Series("loss", "c-loss", losses)], "Loss over steps", from_zero=False)


def draw_phases(run: Run) -> str:
    """Seconds of each phase, one upon the other; what is left of an iteration is on top."""
    phases = [
        Series(name, f"c-{name}", [step.phases_s[name] for step in run.steps])
        for name in ("forward", "backward", "update")
    ]
    other = Series("other", "c-other", [_other_s(step) for step in run.steps])
    return _figure(run, "s", [*phases, other], "A step by phase", stacked=True)


def _other_s(step: Step) -> float:
    return max(0.0, (step.iteration_s or 0.0) - sum(step.phases_s.values()))


def draw_rates(run: Run, tier: TierFigures) -> str:
    """GB/s of a node while the tier moves bytes, on average of the nodes, beside what was expected."""
    lines = [
        Series(name, f"c-{name}", [_mean(step, tier.name, partial(_gbps, way=way)) for step in run.steps])
        for name, way in (("read", "read"), ("written", "write"))
    ]
    if tier.expected_bps:
        name = "measured" if tier.facts.get("measured_bps") else "configured"
        lines.append(Series(name, "c-expected", [tier.expected_bps / 1e9] * len(run.steps), dashed=True))
    return _figure(run, "GB/s", lines, "Rate of a node", width=HALF)


def draw_bytes(run: Run, tier: TierFigures) -> str:
    """Bytes that all nodes move in each step."""
    moved = [step.tiers.get(tier.name, {}).values() for step in run.steps]
    read = [sum(of_node.bytes_read for of_node in nodes) for nodes in moved]
    written = [sum(of_node.bytes_written for of_node in nodes) for nodes in moved]
    unit, scale = byte_unit(max([*read, *written]))
    lines = [
        Series(name, f"c-{name}", [nbytes / scale for nbytes in values])
        for name, values in (("read", read), ("written", written))
    ]
    return _figure(run, unit, lines, "Moved in a step, all nodes", width=HALF)


def draw_busy(run: Run, tiers: Sequence[TierFigures]) -> str:
    """Part of each iteration in which a tier is at work, on average of the nodes."""
    lines = [
        Series(tier.name, tier_style(place), [_busy_percent(step, tier.name) for step in run.steps])
        for place, tier in enumerate(tiers)
    ]
    return _figure(run, "%", lines, "Part of an iteration in which a tier moves bytes")


def _busy_percent(step: Step, tier: str) -> Number:
    busy_s = _mean(step, tier, lambda moved: moved.busy_s)
    return min(100.0, 100 * busy_s / step.iteration_s) if busy_s is not None and step.iteration_s else None


def draw_found(run: Run) -> str:
    """Part of the state that was in host memory when an update began, and of subgroups that were there whole."""
    found = [_percent(step.memory["found_bytes"], step.memory["state_bytes"]) for step in run.steps]
    hits = [_percent(s.memory["cache_hits"], s.memory["cache_hits"] + s.memory["cache_misses"]) for s in run.steps]
    lines = [Series("state found", "c-share", found), Series("cache hits", "c-forward", hits)]
    return _figure(run, "%", lines, "State found in host memory", width=HALF)


def draw_waits(run: Run, tiers: Sequence[TierFigures]) -> str:
    """Seconds for which a rank's threads wait for their turn in each step."""
    lines = [
        Series(tier.name, tier_style(place), [_mean(step, tier.name, lambda moved: moved.wait_s) for step in run.steps])
        for place, tier in enumerate(tiers)
    ]
    return _figure(run, "s", lines, "Wait for tokens in a step", width=HALF)


def byte_unit(most_bytes: float) -> tuple[str, float]:
    """Unit for sizes up to that one, and its bytes."""
    return next(((unit, scale) for unit, scale in UNITS if most_bytes >= scale), UNITS[-1])


def tier_style(place: int) -> str:
    """Class that colours the n-th tier."""
    return f"c-tier{place % NUM_TIER_STYLES}"


def _figure(
    run: Run,
    unit: str,
    series: list[Series],
    label: str,
    stacked: bool = False,
    from_zero: bool = True,
    width: int = 2 * HALF + 20,
) -> str:
    restarts = [next(n for n in start.numbers) for start in run.starts[1:] if start.numbers]
    chart = Chart([step.number for step in run.steps], unit, series, stacked, restarts, from_zero, width)
    legend = "".join(
        f'<span><i class="{one.style}{" dashed" if one.dashed else ""}"></i>{escape(one.name)}</span>' for one in series
    )
    title = f"{label}, {unit}" if unit else label
    caption = f'<figcaption class="legend"><b>{escape(title)}</b>{legend}</figcaption>'
    return f"<figure>{caption}{chart.svg(label)}</figure>"


def _gbps(moved: Moved, way: str) -> Number:
    bps = moved.bps(way)
    return None if bps is None else bps / 1e9


def _mean(step: Step, tier: str, of: Callable[[Moved], Number]) -> Number:
    """On average of the nodes of which it is known."""
    known = [value for moved in step.tiers.get(tier, {}).values() if (value := of(moved)) is not None]
    return statistics.fmean(known) if known else None


def _percent(part: float, whole: float) -> Number:
    return 100 * part / whole if whole else None
