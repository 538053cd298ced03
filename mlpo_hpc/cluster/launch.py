"""From srun, mpirun, torchrun or nothing to the variables that torch and DeepSpeed read."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from mlpo_hpc.cluster.network import INTERFACE, address_of, first_free_port, is_free, port_of_job, use_interface
from mlpo_hpc.errors import ConfigError, MpiMismatch
from mlpo_hpc.telemetry.log import warn

JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")
PMI_VARIABLES = ("PMI_RANK", "PMI_FD", "PMIX_RANK", "PALS_RANKID")
"""Set where srun offers processes a way to find each other; ``--mpi=none`` sets none."""


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
    Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)


def prepare(met: tuple[int, int] | None = None) -> str:
    """Set RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_SIZE, MASTER_ADDR and MASTER_PORT where they are missing.

    Collective over the MPI world under a launcher of MPI, for rank 0 chooses the port there.
    ``MLPO_HPC_INTERFACE`` names the network interface to meet on.

    Parameters
    ----------
    met : tuple of int, optional
        World rank and size, if somebody else has started torch.distributed already: no meeting
        point is needed then.

    Returns
    -------
    str
        Name of the launcher found, ``single`` if there is none.

    Raises
    ------
    ConfigError
        If the launcher started several processes that MPI sees as one each, if there is no such
        interface, or if the port is in use.
    """
    if met is not None:
        return _join(*met)
    launcher = find_launcher(os.environ)
    found = ranks(os.environ, launcher)
    for name, value in found.items():
        os.environ.setdefault(name, value)
    use_interface(os.environ)
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        address, port = _meeting_point(launcher, int(found["WORLD_SIZE"]))
        os.environ.setdefault("MASTER_ADDR", address)
        os.environ.setdefault("MASTER_PORT", str(port))
    _refuse_busy_port(os.environ)
    return launcher.name if launcher else "single"


def _join(rank: int, world_size: int) -> str:
    """Say what torch.distributed knows, and of the node what a launcher tells: no guess."""
    os.environ.setdefault("RANK", str(rank))
    os.environ.setdefault("WORLD_SIZE", str(world_size))
    outer = mpi_launcher(os.environ, world_size)
    for name, value in ranks(os.environ, outer).items() if outer else ():
        os.environ.setdefault(name, value)
    return outer.name if outer else "single"


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


def mpi_launcher(environ: Mapping[str, str], world_size: int) -> Launcher | None:
    """The launcher that started the training world as one MPI world; None under torchrun, or without one."""
    if "TORCHELASTIC_RUN_ID" in environ:
        return None
    outer = _outer_launcher(environ)
    return outer if outer is not None and environ[outer.size] == str(world_size) else None


def started_with(environ: Mapping[str, str]) -> tuple[str, int]:
    """Name of the launcher that started this process, and how many processes it started, whatever was set by hand.

    torchrun counts as none: what it sets is what trainers read.
    """
    outer = None if "TORCHELASTIC_RUN_ID" in environ else _outer_launcher(environ)
    return (outer.name, int(environ[outer.size])) if outer else ("none", 1)


def _outer_launcher(environ: Mapping[str, str]) -> Launcher | None:
    """What started this process, whatever was set by hand."""
    return find_launcher({name: value for name, value in environ.items() if name not in ("RANK", "WORLD_SIZE")})


def ranks(environ: Mapping[str, str], launcher: Launcher | None) -> MutableMapping[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_SIZE as this launcher tells them."""
    if launcher is None:
        return {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    local_rank, local_size = _local(environ, launcher)
    return {
        "RANK": environ[launcher.rank],
        "WORLD_SIZE": environ[launcher.size],
        "LOCAL_RANK": local_rank,
        "LOCAL_SIZE": local_size,
        "LOCAL_WORLD_SIZE": local_size,
    }


def _local(environ: Mapping[str, str], launcher: Launcher) -> tuple[str, str]:
    """Rank on the node and ranks of the node; where RANK was set by hand the launcher behind it may know."""
    outer = launcher if launcher.local_rank in environ else _outer_launcher(environ) or launcher
    local_size = environ.get(outer.local_size, environ[outer.size])
    if outer.name == "srun":
        local_size = _tasks_of_node(local_size, int(environ.get("SLURM_NODEID", "0")))
    return environ.get(outer.local_rank, "0"), local_size


def _tasks_of_node(tasks_per_node: str, node: int) -> str:
    """Slurm lists the tasks of each node: ``4(x2),3``."""
    counts: list[str] = []
    for entry in tasks_per_node.split(","):
        count, _, times = entry.partition("(x")
        counts += [count] * int(times.rstrip(")") or "1")
    return counts[min(node, len(counts) - 1)]


def _meeting_point(launcher: Launcher | None, world_size: int) -> tuple[str, int]:
    if world_size == 1:
        return "127.0.0.1", first_free_port()
    outer = mpi_launcher(os.environ, world_size)
    if outer is None:
        raise ConfigError("RANK and WORLD_SIZE were set by hand: set MASTER_ADDR and MASTER_PORT too, on all ranks")
    if outer.name != "srun":
        return _agree_by_mpi(world_size)
    if not has_pmi(os.environ):
        return _agree_by_job(os.environ)
    try:
        return _agree_by_mpi(world_size)
    except (ImportError, RuntimeError, MpiMismatch) as error:
        warn("ranks do not meet by MPI: %s", error)
        return _agree_by_job(os.environ)


def _agree_by_job(environ: Mapping[str, str]) -> tuple[str, int]:
    """What every task of a Slurm step can tell by itself."""
    if INTERFACE in environ:
        raise ConfigError(f"{INTERFACE} needs an MPI to tell all ranks the address: set MASTER_ADDR, or use --mpi")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "localhost")
    return first_host(nodes), port_of_job(job_step(environ))


