"""``mlpo clean``: remove what dead jobs left behind."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from dataclasses import asdict

import click

from mlpo_hpc.cluster.job import Slurm
from mlpo_hpc.errors import StorageError
from mlpo_hpc.storage.leftovers import Leftover, Rule
from mlpo_hpc.storage.leftovers import clean as clean_directory

EXAMPLES = """
\b
Examples:
  mlpo clean --dry-run /local/scratch $SCRATCH/mlpo     what would be removed, and what not, and why
  mlpo clean $SCRATCH/mlpo/*/                           directories are not searched: name each
  mlpo clean --older-than 7d --unknown $SCRATCH/mlpo    also what other hosts left, where Slurm cannot tell
"""
UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _seconds(_: click.Context, __: click.Parameter, text: str | None) -> float:
    """``90s``, ``30m``, ``12h`` or ``1d``."""
    if text is None:
        return 0.0
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text, re.ASCII)
    if found is None:
        raise click.BadParameter(f"{text!r} is no age, such as 30m, 12h or 1d")
    return float(found[1]) * UNITS_S[found[2]]


@click.command(epilog=EXAMPLES)
@click.argument("directories", nargs=-1, required=True, metavar="DIR...", type=click.Path(exists=True, file_okay=False))
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@click.option(
    "--older-than", "older_than_s", callback=_seconds, metavar="AGE", help="Keep what is younger, such as 1d."
)
@click.option(
    "--unknown",
    is_flag=True,
    help="Also remove what nobody can be asked about; that it is not in use is for you to know.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def clean(directories: tuple[str, ...], dry_run: bool, older_than_s: float, unknown: bool, as_json: bool) -> None:
    """Remove what jobs that are dead left in each DIR: a tier's directory, or /dev/shm, or the temporary directory.

    Only what mlpo_hpc made for the moment, told by name and content, of this user. What a job that lives may use
    stays: nobody may have it locked, and Slurm must say that its job is over, or else its process on this host be
    gone. Checkpoints, traces and what "keep" leaves are never touched. Exit code 1 if something could not be removed.
    """
    rule = Rule(Slurm(os.environ), older_than_s, unknown, dry_run)
    found: list[Leftover] = []
    faults: list[str] = []
    for directory in dict.fromkeys(map(os.path.abspath, directories)):
        try:
            for leftover in clean_directory(directory, rule):
                found.append(leftover)
                if not as_json:
                    click.echo(_line(leftover))
        except StorageError as error:
            faults.append(str(error))
    if as_json:
        click.echo(json.dumps({"leftovers": [asdict(leftover) for leftover in found], "errors": faults}, indent=1))
    else:
        click.echo(_summary(found))
    for fault in faults:
        click.echo(f"mlpo clean: {fault}", err=True)
    sys.exit(1 if faults or any(leftover.outcome == "failed" for leftover in found) else 0)


def _line(leftover: Leftover) -> str:
    outcome = "would go" if leftover.outcome == "dead" else leftover.outcome
    owner = f" ({leftover.owner})" if leftover.owner else ""
    return f"{outcome:8}  {_visible(leftover.path)}  {leftover.size_bytes / 1e6:,.1f} MB: {leftover.reason}{owner}"


def _visible(text: str) -> str:
    """Whatever others put into a name, a terminal shows it and does not obey."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def _summary(found: list[Leftover]) -> str:
    if not found:
        return "nothing was left behind"
    counts = Counter("would go" if leftover.outcome == "dead" else leftover.outcome for leftover in found)
    freed_bytes = sum(leftover.size_bytes for leftover in found if leftover.outcome in ("removed", "dead"))
    freed = f"{freed_bytes / 1e6:,.1f} MB {'to be freed' if 'would go' in counts else 'freed'}"
    return "; ".join([", ".join(f"{count} {outcome}" for outcome, count in counts.items()), freed])
