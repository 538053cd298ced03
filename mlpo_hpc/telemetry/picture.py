"""A picture of a run: the loss, and where the time of each step went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PHASES = ("forward", "backward", "update")


def draw_run(history: list[dict[str, Any]], path: str | Path, title: str) -> None:
    """Draw loss and phases of the steps in `StepProgress.history` into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    steps = [step["step"] for step in history]
    upper.plot(steps, [step["loss"] for step in history], color="tab:red")
    upper.set(ylabel="loss (nats)", title=title)
    upper.grid(alpha=0.3)
    phases = [[step[f"{phase}_s"] for step in history] for phase in PHASES]
    rest = [max(0.0, step["iteration_s"] - sum(step[f"{phase}_s"] for phase in PHASES)) for step in history]
    lower.stackplot(steps, *phases, rest, labels=[*PHASES, "other"], alpha=0.8)
    lower.set(xlabel="step", ylabel="seconds")
    lower.set_ylim(bottom=0)
    lower.legend(loc="upper right", ncols=4)
    figure.savefig(path, dpi=110)
