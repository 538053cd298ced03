"""``mlpo sbatch``: write a batch script for this machine, or another one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from mlpo_hpc.batch.machine import GENERIC, find_machine
from mlpo_hpc.batch.render import BatchJob, left_to_the_user, render
from mlpo_hpc.cluster.sites import find_site
from mlpo_hpc.errors import ConfigError

EXAMPLES = """
\b
Examples:
  mlpo sbatch --site frontier --nodes 4 --time 2:00:00 --account abc123 -o train.sbatch
  mlpo sbatch --requeue --nodes 2 --gpus 4 --script 'python train.py --resume "$MLPO_CHECKPOINT"' -o train.sbatch
  mlpo sbatch --bench -o bench.sbatch
"""


@click.command(epilog=EXAMPLES)
@click.option("--site", metavar="NAME", help="frontier, perlmutter, lumi, alps, jsc, generic.  [default: found out]")
@click.option("--nodes", type=int, help="How many.  [default: 1]")
@click.option("--time", metavar="LIMIT", help="As sbatch takes it.  [default: 00:30:00]")
@click.option("--account", metavar="NAME", help="Which project pays.")
@click.option("--partition", metavar="NAME", help="Instead of the site's usual one.")
@click.option("--gpus", type=int, metavar="N", help="Of a node, with a task for each.  [default: all, where known]")
@click.option(
    "--script", "command", metavar="COMMAND", help="What each task runs.  [default: examples/pretrain_gpt.py]"
)
@click.option(
    "--requeue", is_flag=True, help="Save before the time limit, and go on in the same job until all is done."
)
@click.option("--bench", is_flag=True, help="Run mlpo bench on one node instead.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="A new file.  [default: stdout]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the script, and what it leaves to you.")
def sbatch(
    site: str | None, requeue: bool, bench: bool, output: Path | None, as_json: bool, **wishes: str | int | None
) -> None:
    """Write a batch script for Slurm, with what is known of the site.

    What is not known is left to you: comments in the script say what, and so does this command.
    """
    if requeue and bench:
        raise click.UsageError("a benchmark is not requeued: give either --requeue or --bench")
    kind = "requeue" if requeue else "bench" if bench else "train"
    try:
        machine = find_machine(site or _this_site())
        job = BatchJob.model_validate({"kind": kind, **_given(wishes)})
    except ValidationError as error:
        raise click.UsageError("; ".join(_fault(dict(fault)) for fault in error.errors())) from error
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    text, left = render(machine, job), left_to_the_user(machine, job)
    if output is not None:
        _write(output, text)
    if as_json:
        click.echo(json.dumps({"site": machine.name, "script": text, "left_to_you": left}, indent=1))
        return
    if output is None:
        click.echo(text, nl=False)
    for line in left:
        click.echo(f"mlpo sbatch: left to you: {line}", err=True)


def _this_site() -> str:
    found = find_site(os.environ)
    return found.name if found else GENERIC


def _given(wishes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in wishes.items() if value is not None}


def _fault(fault: dict[str, Any]) -> str:
    """Which option, and why."""
    option = f"--{fault['loc'][0]} {fault['input']}: " if fault["loc"] else ""
    return f"{option}{fault['msg'].removeprefix('Value error, ')}"


def _write(path: Path, text: str) -> None:
    """A file that is there may have been changed by hand."""
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise click.ClickException(f"{path} is there already: remove it, or give another name") from None
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}") from error
