"""What a batch script must know of a machine: facts in ``machines.toml``, each with the page that it is from."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files

from pydantic import BaseModel, ConfigDict

from mlpo_hpc.cluster.sites import sites
from mlpo_hpc.errors import ConfigError

GENERIC = "generic"


class Fact(BaseModel):
    """One thing that is known of a machine.

    Parameters
    ----------
    value : str
        As it stands in a script: shell words. Empty if it is known that there is nothing of the kind.
    note : str
        What must be known with it.
    source : str
        The page that says so; empty for the generic machine alone.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: str
    note: str = ""
    source: str = ""

    @property
    def remark(self) -> str:
        """Note and source, for a comment."""
        if self.note and self.source:
            return f"{self.note} ({self.source})"
        return self.note or self.source


class Gpus(Fact):
    """How GPUs of a node are asked for, up to the number, and how many there are."""

    count: int


class Machine(BaseModel):
    """Facts of one machine; None: not known here, the user must say.

    Parameters
    ----------
    name, title : str
        On the command line, and in full.
    account : str
        What accounts look like there.
    partition, constraint, qos, gpus, cpus_per_task : Fact, optional
        What to ask Slurm for.
    binding : Fact, optional
        Options of ``srun`` that bring a task and its GPU together.
    node_local, shared : Fact, optional
        Where storage of the nodes is, and where the user's own directory on the parallel file system.
    interface : Fact, optional
        The network interface on which ranks meet.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    title: str
    account: str = ""
    partition: Fact | None = None
    constraint: Fact | None = None
    qos: Fact | None = None
    gpus: Gpus | None = None
    cpus_per_task: Fact | None = None
    binding: Fact | None = None
    node_local: Fact | None = None
    shared: Fact
    interface: Fact | None = None


@cache
def machines() -> dict[str, Machine]:
    """All that scripts can be written for, by name."""
    text = files("mlpo_hpc.batch").joinpath("machines.toml").read_text()
    return {name: Machine.model_validate({"name": name, **facts}) for name, facts in tomllib.loads(text).items()}


def find_machine(name: str) -> Machine:
    """The machine of that name.

    Raises
    ------
    ConfigError
        If there is none, or if it has another scheduler than Slurm.
    """
    site = sites().get(name)
    if site is not None and site.scheduler != "Slurm":
        raise ConfigError(
            f"{name} has {site.scheduler}, not Slurm: there is no script for sbatch. In a job of {site.scheduler} "
            "start one process a GPU with mpiexec, such as mpiexec -n 8 --ppn 4 python train.py: ranks, nodes and "
            "where they meet are found from what it tells. What scripts for Slurm do beside that is in docs/slurm.md"
        )
    if name not in machines():
        raise ConfigError(f"no machine {name!r} is known; there are {', '.join(machines())}")
    return machines()[name]
