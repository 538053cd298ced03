"""The command ``mlpo``: one file per sub-command; starts no MPI and imports no torch."""

from __future__ import annotations

import click

from mlpo_hpc import __version__
from mlpo_hpc.cli.bench import bench
from mlpo_hpc.cli.ckpt import ckpt
from mlpo_hpc.cli.clean import clean
from mlpo_hpc.cli.config import config
from mlpo_hpc.cli.doctor import doctor
from mlpo_hpc.cli.plan import plan
from mlpo_hpc.cli.probe import probe
from mlpo_hpc.cli.report import report
from mlpo_hpc.cli.sbatch import sbatch
from mlpo_hpc.cli.stripe import stripe


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mlpo")
def main() -> None:
    """Look at and prepare what mlpo_hpc uses on a cluster. Exit codes: 0 good, 1 something is wrong, 2 wrong usage."""


main.add_command(bench)
main.add_command(ckpt)
main.add_command(plan)
main.add_command(clean)
main.add_command(config)
main.add_command(doctor)
main.add_command(probe)
main.add_command(report)
main.add_command(sbatch)
main.add_command(stripe)
