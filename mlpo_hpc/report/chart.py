"""Charts over steps as inline SVG, coloured by the page's style: lines, stacked areas, restarts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

HEIGHT = 190
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 10, 26
MOST_POINTS = 240
"""Along a chart; longer runs are drawn in groups of steps."""
NUM_TICKS = 4
"""Steps of the value axis, more or less."""
STEP_TICK_WIDTH = 110
"""Room for the number of a step."""
Number = float | None


@dataclass(frozen=True)
class Series:
    """One line, or one layer of a stack."""

    name: str
    style: str
    """Class of the page's style that colours it."""
    values: Sequence[Number]
    """One for each step; None: not known, a gap."""
    dashed: bool = False


@dataclass
class Chart:
    """What is drawn over the steps of a run.

    Parameters
    ----------
    numbers : sequence of int
        Of the steps, growing.
    unit : str
        Of the values.
    series : list of Series
        Lines, or the layers of a stack from the bottom up.
    stacked : bool
        Whether they are layers.
    restarts : sequence of int
        Numbers of the steps with which a later start of the run began.
    from_zero : bool
        Whether the axis begins at 0.
    width : int
        In the units of the drawing.
    """

    numbers: Sequence[int]
    unit: str
    series: list[Series]
    stacked: bool = False
    restarts: Sequence[int] = ()
    from_zero: bool = True
    width: int = 960
    _scale: list[float] = field(default_factory=list, init=False)
    """Ticks of the value axis, which it begins and ends with."""

    def svg(self, label: str) -> str:
        """The drawing; `label` says in words what it shows."""
        numbers = [group[0] for group in _groups(self.numbers)]
        values = [[_typical(group) for group in _groups(one.values)] for one in self.series]
        shapes = self._areas(numbers, values) if self.stacked else self._lines(numbers, values)
        tips = self._tips(values)
        body = "".join([self._axes(), *shapes, *self._marks(), *tips])
        return (
            f'<svg viewBox="0 0 {self.width} {HEIGHT}" role="img" aria-label="{escape(label)}">'
            f"<title>{escape(label)}</title>{body}</svg>"
        )

    def _areas(self, numbers: Sequence[float], layers: Sequence[Sequence[Number]]) -> list[str]:
        if len(numbers) == 1:  # an area needs a width
            numbers, layers = [numbers[0] - 0.5, numbers[0] + 0.5], [[*layer, *layer] for layer in layers]
        tops = [[0.0] * len(numbers)]
        for layer in layers:
            tops.append([below + (value or 0.0) for below, value in zip(tops[-1], layer, strict=True)])
        self._fit(tops[-1])
        drawn = []
        for one, lower, upper in zip(self.series, tops, tops[1:], strict=False):
            there = list(zip(numbers, upper, strict=True))
            back = list(zip(reversed(numbers), reversed(lower), strict=True))
            points = " ".join(self._point(number, value) for number, value in [*there, *back])
            drawn.append(f'<polygon class="area {one.style}" points="{points}"/>')
        return drawn

    def _lines(self, numbers: Sequence[int], lines: Sequence[Sequence[Number]]) -> list[str]:
        self._fit([value for line in lines for value in line if value is not None])
        drawn = []
        for one, values in zip(self.series, lines, strict=True):
            dash = " dashed" if one.dashed else ""
            for piece in _pieces(numbers, values):
                points = " ".join(self._point(number, value) for number, value in piece)
                dot = ' stroke-linecap="round"' if len(piece) == 1 else ""
                points += f" {points}" if dot else ""
                drawn.append(f'<polyline class="line {one.style}{dash}" points="{points}"{dot}/>')
        return drawn

    def _fit(self, values: Sequence[float]) -> None:
        """Choose the ends of the value axis."""
        low, high = min(values, default=0.0), max(values, default=1.0)
        if self.from_zero:
            low = 0.0
        elif high == low:
            low = low - 0.5
        self._scale = _ticks(low, high if high > low else low + 1.0, NUM_TICKS)

    def _x(self, number: float) -> float:
        first, last = self.numbers[0], self.numbers[-1]
        if first == last:
            first, last = first - 1, last + 1
        return LEFT + (number - first) / (last - first) * (self.width - LEFT - RIGHT)

    def _y(self, value: float) -> float:
        low, high = self._scale[0], self._scale[-1]
        return TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def _point(self, number: float, value: float) -> str:
        return f"{self._x(number):.1f},{self._y(value):.1f}"

    def _axes(self) -> str:
        parts = []
        for tick in self._scale:
            y = self._y(tick)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{self.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick end" x="{LEFT - 7}" y="{y + 4:.1f}">{_short(tick)}</text>')
        for number in _step_ticks(self.numbers[0], self.numbers[-1], self.width // STEP_TICK_WIDTH):
            parts.append(f'<text class="tick middle" x="{self._x(number):.1f}" y="{HEIGHT - 8}">{number:,}</text>')
        return "".join(parts)

    def _marks(self) -> list[str]:
        return [
            f'<line class="restart" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}">'
            f"<title>restart at step {number:,}</title></line>"
            for number in self.restarts
            for x in [self._x(number - 0.5)]
        ]

    def _tips(self, values: Sequence[Sequence[Number]]) -> list[str]:
        """What the pointer is told over each group of steps."""
        groups = _groups(self.numbers)
        edges = [self._x(group[0] - 0.5) for group in groups] + [self._x(self.numbers[-1] + 0.5)]
        drawn = []
        for place, group in enumerate(groups):
            steps = f"step {group[0]:,}" if len(group) == 1 else f"steps {group[0]:,} to {group[-1]:,}"
            told = [
                f"{one.name}: {_short(of_one[place])} {self.unit}"
                for one, of_one in zip(self.series, values, strict=True)
                if of_one[place] is not None and not one.dashed
            ]
            left, right = max(LEFT, edges[place]), min(self.width - RIGHT, edges[place + 1])
            drawn.append(
                f'<rect class="tip" x="{left:.1f}" y="{TOP}" width="{max(0.0, right - left):.1f}" '
                f'height="{HEIGHT - TOP - BOTTOM}"><title>{escape(chr(10).join([steps, *told]))}</title></rect>'
            )
        return drawn


def _groups(values: Sequence[float] | Sequence[int] | Sequence[Number]) -> list[Sequence]:  # type: ignore[type-arg]
    """Neighbours together, so that at most `MOST_POINTS` groups are left."""
    size = -(-len(values) // MOST_POINTS)
    return [values[place : place + size] for place in range(0, len(values), size)]


def _typical(values: Sequence[Number]) -> Number:
    """Mean of what is known."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.fmean(known) if known else None


def _pieces(numbers: Sequence[int], values: Sequence[Number]) -> list[list[tuple[int, float]]]:
    """What lies between gaps."""
    pieces: list[list[tuple[int, float]]] = [[]]
    for number, value in zip(numbers, values, strict=True):
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append((number, value))
    return [piece for piece in pieces if piece]


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Round values that hold a range, `count` steps of them or a few less."""
    rough = (high - low) / count
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [count * step for count in range(first, last + 1)]


def _step_ticks(first: int, last: int, count: int) -> list[int]:
    """Round numbers of steps within a range, the first one too."""
    ticks = _ticks(first, max(last, first + count), count)
    inside = sorted({round(tick) for tick in ticks if first < tick <= last})
    if inside and inside[0] - first < (last - first) / 20:  # no room for both
        inside = inside[1:]
    return [first, *inside]


def _short(value: Number) -> str:
    """Three digits, or more where it is large."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
