"""Draw docs/how-it-works.png: two iterations of one rank, as the planner simulates them.

python docs/how_it_works.py docs/how-it-works.png
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator

from mlpo_hpc.planner.clock import Clock, Process
from mlpo_hpc.planner.drive import Drive
from mlpo_hpc.planner.machine import WAYS, PlanTier
from mlpo_hpc.planner.policy import OURS
from mlpo_hpc.planner.rank import Rank, Share, have_ended
from mlpo_hpc.planner.simulate import weights_of

TIERS = (PlanTier("nvme", 2e9, 2e9), PlanTier("pfs", 1e9, 1e9))
SHARE = Share(num_subgroups=12, subgroup_items=1e8, host_bytes=5.05e9, forward_s=0.5, backward_s=1.0, update_s=0.08)
STEPS, SHOWN = 6, (2, 4)
"""The first iterations begin with nothing in memory; those that are shown repeat themselves."""
SAMPLE_S = 0.01
MEMORY, UPDATE = "#cfe8cf", "black"
COLOURS = {"nvme": "tab:blue", "pfs": "tab:orange"}
PHASES = {"forward": "#f4f4f4", "backward": "#e6e6e6", "update": "white"}
LANES = [(way, tier) for way in WAYS for tier in range(len(TIERS))]


class Span(NamedTuple):
    """A chunk on its way, or the update of a subgroup."""

    way: str
    tier: int
    subgroup: int
    begin_s: float
    end_s: float


class Watched(Rank):
    """A simulated rank of which is noted what it does, and when."""

    def __init__(self, clock: Clock, drives: list[Drive]) -> None:
        super().__init__(clock, drives, weights_of(OURS, TIERS), OURS, SHARE)
        self.spans: list[Span] = []
        self.samples: list[tuple[float, list[float]]] = []
        """When, and which part of each subgroup was in host memory."""

    def _move(self, way: str, tier: int, nbytes: float, then: Callable[[], None]) -> None:
        assert isinstance(then, partial)  # of a subgroup and a chunk
        super()._move(way, tier, nbytes, partial(self._note, way, tier, nbytes, then))

    def _note(self, way: str, tier: int, nbytes: float, then: partial[None]) -> None:
        now_s = self._clock.now_s
        self.spans.append(Span(way, tier, then.args[0], now_s - nbytes / TIERS[tier].rate_bps(way), now_s))
        then()

    def _change(self, subgroup: int) -> Process:
        begin_s = self._clock.now_s
        yield from super()._change(subgroup)
        self.spans.append(Span("update", -1, subgroup, begin_s, self._clock.now_s))

    def sample(self) -> Process:
        """Look into host memory again and again, to the end."""
        while not have_ended([self], STEPS):
            held = {subgroup: len(found.present) for subgroup, found in self._host._held.items()}
            parts = [held.get(subgroup, 0) / OURS.chunks for subgroup in range(SHARE.num_subgroups)]
            self.samples.append((self._clock.now_s, parts))
            yield SAMPLE_S


def watch() -> Watched:
    """Simulate the iterations of one rank."""
    clock = Clock()
    rank = Watched(clock, [Drive(clock, tier) for tier in TIERS])
    clock.start(rank.run(STEPS, [rank]))
    clock.start(rank.sample())
    clock.run()
    return rank


def draw(rank: Watched, path: str) -> None:
    """Subgroups above, the lanes of the tiers below, on one time axis."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    _shade_phases(rank, upper, lower)
    times = [time for time, _ in rank.samples]
    for subgroup in range(SHARE.num_subgroups):
        there = [subgroup + 0.8 * parts[subgroup] - 0.4 for _, parts in rank.samples]
        upper.fill_between(times, subgroup - 0.4, there, color=MEMORY, step="post", lw=0)
    for span in rank.spans:
        _draw_span(span, upper, lower)
    upper.set_yticks(range(SHARE.num_subgroups))
    upper.set(ylabel="subgroup")
    lower.set_yticks(range(len(LANES)), [f"{TIERS[tier].name} {way}s" for way, tier in LANES])
    lower.invert_yaxis()
    begin_s, end_s = (_begins(rank)[number] for number in SHOWN)
    lower.set(xlabel="seconds (simulated)", xlim=(begin_s, end_s))
    lower.xaxis.set_major_locator(FixedLocator([begin_s + second for second in range(int(end_s - begin_s) + 1)]))
    lower.xaxis.set_major_formatter(lambda time_s, _: f"{time_s - begin_s:.0f}")
    upper.legend(handles=_legend(), loc="upper center", bbox_to_anchor=(0.5, 1.12), ncols=4, frameon=False)
    figure.savefig(path, dpi=110)


def _begins(rank: Watched) -> list[float]:
    """When each iteration begins, and the last one ends."""
    begins = [0.0]
    for times in rank.times:
        begins.append(begins[-1] + SHARE.forward_s + times.backward_s + times.update_s)
    return begins


def _shade_phases(rank: Watched, upper: Any, lower: Any) -> None:
    for number in range(*SHOWN):
        at_s = _begins(rank)[number]
        lasts_s = (SHARE.forward_s, rank.times[number].backward_s, rank.times[number].update_s)
        for (phase, colour), duration_s in zip(PHASES.items(), lasts_s, strict=True):
            for axes in (upper, lower):
                axes.axvspan(at_s, at_s + duration_s, color=colour, zorder=0, lw=0)
            upper.text(at_s + duration_s / 2, SHARE.num_subgroups - 0.3, phase, ha="center", fontsize="small")
            at_s += duration_s


def _draw_span(span: Span, upper: Any, lower: Any) -> None:
    lasts_s = span.end_s - span.begin_s
    if span.way == "update":
        upper.barh(span.subgroup, lasts_s, 0.8, left=span.begin_s, color=UPDATE)
        return
    colour = COLOURS[TIERS[span.tier].name]
    reads = span.way == "read"
    # Reading in the lower half of a row, writing in the upper one.
    upper.barh(span.subgroup + (-0.2 if reads else 0.2), lasts_s, 0.3, left=span.begin_s, color=colour, lw=0)
    lower.barh(LANES.index((span.way, span.tier)), lasts_s, 0.7, left=span.begin_s, color=colour, lw=0)


def _legend() -> list[Patch]:
    tiers = [Patch(color=colour, label=f"{name}: read (below), written (above)") for name, colour in COLOURS.items()]
    return [Patch(color=MEMORY, label="in host memory"), Patch(color=UPDATE, label="updated"), *tiers]


if __name__ == "__main__":
    draw(watch(), sys.argv[1])
