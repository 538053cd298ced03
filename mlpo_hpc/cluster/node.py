"""The node: which ranks share it, and the only place that initialises MPI."""

from __future__ import annotations

import atexit
import socket
import sys
import time
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from mlpo_hpc.cluster.verdict import gather, world_rank

if TYPE_CHECKING:
    from mpi4py import MPI


FORWARD_S = 1.0


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


def find_node() -> Node:
    """Collective over the training world. Find the ranks that share this host."""
    host = socket.gethostname()
    hosts = gather(host)
    rank = world_rank()
    return Node(host, rank, len(hosts), hosts[:rank].count(host), hosts.count(host))


def start_mpi() -> MPI.Intracomm:
    """Initialise MPI and return the world; an uncaught exception on any rank then ends all of them.

    Raises
    ------
    ImportError
        If mpi4py or the MPI library is missing.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.size > 1 and not isinstance(sys.excepthook, _AbortHook):
        sys.excepthook = _AbortHook(world, sys.excepthook)
        atexit.register(sys.stdout.flush)
    return world


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
