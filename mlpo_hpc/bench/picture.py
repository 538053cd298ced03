"""The result as pictures: bars of all systems, and one iteration of each along time."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mlpo_hpc.bench.result import Outcome, rows

PHASES = ("forward", "backward", "update")
COLOURS = {"forward": "tab:green", "backward": "tab:blue", "update": "tab:orange"}
SHOWN = ("nvme", "paper", "ours")
"""Systems of the timeline."""
NUM_BINS = 40
"""Of a timeline's bandwidth."""


def draw_bench(outcome: Outcome, path: str | Path) -> None:
    """Bars of the phases, a plot for each accumulation; a line across an update shows how short it could be."""
    accumulations = [ga for ga in outcome.conditions.accumulations if any(outcome.of(s, ga) for s in outcome.systems)]
    figure = _figure(5 * max(1, len(accumulations)), 4.5)
    for axes, accumulation in zip(_row_of(figure, len(accumulations)), accumulations, strict=True):
        shown = [row for row in rows(outcome) if row["accumulation"] == accumulation]
        _draw_bars(axes, shown)
        axes.set(title=f"micro-batches an iteration: {accumulation}", ylabel="seconds")
        axes.legend()
    figure.savefig(path, dpi=110)


def draw_timeline(outcome: Outcome, path: str | Path) -> None:
    """One iteration of each shown system on one time axis, and below it how fast the tiers moved in ours."""
    shown = [system for system in SHOWN if system in outcome.timelines]
    figure = _figure(9, 5)
    upper, lower = figure.subplots(2, 1, sharex=True)
    for height, system in enumerate(reversed(shown)):
        for phase, begin_s, end_s in outcome.timelines[system]["phases"]:
            upper.barh(height, end_s - begin_s, left=begin_s, color=COLOURS[phase])
    upper.set_yticks(range(len(shown)), list(reversed(shown)))
    for phase in PHASES:
        upper.barh(0, 0, color=COLOURS[phase], label=phase)
    upper.legend(loc="lower right", ncols=3)
    _draw_bandwidth(lower, outcome.timelines.get("ours", {"tiers": {}}))
    lower.set(xlabel="seconds of an iteration", ylabel="ours, MB/s")
    figure.savefig(path, dpi=110)


def bandwidth(spans: Iterable[tuple[float, float, int]], end_s: float, num_bins: int) -> list[float]:
    """Bytes per second in equal parts of a time that begins at 0.

    Parameters
    ----------
    spans : iterable of (begin_s, end_s, bytes)
        What moved; evenly between its begin and end.
    end_s : float
        Where the last part ends.
    num_bins : int
        How many parts.
    """
    bin_s = end_s / num_bins
    moved = [0.0] * num_bins
    for begin, end, nbytes in spans:
        for number in range(max(0, int(begin / bin_s)), min(num_bins, int(end / bin_s) + 1)):
            overlap_s = min(end, (number + 1) * bin_s) - max(begin, number * bin_s)
            moved[number] += nbytes * max(0.0, overlap_s) / max(1e-9, end - begin)
    return [nbytes / bin_s for nbytes in moved]


def _draw_bars(axes: Any, shown: list[dict[str, Any]]) -> None:
    names = [row["system"] for row in shown]
    below = [0.0] * len(shown)
    for phase in PHASES:
        heights = [row[f"{phase}_s"]["median"] for row in shown]
        axes.bar(names, heights, bottom=below, color=COLOURS[phase], label=phase)
        if phase != "update":
            below = [low + height for low, height in zip(below, heights, strict=True)]
    floors = [
        (place, low + row["floor_s"])
        for place, (low, row) in enumerate(zip(below, shown, strict=True))
        if row["floor_s"]
    ]
    for place, height in floors:
        axes.hlines(height, place - 0.4, place + 0.4, color="black", label="floor" if place == floors[0][0] else None)
    axes.tick_params(axis="x", rotation=30)


def _draw_bandwidth(axes: Any, timeline: dict[str, Any]) -> None:
    end_s = max((end for _, _, end in timeline.get("phases", ())), default=0.0)
    for name, ways in timeline["tiers"].items():
        for way, style in (("read", "-"), ("written", "--")):
            bps = bandwidth(ways[way], end_s, NUM_BINS)
            middles = [(number + 0.5) * end_s / NUM_BINS for number in range(NUM_BINS)]
            axes.plot(middles, [rate / 1e6 for rate in bps], style, label=f"{name}, {way}")
    if timeline["tiers"]:
        axes.legend(ncols=2)
    axes.set_ylim(bottom=0)


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _row_of(figure: Any, count: int) -> list[Any]:
    return list(figure.subplots(1, count, squeeze=False)[0]) if count else []
