"""``mlpo report``: what a run did, as one page."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlpo_hpc.errors import MlpoError

if TYPE_CHECKING:
    from mlpo_hpc.report.figures import Figures
    from mlpo_hpc.report.run import Run

EXAMPLES = """
\b
Examples:
  mlpo report runs/traces                        writes runs/traces/report.html
  mlpo report $SCRATCH/run/telemetry -o run.html
  mlpo report node1/telemetry node2/telemetry -o run.html     journals that lay on the nodes' own storage
  mlpo report runs/traces --json | jq .findings
"""


@click.command(epilog=EXAMPLES)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(exists=True, path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Where to write the page.  [default: report.html in RUN]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; a page is written only with -o.")
def report(runs: tuple[Path, ...], output: Path | None, as_json: bool) -> None:
    """Turn what a run wrote about itself into one page: loss, time of each step, tiers, memory, wear, restarts.

    RUN is the folder that the run was given as "telemetry": {"dir": ...} in "mlp_offload"; the journals of all its
    ranks and of all its restarts are put together. The page is one file that needs nothing else. Exit code 1 if there
    is nothing to show, or the page cannot be written.
    """
    from mlpo_hpc.report.figures import figures_of
    from mlpo_hpc.report.journals import find_journals, read_journals
    from mlpo_hpc.report.plain import plain
    from mlpo_hpc.report.run import build_run

    try:
        paths = dict.fromkeys(path.resolve() for given in runs for path in find_journals(given))
        run = build_run(read_journals(paths))
        figures = figures_of(run)
        if as_json:
            click.echo(json.dumps(plain(run, figures), indent=1))
        if output is not None or not as_json:
            _write(run, figures, runs[0], output, quiet=as_json)
    except MlpoError as error:
        raise click.ClickException(str(error)) from error


def _write(run: Run, figures: Figures, given: Path, output: Path | None, quiet: bool) -> None:
    """Write the page, whole or not at all, and say where it is and what it says first."""
    from mlpo_hpc.report.findings import findings_of
    from mlpo_hpc.report.page import draw_page

    folder = given if given.is_dir() else given.parent
    path = output or folder / "report.html"
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    page = draw_page(run, figures, folder.absolute().name)
    try:
        try:
            partial.write_text(page, encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise click.ClickException(
            f"cannot write the page {path}: {error.strerror}. Give another place by -o"
        ) from error
    if not quiet:
        for finding in findings_of(run, figures):
            click.echo(finding.text)
        click.echo(f"page: {path}")
