"""``mlpo probe``: how fast directories are, as tiers of a job would use them."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from mlpo_hpc.cluster.crowd import Ranks, run_together
from mlpo_hpc.errors import MlpoError, StorageError, here
from mlpo_hpc.storage.bandwidth import CROWDS, LOADS, Bandwidth, measure_bandwidth
from mlpo_hpc.storage.filesystem import FileSystem, describe

EXAMPLES = """
\b
Examples:
  mlpo probe /local/scratch $SCRATCH/run            4 processes of its own
  mlpo probe nvme=/local/scratch pfs=$SCRATCH/run --json
  srun -N1 -n4 mlpo probe $SCRATCH/run              the tasks of srun
"""
MOST_SPACE = 16
"""Part of the free space that is written: one over this."""


@dataclass(frozen=True)
class Wish:
    """A directory to measure, and the name of its tier."""

    name: str
    directory: str


@dataclass(frozen=True)
class Finding:
    """What was found out about a directory."""

    wish: Wish
    filesystem: FileSystem
    num_ranks: int
    bandwidth: Bandwidth

    def warnings(self) -> list[str]:
        """What one must know to read the figures."""
        found = []
        if self.filesystem.is_memory:
            found.append(f"{self.filesystem.type} is memory: this is no storage")
        elif not self.bandwidth.direct:
            found.append("no O_DIRECT here: bytes went through the page cache, which was dropped after each piece")
        return found

    def tier(self) -> dict[str, Any]:
        """As the configuration takes it."""
        rates = {f"{way}_bps": round(self.bandwidth.best_bps(way)) for way in ("read", "write")}
        return {"name": self.wish.name, "dir": self.wish.directory, **rates}

    def details(self) -> dict[str, Any]:
        """All of it, for programs."""
        return {
            **self.tier(),
            "filesystem": self.filesystem.type,
            "ranks": self.num_ranks,
            "full_duplex": self.bandwidth.is_full_duplex,
            "turns_pay": self.bandwidth.turns_pay,
            "rounds_bps": {
                f"{load} {crowd}": [round(bps) for bps in rates]
                for (crowd, load), rates in self.bandwidth.rounds_bps.items()
            },
            "warnings": self.warnings(),
        }


@click.command(epilog=EXAMPLES)
@click.argument("directories", nargs=-1, required=True, metavar="[NAME=]DIR...")
@click.option(
    "--ranks", type=click.IntRange(1), default=4, show_default=True, help="Processes, where no launcher starts several."
)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Each figure is their median.")
@click.option("--seconds", type=click.FloatRange(0.05), default=1.0, show_default=True, help="For each load.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; its 'mlp_offload' is a section that works.")
def probe(directories: tuple[str, ...], ranks: int, rounds: int, seconds: float, as_json: bool) -> None:
    """Measure how fast each DIR is: read, written and both at once, by one rank alone and by all at once.

    Fresh files, without the page cache; nothing is left behind. Give a directory on each storage that a job may use.
    """
    wishes = _wishes(directories)
    try:
        findings = run_together(ranks, partial(_measure_all, wishes, rounds, seconds))
    except (MlpoError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if findings is not None:
        click.echo(json.dumps(_plain(findings), indent=1)) if as_json else _show(findings)


def _wishes(directories: tuple[str, ...]) -> list[Wish]:
    pairs = [text.partition("=") if "=" in text else (f"tier{i}", "=", text) for i, text in enumerate(directories)]
    wishes = [Wish(name, os.path.abspath(directory)) for name, _, directory in pairs]
    for wish in wishes:
        if not os.path.isdir(wish.directory):
            raise click.UsageError(f"{wish.directory} is no directory")
    if len({wish.name for wish in wishes}) < len(wishes):
        raise click.UsageError("two directories have one name")
    return wishes


def _measure_all(wishes: list[Wish], rounds: int, seconds: float, ranks: Ranks) -> list[Finding] | None:
    """Collective over `ranks`. Findings on the first one, None on the others."""
    hosts = ranks.allgather(os.uname().nodename)
    if len(set(hosts)) > 1:
        raise StorageError(f"the ranks are on {len(set(hosts))} hosts: a node is what is measured, start with srun -N1")
    bar = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    shown = ranks.rank == 0 and sys.stderr.isatty()
    findings = []
    with Progress(*bar, console=Console(stderr=True), disable=not shown) as progress:
        for number, wish in enumerate(wishes, start=1):
            if ranks.rank == 0 and not shown:
                click.echo(f"[{number}/{len(wishes)}] {wish.directory}, {ranks.size} ranks", err=True)
            task = progress.add_task(wish.directory, total=rounds * len(LOADS) * len(CROWDS))
            filesystem = describe(wish.directory)
            room_bytes = min(ranks.allgather(filesystem.free_bytes)) // MOST_SPACE
            if room_bytes < ranks.size * 2**20:
                raise StorageError(f"too little space to measure on {here(wish.directory)}: {filesystem.free_bytes:,}")
            told = partial(progress.advance, task)
            found = measure_bandwidth(wish.directory, ranks, rounds, seconds, room_bytes, told)
            findings.append(Finding(wish, filesystem, ranks.size, found))
    return findings if ranks.rank == 0 else None


def _plain(findings: list[Finding]) -> dict[str, Any]:
    return {
        "mlp_offload": {"tiers": [finding.tier() for finding in findings]},
        "measured": [finding.details() for finding in findings],
    }


def _show(findings: list[Finding]) -> None:
    table = Table(title=f"GB/s of {findings[0].num_ranks} ranks, median (least - most)", title_justify="left")
    for name in ("directory", "load", *CROWDS):
        table.add_column(name, justify="left" if name in ("directory", "load") else "right")
    for finding in findings:
        for load in LOADS:
            first = finding.wish.directory if load == "read" else ""
            name = "both, each way" if load == "both" else load
            table.add_row(first, name, *(_spread(finding.bandwidth.rounds_bps[crowd, load]) for crowd in CROWDS))
    Console(color_system=None, soft_wrap=True).print(table)
    for finding in findings:
        words = ["full duplex" if finding.bandwidth.is_full_duplex else "half duplex"]
        words.append("turns pay" if finding.bandwidth.turns_pay else "turns do not pay")
        click.echo(f"{finding.wish.directory} ({finding.filesystem.type}): {', '.join(words)}")
        for warning in finding.warnings():
            click.echo(f"  warning: {warning}")


def _spread(rates: list[float]) -> str:
    ordered = sorted(rates)
    middle = ordered[len(ordered) // 2]
    return f"{middle / 1e9:.2f} ({ordered[0] / 1e9:.2f} - {ordered[-1] / 1e9:.2f})"
