"""The result as tables for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from mlpo_hpc.bench.result import TIMES, Outcome, ratios, rows
from mlpo_hpc.bench.systems import SYSTEMS

MEANINGS = {
    "update_vs_nvme": "update: stock with NVMe offload takes this many times ours",
    "update_vs_paper_policies": "update: the paper's policies take this many times ours",
    "update_vs_floor": "update: ours, in units of its floor",
    "iteration_vs_nvme": "iteration: stock with NVMe offload takes this many times ours",
    "iteration_ga8_vs_cpu_plus_floor": "iteration of 8 micro-batches: ours, in units of stock in memory plus our floor",
    "reusable_host_share": "part of host memory with state for the next update",
}

WIDTH = 200


def show(outcome: Outcome) -> None:
    """Print it to stdout."""
    console = Console(color_system=None, width=WIDTH)  # a narrow terminal breaks lines better than columns
    console.print(times_table(outcome))
    found = ratios(outcome)
    if found:
        console.print(ratios_table(found))
    for system in outcome.systems:
        console.print(f"{system}: {SYSTEMS[system]}", highlight=False)
    if outcome.swap is not None:
        swap = outcome.swap
        console.print(f"nvme ran with queue depth {swap.queue_depth}, sub_group_size {swap.sub_group_size:,}")
    for note in outcome.notes:
        console.print(f"note: {note}", highlight=False)


def times_table(outcome: Outcome) -> Table:
    """A line for each system and accumulation."""
    table = Table(title="seconds an iteration, median (least - most)", title_justify="left")
    for name in ("system", "micro-batches", "text tokens", *(name.removesuffix("_s") for name in TIMES)):
        table.add_column(name, justify="left" if name == "system" else "right")
    for name in ("GB/s read/written", "floor", "update/floor"):
        table.add_column(name, justify="right")
    for row in rows(outcome):
        table.add_row(
            row["system"],
            str(row["accumulation"]),
            str(row["text_tokens"]),
            *(_spread(row[name]) for name in TIMES),
            "  ".join(_rate(name, rates) for name, rates in row["tiers"].items()),
            _number(row["floor_s"]),
            _number(row["update_to_floor"]),
        )
    return table


def ratios_table(found: dict[str, dict[str, float]]) -> Table:
    """A line for each ratio, over rounds."""
    table = Table(title="ratios, median (least - most)", title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    for name, value in found.items():
        table.add_row(MEANINGS[name], _spread(value))
    return table


def _rate(name: str, rates: dict[str, Any]) -> str:
    return f"{name} {rates['read_bps'] / 1e9:.2f}/{rates['write_bps'] / 1e9:.2f}"


def _spread(value: dict[str, float]) -> str:
    return f"{value['median']:.3g} ({value['min']:.3g} - {value['max']:.3g})"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