def has_pmi(environ: Mapping[str, str]) -> bool:
    """Whether the launcher offers MPI processes a way to find each other."""
    return any(name in environ for name in PMI_VARIABLES)


def _agree_by_mpi(world_size: int) -> tuple[str, int]:
    """Rank 0 picks a free port of its host and tells the others over MPI."""
    from mlpo_hpc.cluster.node import machine_id, start_mpi

    world = start_mpi(world_size)
    hosts = world.allgather((socket.gethostname(), machine_id()))
    chosen = world.bcast(_choose(hosts) if world.rank == 0 else None)
    if isinstance(chosen, ConfigError):
        chosen.on_all_ranks = True
        raise chosen
    address, port = chosen
    return str(address), int(port)


def _choose(hosts: list[tuple[str, str]]) -> tuple[str, int] | ConfigError:
    try:
        return address_for(hosts), first_free_port(job_step(os.environ))
    except ConfigError as error:
        return error


def address_for(hosts: list[tuple[str, str]]) -> str:
    """Of this host, for hosts given as name and machine."""
    if INTERFACE in os.environ:
        return address_of(os.environ[INTERFACE])
    if len(set(hosts)) == 1:
        return "127.0.0.1"
    name = hosts[0][0]
    if any(host == name and machine != hosts[0][1] for host, machine in hosts):
        raise ConfigError(f"several machines call themselves {name}: set MASTER_ADDR or {INTERFACE}")
    return name


def _refuse_busy_port(environ: Mapping[str, str]) -> None:
    """Ranks that meet at another program's port would wait there for long; torchrun's agent holds its own."""
    port = int(environ["MASTER_PORT"])
    if environ["RANK"] == "0" and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and not is_free(port):
        raise ConfigError(f"MASTER_PORT {port} is in use on {socket.gethostname()}: set another one, or none")


def job_step(environ: Mapping[str, str]) -> str:
    """Equal on all ranks of a job step, another one for the next; empty outside of jobs."""
    job = next((environ[name] for name in JOB_VARIABLES if name in environ), "")
    return f"{job}.{environ.get('SLURM_STEP_ID', '')}" if job else ""


def first_host(nodelist: str) -> str:
    """Of a list as Slurm writes it."""
    from ClusterShell.NodeSet import NodeSet

    return str(NodeSet(nodelist)[0])
