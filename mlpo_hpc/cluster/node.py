"""The node: which ranks share it, and the only place that initialises MPI."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from mlpo_hpc.cluster.launch import has_pmi, mpi_launcher
from mlpo_hpc.cluster.verdict import gather, together, world_rank
from mlpo_hpc.errors import MpiMismatch
from mlpo_hpc.telemetry.log import warn

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

FORWARD_S = 1.0
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Differs between machines, not between the containers of one."""


@dataclass(frozen=True)
class Node:
    """A rank's place in the job."""

    host: str
    world_rank: int
    world_size: int
    node_rank: int
    """Number of this rank among those of its host."""
    node_size: int
    """Ranks of this job on this host."""
    machine: str = ""
    """Tells hosts of one name apart."""

    @property
    def key(self) -> tuple[str, str]:
        """Equal for the ranks of a node, and only for them."""
        return (self.host, self.machine)


def find_node() -> Node:
    """Collective over the training world. Find the ranks that share this host."""
    mine = (socket.gethostname(), machine_id())
    everyone = gather(mine)
    rank = world_rank()
    _warn_of_containers(everyone)
    return Node(mine[0], rank, len(everyone), everyone[:rank].count(mine), everyone.count(mine), mine[1])


def machine_id() -> str:
    """Tells machines apart, whatever their names; empty where the system does not tell."""
    return BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""


def _warn_of_containers(everyone: list[tuple[str, str]]) -> None:
    for machine in {machine for _, machine in everyone if machine}:
        hosts = sorted({host for host, theirs in everyone if theirs == machine})
        if len(hosts) > 1:
            warn(
                "hosts %s are containers on one machine: each takes 'host_memory' for itself, and no turns are taken "
                "between them. Use one container, or divide 'host_memory' and 'capacity' by their number",
                ", ".join(hosts),
            )


def gather_on_node(node: Node, value: T) -> list[T]:
    """Collective over the training world. The values of this node's ranks, by node rank."""
    return [theirs for key, theirs in gather((node.key, value)) if key == node.key]


def start_mpi(expected_size: int | None = None) -> MPI.Intracomm:
    """Initialise MPI and return the world; an uncaught exception on any rank then ends all of them.

    Raises
    ------
    ImportError
        If mpi4py or the MPI library is missing.
    RuntimeError
        If mpi4py finds no MPI library.
    MpiMismatch
        If the world has another than the expected size.
    """
    mpi = import_mpi()
    library = mpi.Get_library_version().split(",")[0].splitlines()[0]
    if not mpi.Is_initialized():
        if expected_size is not None:
            _look_for_pmi(expected_size, library)
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
        atexit.register(_finalize)
    world: Any = mpi.COMM_WORLD
    if expected_size is not None and world.size != expected_size:
        raise MpiMismatch(_mismatch(world.size, expected_size, library))
    if world.size > 1 and not isinstance(sys.excepthook, _AbortHook):
        sys.excepthook = _AbortHook(world, sys.excepthook)
        atexit.register(sys.stdout.flush)
    return cast("MPI.Intracomm", world)


def mpi_obstacle(node: Node, alone: bool = False) -> str:
    """Collective over the training world. Why I/O threads cannot use MPI here; empty on all ranks if they can.

    Parameters
    ----------
    node : Node
        This rank's place.
    alone : bool
        Whether a process that no MPI launcher started may make a world of its own: some libraries end it then.

    Raises
    ------
    ConfigError
        If the launcher started one world and MPI sees another.
    """
    return str(next(filter(None, gather(together(lambda: _obstacle(node, alone)))), ""))


def _obstacle(node: Node, alone: bool) -> str:
    if mpi_launcher(os.environ, node.world_size) is None and not (alone and node.world_size == 1):
        return "this was not started as one MPI world (srun and mpirun do that, torchrun does not)"
    try:
        world = start_mpi(node.world_size)
    except (ImportError, RuntimeError) as error:
        return f"mpi4py or its MPI library is missing ({error})"
    from mpi4py import MPI

    if world.rank != node.world_rank:
        return f"MPI's rank {world.rank} is torch's rank {node.world_rank}: leave RANK to us, or set it as MPI has it"
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return "this MPI does not give MPI_THREAD_MULTIPLE"
    return ""


@cache
def node_communicator() -> MPI.Intracomm:
    """Collective over the MPI world at the first call. The ranks of this node, for the life of the process."""
    from mpi4py import MPI

    comm: Any = start_mpi().Split_type(MPI.COMM_TYPE_SHARED)
    return cast("MPI.Intracomm", comm)


def import_mpi() -> Any:
    """MPI without initialising it, so that what would end the process can be said before.

    Raises
    ------
    ImportError
        If mpi4py is missing.
    RuntimeError
        If it finds no MPI library.
    """
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = False
    from mpi4py import MPI

    return MPI


def _finalize() -> None:
    from mpi4py import MPI

    if not MPI.Is_finalized():
        MPI.Finalize()


def _look_for_pmi(expected_size: int, library: str) -> None:
    """Open MPI may abort without it; other libraries have ways of their own or make N worlds of one."""
    launcher = mpi_launcher(os.environ, expected_size)
    under_srun = launcher is not None and launcher.name == "srun"
    if under_srun and "Open MPI" in library and not has_pmi(os.environ):
        raise MpiMismatch(
            f"srun started {expected_size} processes without a way for MPI to find the others. {_srun_advice(library)}"
        )


def _mismatch(size: int, expected_size: int, library: str) -> str:
    launcher = mpi_launcher(os.environ, expected_size)
    name = launcher.name if launcher else "the launcher"
    advice = _srun_advice(library) if name == "srun" else "Use the mpirun of the MPI library that mpi4py loads"
    return f"{name} started {expected_size} processes, but MPI ({library}) sees a world of {size}. {advice}"


def _srun_advice(library: str) -> str:
    types = {"Open MPI": "pmix", "CRAY MPICH": "cray_shasta", "MPICH": "pmi2"}
    fits = [f"--mpi={kind}" for name, kind in types.items() if name in library][:1]
    every = ", ".join(f"--mpi={kind} for {name}" for name, kind in types.items())
    return (
        f"Start with srun {fits[0] if fits else every} ('srun --mpi=list' shows what there is), or do without MPI: "
        '"tokens": {"backend": "flock"}'
    )


class _AbortHook:
    """Print the traceback, then end the world: the others would wait in a collective for ever."""

    def __init__(self, world: MPI.Intracomm, previous: object) -> None:
        self._world = world
        self._previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        assert callable(self._previous)
        # torch collects what earlier hooks print and prints it after they return: we do not.
        sys.stderr = sys.__stderr__
        self._previous(kind, error, trace)
        sys.stdout.flush()
        print(end="", file=sys.stderr, flush=True)
        # MPICH's launcher drops what it has not forwarded yet when it is told to abort.
        time.sleep(FORWARD_S)
        self._world.Abort(1)
