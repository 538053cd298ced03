"""``mlpo bench checkpoint``: what a checkpoint in the background costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlpo_hpc.errors import MlpoError

if TYPE_CHECKING:
    from mlpo_hpc.bench.conditions import Conditions

EXAMPLES = """
\b
Examples:
  mlpo bench checkpoint --testbed nvme=200,pfs=100     as root: two disks of 200 and 100 MB/s each way
  mlpo bench checkpoint --testbed nvme=200,pfs=100 --threads 1
  mlpo bench checkpoint nvme=/local/scratch pfs=$SCRATCH/run --case node_local --hidden 4096 --json result.json
"""


def _caps(context: click.Context, parameter: click.Parameter, text: str | None) -> dict[str, int] | None:
    from mlpo_hpc.cli.bench import read_caps

    return read_caps(context, parameter, text)


def _size(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    from mlpo_hpc.cli.bench import read_size

    return read_size(context, parameter, text)


@click.command(epilog=EXAMPLES)
@click.argument("directories", nargs=-1, metavar="[NAME=]DIR ...")
@click.option("--testbed", callback=_caps, metavar="NAME=MB/S,...", help="Make disks with this speed instead (root).")
@click.option("--case", "cases", multiple=True, type=click.Choice(["shared", "node_local"]), help="Default: both.")
@click.option("--ga", type=click.IntRange(1), default=4, show_default=True, help="Micro-batches an iteration.")
@click.option("--saves", type=click.IntRange(1), default=8, show_default=True, help="Checkpoints of each case.")
@click.option("--blocks", type=click.IntRange(1), default=8, show_default=True, help="Residual blocks of the model.")
@click.option("--hidden", type=click.IntRange(8), default=1024, show_default=True, help="Width of the model.")
@click.option("--rows", type=click.IntRange(1), default=4, show_default=True, help="Rows of a micro-batch.")
@click.option("--sub-group-size", type=click.FloatRange(1), default=4e6, show_default=True, help="Parameters.")
@click.option("--host-memory", callback=_size, metavar="BYTES", help="Of the node.  [default: 268MB]")
@click.option(
    "--threads",
    type=click.IntRange(1),
    help="To compute with, default: all cores. With fewer there are some for I/O, as where an accelerator computes.",
)
@click.option("--json", "json_file", metavar="FILE", help="Write all samples there; '-': to stdout, without a table.")
def checkpoint(
    directories: tuple[str, ...],
    testbed: dict[str, int] | None,
    cases: tuple[str, ...],
    ga: int,
    saves: int,
    json_file: str | None,
    **sizes: Any,
) -> None:
    """Measure what a checkpoint in the background costs training, how soon it is committed, and how fast it loads.

    Give a directory on each storage, the fastest first; nothing is left behind there.
    """
    from mlpo_hpc.cli.bench import facts, look_at_outputs, read_tiers, undone_on_signals

    if bool(directories) == bool(testbed):
        raise click.UsageError("give either directories, or --testbed")
    look_at_outputs(json_file)
    from mlpo_hpc.bench.conditions import USUAL_HOST_BYTES, Conditions

    host_memory_bytes = sizes.pop("host_memory") or USUAL_HOST_BYTES
    sizes["sub_group_size"] = int(sizes["sub_group_size"])
    tiers = read_tiers(directories, testbed)
    conditions = Conditions(tiers, host_memory_bytes=host_memory_bytes, facts=facts(), **sizes)
    try:
        with undone_on_signals():
            found = _measure(conditions, testbed, list(cases) or ["shared", "node_local"], ga, saves)
    except (MlpoError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if json_file == "-":
        click.echo(json.dumps(found, indent=1))
        return
    if json_file is not None:
        Path(json_file).write_text(json.dumps(found, indent=1) + "\n")
    _show(found["cases"])


def _measure(
    conditions: Conditions, caps: dict[str, int] | None, cases: list[str], accumulation: int, saves: int
) -> dict[str, Any]:
    import dataclasses

    from mlpo_hpc.bench import checkpoints
    from mlpo_hpc.bench.progress import Display
    from mlpo_hpc.cli.bench import laid_out

    with Display() as display, laid_out(conditions, ("ours",) * 4, caps) as (complete, disks):

        def cap(factor: float) -> None:
            for name, disk in disks.items():
                disk.cap(int(factor * (caps or {})[name]))

        measured = checkpoints.measure(complete, cases, accumulation, saves, display, cap)
    return {
        "conditions": {**dataclasses.asdict(conditions), "accumulation": accumulation},
        "cases": {name: checkpoints.figures(case, conditions) for name, case in measured.items()},
        "samples": {name: dataclasses.asdict(case) for name, case in measured.items()},
    }


def _show(cases: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from mlpo_hpc.bench.checkpoints import CASES

    table = Table(title="one checkpoint (least - most)", title_justify="left")
    table.add_column("")
    for name in cases:
        table.add_column(name, justify="right")
    shown = [_lines(case) for case in cases.values()]
    for name in shown[0]:
        table.add_row(name, *(lines[name] for lines in shown))
    console = Console(color_system=None, width=120)
    console.print(table)
    for name in cases:
        console.print(f"{name}: {CASES[name]}", highlight=False)


def _lines(case: dict[str, Any]) -> dict[str, str]:
    """What is shown of a case, by the name of the line."""
    from mlpo_hpc.bench.checkpoints import PHASES

    parts = {f"  of that in {phase.removesuffix('_s')}": f"{case['stall_by_phase'][phase]:.1%}" for phase in PHASES}
    return {
        "iteration without it": f"{case['iteration_s']:.2f} s",
        "stall, of an iteration, mean": _error(case["stall"]),
        "  of one checkpoint": f"{case['stall']['min']:.1%} - {case['stall']['max']:.1%}",
        **parts,
        "passes lose": _error(case["stall_of_passes"]),
        "  to a plain writer of as much": _error(case["plain_writer_of_passes"]),
        "committed within, iterations": _range(case["committed_within_iterations"], "{:.0f}"),
        "committed within": _range(case["committed_s"], "{:.1f}") + " s",
        "bytes a parameter": f"{case['bytes_per_parameter']:.2f}",
        "load_checkpoint": f"{case['load_s']:.2f} s",
        "  in units of reading it once": f"{case['load_vs_floor']:.2f}",
    }


def _error(found: dict[str, float]) -> str:
    return f"{found['mean']:.1%} +- {found['error']:.1%}"


def _range(spread: dict[str, float], shape: str) -> str:
    median, least, most = (shape.format(spread[key]) for key in ("median", "min", "max"))
    return f"{median} ({least} - {most})"
