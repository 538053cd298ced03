"""A run as JSON, for programs."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from mlpo_hpc.report.figures import Figures
from mlpo_hpc.report.findings import findings_of
from mlpo_hpc.report.run import Run, Step


def plain(run: Run, figures: Figures) -> dict[str, Any]:
    """All of it: findings, figures, starts, and a line for each step; numbers that JSON has not are null."""
    found: dict[str, Any] = _finite(
        {
            "findings": [asdict(finding) for finding in findings_of(run, figures)],
            "figures": {
                **asdict(figures),
                "tiers": [{**asdict(tier), "of_expected": tier.of_expected} for tier in figures.tiers],
            },
            "starts": [
                {
                    "began_s": start.began_s,
                    "ended_s": start.ended_s,
                    "steps": [start.numbers[0], start.numbers[-1]] if start.numbers else None,
                    "ranks": {str(rank): facts for rank, facts in sorted(start.ranks.items())},
                }
                for start in run.starts
            ],
            "num_redone": run.num_redone,
            "num_torn": run.num_torn,
            "steps": [_plain_step(step) for step in run.steps],
        }
    )
    return found


def _plain_step(step: Step) -> dict[str, Any]:
    tiers = {name: {host: asdict(moved) for (host, _), moved in nodes.items()} for name, nodes in step.tiers.items()}
    rest = {key: value for key, value in vars(step).items() if key not in ("number", "tiers")}
    return {"step": step.number, **rest, "tiers": tiers}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
