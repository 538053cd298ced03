"""``mlpo stripe``: show or set the Lustre striping of a directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import click
from pydantic import ValidationError

from mlpo_hpc.cli.tune import tune_directory
from mlpo_hpc.cluster.sites import Purpose, find_site
from mlpo_hpc.config import Striping
from mlpo_hpc.errors import MlpoError
from mlpo_hpc.storage.filesystem import describe
from mlpo_hpc.storage.striping import StripeLayout, get_layout, set_layout, wanted_layout

EXAMPLES = """
\b
Examples:
  mlpo stripe $SCRATCH/run                      show what new files get there
  mlpo stripe $SCRATCH/run --auto               as this site advises, else by a rule
  mlpo stripe $SCRATCH/run --count 4 --size 4MiB --pool flash
  mlpo stripe $SCRATCH/run --tune               measure a few layouts (under srun with all its tasks)
  mlpo stripe $SCRATCH/run --component end=4MiB,count=1 --component end=64MiB,count=4 --component count=32
"""


@click.command(epilog=EXAMPLES)
@click.argument("directory", type=click.Path(exists=True, file_okay=False))
@click.option("--auto", is_flag=True, help="Set what the site's profile says, else what our rule says.")
@click.option("--count", type=int, help="Stripes; -1: one on every storage target.")
@click.option("--size", help="Bytes on one stripe before the next, such as 4MiB.")
@click.option("--pool", help="Pool of storage targets.")
@click.option("--overstripe", is_flag=True, help="Let a target take several stripes.")
@click.option(
    "--component", "components", multiple=True, metavar="KEY=VALUE,...", help="An extent of a progressive layout."
)
@click.option(
    "--for",
    "purpose",
    type=click.Choice(["state", "wide"]),
    default="state",
    show_default=True,
    help="What --auto is for: files that one node writes each, or one file that many nodes write.",
)
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True, help="Nodes that write, for --auto.")
@click.option("--dry-run", is_flag=True, help="Say what would be set, and set nothing.")
@click.option("--tune", is_flag=True, help="Write and read with a few layouts and recommend one; sets nothing.")
@click.option(
    "--writers", type=click.IntRange(1), default=4, show_default=True, help="Files at once a rank, for --tune."
)
@click.option("--seconds", type=click.FloatRange(0.1), default=3.0, show_default=True, help="Each way, for --tune.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def stripe(
    directory: str,
    auto: bool,
    purpose: Purpose,
    nodes: int,
    dry_run: bool,
    tune: bool,
    writers: int,
    seconds: float,
    as_json: bool,
    **given: Any,
) -> None:
    """Show or set how new files in DIRECTORY are striped on Lustre, or find out what suits.

    A layout is fixed when a file is made: set it on a fresh directory of your own. Elsewhere than on
    Lustre there is nothing to set, which is no error.
    """
    try:
        striping = _striping(auto, given)
        if tune:
            if striping.policy != "inherit":
                raise click.UsageError("--tune tries layouts of its own: give it alone")
            tune_directory(os.path.abspath(directory), writers, seconds, as_json)
            return
        found = _run(os.path.abspath(directory), striping, purpose, nodes, dry_run)
    except (MlpoError, OSError, subprocess.SubprocessError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(json.dumps(found, indent=1) if as_json else _text(found))
    sys.exit(0 if found["as_wanted"] else 1)


def _striping(auto: bool, given: dict[str, Any]) -> Striping:
    """The options as a configuration has them, with its checks."""
    components = [dict(part.partition("=")[::2] for part in text.split(",")) for text in given.pop("components")]
    explicit = {key: value for key, value in given.items() if value is not None and value is not False} | (
        {"components": components} if components else {}
    )
    policy = "auto" if auto else "explicit" if explicit else "inherit"
    try:
        return Striping.model_validate({"policy": policy, **explicit})
    except ValidationError as error:
        faults = "; ".join(fault["msg"].removeprefix("Value error, ") for fault in error.errors())
        raise click.UsageError(faults) from error


def _run(directory: str, striping: Striping, purpose: Purpose, nodes: int, dry_run: bool) -> dict[str, Any]:
    filesystem = describe(directory)
    found: dict[str, Any] = {"directory": directory, "filesystem": filesystem.type, "as_wanted": True}
    if not filesystem.is_lustre:
        return found | {"note": f"{filesystem.type} has no stripes to set"}
    wanted, reason = wanted_layout(striping, purpose, nodes, find_site(os.environ))
    before = get_layout(directory)
    found |= {"before": _plain(before), "wanted": _plain(wanted), "reason": reason}
    if wanted is None or dry_run:
        return found
    granted = set_layout(directory, wanted)
    return found | {"granted": _plain(granted), "as_wanted": granted.grants(wanted)}


def _plain(layout: StripeLayout | None) -> dict[str, Any] | None:
    if layout is None:
        return None
    return {"arguments": str(layout), "components": [asdict(component) for component in layout.components]}


def _text(found: dict[str, Any]) -> str:
    lines = [f"{found['directory']} ({found['filesystem']})"]
    if "note" in found:
        lines.append(found["note"])
    for key in ("before", "wanted", "granted"):
        if found.get(key):
            lines.append(f"{key:8} lfs setstripe {found[key]['arguments']}")
    if "reason" in found:
        lines.append(f"because  {found['reason']}")
    if not found["as_wanted"]:
        lines.append("what was granted is not what was asked for: look at the site's limits and pools")
    return "\n".join(lines)
