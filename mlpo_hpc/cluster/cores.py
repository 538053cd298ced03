"""How many cores a rank really has: what it may run on, shared with the ranks that may run there too."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from mlpo_hpc.cluster.node import Node, gather_on_node


def fair_cores(mine: Collection[int], everyone: Sequence[Collection[int]]) -> int:
    """Cores of one rank.

    Parameters
    ----------
    mine : collection of int
        Those that it may run on.
    everyone : sequence of collection of int
        The same of all ranks of its node, its own included.

    Returns
    -------
    int
        Each core is divided by the ranks that may run on it; at least 1.
    """
    share = sum(1 / sum(core in theirs for theirs in everyone) for core in mine)
    return max(1, round(share))


def cores_of_rank(node: Node) -> int:
    """Collective over the training world. Cores of this rank."""
    mine = sorted(os.sched_getaffinity(0))
    return fair_cores(mine, gather_on_node(node, mine))


def thread_advice(num_threads: int, num_cores: int) -> str:
    """What to say about a number of threads; empty if it is good enough."""
    if num_cores // 2 <= num_threads <= num_cores:
        return ""
    why = "updates would take longer than they need" if num_threads < num_cores else "they are in each other's way"
    return (
        f"torch uses {num_threads} threads a rank, which has {num_cores} cores of its own: {why}. Start with "
        f"OMP_NUM_THREADS={num_cores} (torchrun sets it to 1 where it is not set)"
    )
