"""A run that was measured, beside what the simulator makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlpo_hpc.planner.simulate import Forecast

COLUMNS = ("iteration_s", "forward_s", "backward_s", "update_s")


@dataclass(frozen=True)
class Comparison:
    """One system under one load."""

    load: str
    """Which model, or how many micro-batches an iteration."""
    system: str
    measured: dict[str, float]
    """Seconds, by `COLUMNS`."""
    forecast: Forecast

    def predicted(self, column: str) -> float:
        """Seconds."""
        return float(getattr(self.forecast, column))

    def error(self, column: str) -> float:
        """Of the prediction, in units of what was measured."""
        return self.predicted(column) / self.measured[column] - 1

    def plain(self) -> dict[str, Any]:
        """For programs."""
        predicted = {column: self.predicted(column) for column in COLUMNS}
        return {"load": self.load, "system": self.system, "measured": self.measured, "predicted": predicted}
