"""Backend ``mpi``: tickets in one MPI shared-memory window per node.

The window is opened once, with one passive epoch for its life (`Lock_all` with NOCHECK): what other
schemes do per operation needs the target's attention, and a rank inside a write gives none.
"""

from __future__ import annotations

import shutil
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlpo_hpc.cluster.node import Node, gather_on_node, mpi_obstacle, node_communicator
from mlpo_hpc.cluster.verdict import gather, raise_together, together
from mlpo_hpc.errors import MlpoError
from mlpo_hpc.tokens.ticket import Counters

if TYPE_CHECKING:
    from mpi4py import MPI

WORDS_PER_LINE = 16  # 128 bytes: neighbouring counters must not share what processors fetch together
TOKENS_PER_WINDOW = 32
SHARED_MEMORY = Path("/dev/shm")
SPARE_BYTES = 2**20
"""What MPI wants there besides, for its own use of a window."""


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
        nbytes = window_bytes(num_counters)
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


def window_bytes(num_counters: int) -> int:
    """Shared memory that a window takes."""
    return 8 * WORDS_PER_LINE * num_counters


def why_not(node: Node) -> str:
    """Collective over the training world. Why tokens cannot go by MPI here; empty on all ranks if they can.

    Raises
    ------
    ConfigError
        If the launcher started one world and MPI sees another.
    """
    if reason := mpi_obstacle(node, alone=True) or next(filter(None, gather(lack_of_memory(node))), ""):
        return reason
    # All ranks are in one MPI world now, so a collective call is safe.
    node_comm = node_communicator()
    neighbours = ""
    if node_comm.size != node.node_size:
        neighbours = f"MPI sees {node_comm.size} ranks that share memory, but {node.node_size} are on host {node.host}"
    return next(filter(None, gather(neighbours)), "")


def lack_of_memory(node: Node) -> str:
    """Why shared memory of this host is too small for the tokens of a node's ranks; empty if it is not."""
    if not SHARED_MEMORY.is_dir():
        return ""
    free = shutil.disk_usage(SHARED_MEMORY).free
    needed = window_bytes(TOKENS_PER_WINDOW * (2 + node.node_size)) + SPARE_BYTES
    if free >= needed:
        return ""
    return f"{SHARED_MEMORY} of host {node.host} has {free:,} free bytes, {needed:,} are needed"


_windows: list[WindowCounters] = []
_tokens: dict[Hashable, tuple[WindowCounters, int]] = {}
"""Window and first counter of every token that the engines of this process have used."""


def token_counters(
    node: Node, keys: Sequence[Hashable], counters_per_token: int
) -> dict[Hashable, tuple[WindowCounters, int]]:
    """Collective over the training world. Counters for tokens, the same for the same key on a node.

    Windows live as long as the process: freeing one is collective, and a rank that fails must not
    wait for the others. MPI drops them at its end.

    Parameters
    ----------
    node : Node
        This rank's place.
    keys : sequence of hashable
        Equal on the ranks of a node, in the same order.
    counters_per_token : int
        Counters that each needs.
    """
    counts = gather_on_node(node, len(_tokens))
    error = MlpoError(f"ranks of host {node.host} have opened different numbers of tokens before: {counts}")
    raise_together(error if len(set(counts)) > 1 else None)
    together(lambda: _make_missing(keys, counters_per_token))
    return {key: _tokens[key] for key in keys}


def _make_missing(keys: Sequence[Hashable], counters_per_token: int) -> None:
    for key in keys:
        if key not in _tokens:
            if len(_tokens) == TOKENS_PER_WINDOW * len(_windows):
                _windows.append(WindowCounters(node_communicator(), TOKENS_PER_WINDOW * counters_per_token))
            _tokens[key] = (_windows[-1], len(_tokens) % TOKENS_PER_WINDOW * counters_per_token)
