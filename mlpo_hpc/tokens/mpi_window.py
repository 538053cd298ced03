"""Backend ``mpi``: tickets in one MPI shared-memory window per node.

The window is opened once, with one passive epoch for its life (`Lock_all` with NOCHECK): what other
schemes do per operation needs the target's attention, and a rank inside a write gives none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mlpo_hpc.cluster.node import start_mpi
from mlpo_hpc.errors import ConfigError
from mlpo_hpc.tokens.ticket import Counters

if TYPE_CHECKING:
    from mpi4py import MPI

WORDS_PER_LINE = 16  # 128 bytes: neighbouring counters must not share what processors fetch together


class WindowCounters(Counters):
    """Collective over `node_comm`. Counters in a shared window, one cache line each.

    Parameters
    ----------
    node_comm : MPI.Intracomm
        The ranks of a node; needs ``MPI_THREAD_MULTIPLE``, for I/O threads use the counters.
    num_counters : int
        The same on all ranks.
    """

    def __init__(self, node_comm: MPI.Intracomm, num_counters: int) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = node_comm
        nbytes = 8 * WORDS_PER_LINE * num_counters
        self._window: Any = MPI.Win.Allocate_shared(nbytes if node_comm.rank == 0 else 0, 8, comm=node_comm)
        memory: Any = self._window.Shared_query(0)[0]
        self._words = np.ndarray(WORDS_PER_LINE * num_counters, np.int64, buffer=memory)
        # The memory is not always zero, and stores are ordered by Sync and a barrier together.
        if node_comm.rank == 0:
            self._words[:] = 0
        self._window.Lock_all(MPI.MODE_NOCHECK)
        self._window.Sync()
        node_comm.Barrier()
        self._window.Sync()

    def add(self, index: int, value: int) -> int:
        before = np.zeros(1, np.int64)
        self._window.Fetch_and_op(np.array([value], np.int64), before, 0, WORDS_PER_LINE * index, self._mpi.SUM)
        self._window.Flush(0)
        return int(before[0])

    def load(self, index: int) -> int:
        self._window.Sync()
        return int(self._words[WORDS_PER_LINE * index])

    def store(self, index: int, value: int) -> None:
        self._words[WORDS_PER_LINE * index] = value
        self._window.Sync()

    def free(self) -> None:
        """Collective over `node_comm`. Free the window. Idempotent."""
        if self._window is not None:
            window, self._window = self._window, None
            window.Unlock_all()
            window.Free()


def node_communicator(world_rank: int, world_size: int, node_size: int) -> MPI.Intracomm:
    """Collective over the MPI world. The ranks of this node, as MPI sees them.

    Raises
    ------
    ConfigError
        If MPI's world is not the training world, its thread level is too low, or it sees other
        neighbours than the host names tell (two containers on one node).
    """
    world = start_mpi()
    from mpi4py import MPI

    if (world.rank, world.size) != (world_rank, world_size):
        raise ConfigError(
            f"tokens.backend 'mpi' needs MPI's world to be the training world, but MPI sees rank {world.rank} of "
            f"{world.size} and torch rank {world_rank} of {world_size}. Start with srun or mpirun, or use 'flock'"
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise ConfigError("tokens.backend 'mpi' needs MPI_THREAD_MULTIPLE, which this MPI does not give: use 'flock'")
    node_comm: Any = world.Split_type(MPI.COMM_TYPE_SHARED)
    if node_comm.size != node_size:
        raise ConfigError(
            f"MPI sees {node_comm.size} ranks that share memory, but {node_size} have this host name: use 'flock'"
        )
    return cast("MPI.Intracomm", node_comm)
