"""From srun, mpirun, torchrun or nothing to the variables that torch and DeepSpeed read."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from mlpo_hpc.errors import ConfigError

PORTS = range(20000, 60000)


@dataclass(frozen=True)
class Launcher:
    """Where one launcher writes what we need."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str


LAUNCHERS = (
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Launcher("PALS", "PMI_RANK", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_TASKS_PER_NODE"),
)


def prepare() -> str:
    """Set RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_SIZE, MASTER_ADDR and MASTER_PORT where they are missing.

    Collective over the MPI world under a launcher of MPI, for rank 0 chooses the port there.

    Returns
    -------
    str
        Name of the launcher found, ``single`` if there is none.

    Raises
    ------
    ConfigError
        If the launcher started several processes that MPI sees as one each.
    """
    launcher = find_launcher(os.environ)
    found = ranks(os.environ, launcher)
    for name, value in found.items():
        os.environ.setdefault(name, value)
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        address, port = _meeting_point(launcher, int(found["WORLD_SIZE"]))
        os.environ.setdefault("MASTER_ADDR", address)
        os.environ.setdefault("MASTER_PORT", str(port))
    return launcher.name if launcher else "single"


def find_launcher(environ: Mapping[str, str]) -> Launcher | None:
    """The innermost launcher whose variables are set; variables set by hand come first.

    One that does not tell the local rank is passed over for the next: srun sets MPICH's PMI_RANK
    too, but only SLURM_LOCALID beside it.
    """
    for launcher in LAUNCHERS:
        by_hand = launcher.name == "torchrun"
        if launcher.rank in environ and launcher.size in environ and (by_hand or launcher.local_rank in environ):
            return launcher
    return None


def ranks(environ: Mapping[str, str], launcher: Launcher | None) -> MutableMapping[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_SIZE as this launcher tells them."""
    if launcher is None:
        return {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    size = environ[launcher.size]
    # "4(x2)" or "4,3": Slurm lists the tasks of each node; a node of our own size is close enough
    # for what reads it (DeepSpeed's device count), the engine counts co-located ranks itself.
    local_size = environ.get(launcher.local_size, size).split("(")[0].split(",")[0]
    local_rank = environ.get(launcher.local_rank, "0")
    return {
        "RANK": environ[launcher.rank],
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_SIZE": local_size,
        "LOCAL_WORLD_SIZE": local_size,
    }


def _meeting_point(launcher: Launcher | None, world_size: int) -> tuple[str, int]:
    if world_size == 1:
        return "127.0.0.1", free_port()
    if launcher is not None and launcher.name == "srun":
        nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "localhost")
        return _first_host(nodes), _port_of_job(os.environ)
    return _agree_by_mpi(world_size)


def _agree_by_mpi(world_size: int) -> tuple[str, int]:
    """Rank 0 picks a free port of its host and tells the others over MPI."""
    from mlpo_hpc.cluster.node import start_mpi

    world = start_mpi()
    if world.size != world_size:
        raise ConfigError(
            f"the launcher started {world_size} processes, but MPI sees a world of {world.size}: mpirun and the MPI "
            "library that mpi4py loads do not belong together. Use the mpirun of that MPI (see mpi4py.get_config)."
        )
    hosts = world.allgather(socket.gethostname())
    address = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]
    chosen: tuple[str, int] = world.bcast((address, free_port()) if world.rank == 0 else None)
    return chosen


def free_port() -> int:
    """A TCP port that is free on this host now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _port_of_job(environ: Mapping[str, str]) -> int:
    """The same port on all ranks of a job step, another one for the next."""
    step = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
    return PORTS[int(hashlib.sha256(step.encode()).hexdigest(), 16) % len(PORTS)]


def _first_host(nodelist: str) -> str:
    from ClusterShell.NodeSet import NodeSet

    return str(NodeSet(nodelist)[0])
