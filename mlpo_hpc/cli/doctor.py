"""``mlpo doctor``: whether a node, a job and a configuration are fit."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from mlpo_hpc.cli.bench import undone_on_signals
from mlpo_hpc.errors import MlpoError

if TYPE_CHECKING:
    from mlpo_hpc.doctor.examine import Report
    from mlpo_hpc.doctor.finding import Merged

EXAMPLES = """
\b
Examples:
  mlpo doctor                                            this host, such as a login node
  mlpo doctor --config ds_config.json --parameters 70e9 --nodes 16
  srun mlpo doctor --config ds_config.json               all nodes of a job, one report
"""
UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
WIDTH = 120
SHOWN_KINDS = 3


def _count(_: click.Context, __: click.Parameter, text: str | None) -> float | None:
    """``7e9`` or ``7b``."""
    if text is None:
        return None
    unit = UNITS.get(text[-1:].lower())
    try:
        count = float(text[:-1] if unit else text) * (unit or 1)
    except ValueError:
        count = 0
    if not 1 <= count < float("inf"):
        raise click.BadParameter(f"{text!r} is no number of parameters, such as 7e9 or 7b")
    return count


@click.command(epilog=EXAMPLES)
@click.option("--config", metavar="FILE", help="DeepSpeed configuration to look at.")
@click.option("--parameters", callback=_count, metavar="N", help="Of the model, such as 70e9: does its state fit?")
@click.option("--nodes", type=click.IntRange(1), help="That will train it.  [default: those looked at]")
@click.option("--timeout", type=click.FloatRange(1), default=30, show_default=True, help="Seconds for what may hang.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(config: str | None, parameters: float | None, nodes: int | None, timeout: float, as_json: bool) -> None:
    """Look whether this node, or all nodes of a job, are fit for training with mlpo_hpc, and say what to do.

    Changes nothing. Exit code 1 if something would fail; warnings alone give 0.
    """
    from mlpo_hpc.doctor.examine import Examination, Wish

    with undone_on_signals(), ExitStack() as endings:
        try:
            report = Examination(Wish(config, parameters, nodes, timeout), endings).run()
        except MlpoError as error:
            # Of another rank than the first, which misses it and gives the exit code: an exit code of ours could end
            # the job before.
            click.echo(f"mlpo doctor: {error}", err=True)
            return
        if report is not None:
            click.echo(report.model_dump_json(indent=1)) if as_json else _show(report)
            sys.stdout.flush()
    sys.exit(0 if report is None or report.fit else 1)


def _show(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 1))
    for column in ("verdict", "check", "text"):
        table.add_column(column, no_wrap=column != "text")
    for finding in report.findings:
        table.add_row(finding.verdict, finding.name, _text(finding, report.hosts))
    console = Console(color_system=None, width=None if sys.stdout.isatty() else WIDTH)
    console.print(table)
    console.print(_summary(report), soft_wrap=True)


def _text(finding: Merged, hosts: list[str]) -> str:
    """What was seen, and where if it was not everywhere; what to do below it."""
    from rich.markup import escape

    from mlpo_hpc.doctor.joint import fold

    everywhere = len(finding.seen) == 1 and finding.hosts in ([], hosts)
    kinds = [text if everywhere else f"{fold(on)}: {text}" for text, on in finding.seen.items()]
    if len(kinds) > SHOWN_KINDS:
        kinds = [*kinds[:SHOWN_KINDS], f"and {len(kinds) - SHOWN_KINDS} more (--json has all)"]
    return escape("\n".join([*kinds, *([f"-> {finding.advice}"] if finding.advice else [])]))


def _summary(report: Report) -> str:
    from mlpo_hpc.doctor.joint import fold

    counts = {verdict: sum(f.verdict == verdict for f in report.findings) for verdict in ("fail", "warn")}
    where = f"{len(report.hosts)} nodes ({fold(report.hosts)}), {report.num_ranks} ranks"
    if len(report.hosts) == 1:
        where = report.hosts[0]
    verdict = "fit" if report.fit else "not fit"
    return f"{where}: {verdict}; {counts['fail']} will fail, {counts['warn']} to be looked at"
