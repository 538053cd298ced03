"""The tokens of all tiers, opened by the ranks of a node together."""

from __future__ import annotations

import shutil
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from mlpo_hpc.cluster.node import Node
from mlpo_hpc.cluster.verdict import gather, together
from mlpo_hpc.tokens.base import FreeToken, Token
from mlpo_hpc.tokens.local import local_token

TokenPair = tuple[Token, Token]
"""For reading and for writing."""


@dataclass(frozen=True)
class Resource:
    """What takes turns: a tier's directory.

    Ranks of a node whose `key` is equal share its tokens.
    """

    key: Hashable
    name: str
    path: str
    permits: int


def open_tokens(
    backend: str, resources: Sequence[Resource], node: Node, timeout_s: float, endings: ExitStack
) -> list[TokenPair]:
    """Collective over the training world. The tokens of each resource.

    Parameters
    ----------
    backend : str
        ``mpi``, ``flock``, ``local``, ``off`` or ``auto`` (``local``).
    resources : sequence of Resource
        Of this rank.
    node : Node
        This rank's place.
    timeout_s : float
        Longest wait for a permit.
    endings : ExitStack
        Gets what must be done at the end.

    Raises
    ------
    ConfigError
        If the backend cannot work here.
    """
    if backend == "off":
        return [(FreeToken(), FreeToken()) for _ in resources]
    if backend in ("auto", "local"):
        return [
            (local_token(r.path, "reading", r.permits, timeout_s), local_token(r.path, "writing", r.permits, timeout_s))
            for r in resources
        ]
    mine = [(resource.key, resource.permits) for resource in resources]
    of_node = [theirs for host, theirs in gather((node.host, mine)) if host == node.host]
    shared = list(dict.fromkeys(entry for theirs in of_node for entry in theirs))
    numbers = [shared.index(entry) for entry in mine]
    if backend == "mpi":
        return _open_mpi(resources, numbers, len(shared), node, timeout_s)
    return _open_flock(resources, numbers, [permits for _, permits in shared], node, endings)


def _open_mpi(
    resources: Sequence[Resource], numbers: list[int], count: int, node: Node, timeout_s: float
) -> list[TokenPair]:
    """Two tickets for each resource in one window of the node.

    The window is not freed: that is collective, and a rank that fails must not wait for the others.
    MPI drops it at its end.
    """
    from mlpo_hpc.tokens.mpi_window import WindowCounters, node_communicator
    from mlpo_hpc.tokens.ticket import Process, TicketToken

    node_comm = together(lambda: node_communicator(node.world_rank, node.world_size, node.node_size))
    this = Process.this(node.world_rank, node.host)
    processes = [process for process in gather(this) if process.host == node.host]
    size = TicketToken.num_counters(node.node_size)
    counters = WindowCounters(node_comm, 2 * size * count)

    def token(resource: Resource, number: int, way: int) -> TicketToken:
        name = f"{('reading', 'writing')[way]} on {resource.name}"
        base = size * (2 * number + way)
        return TicketToken(name, counters, base, resource.permits, node.node_rank, processes, timeout_s)

    return [(token(r, number, 0), token(r, number, 1)) for r, number in zip(resources, numbers, strict=True)]


def _open_flock(
    resources: Sequence[Resource], numbers: list[int], permits: list[int], node: Node, endings: ExitStack
) -> list[TokenPair]:
    """Lock files made by the node's first rank, opened by all, and removed at once."""
    from mlpo_hpc.tokens.flock import FlockToken, make_lock_files

    made = together(lambda: make_lock_files(2 * sum(permits)) if node.node_rank == 0 else None)
    paths = next(entry[1][1] for entry in gather((node.host, made)) if entry[0] == node.host and entry[1])
    starts = [2 * sum(permits[:number]) for number in range(len(permits))]

    def token(resource: Resource, number: int, way: int) -> FlockToken:
        begin = starts[number] + way * resource.permits
        opened = FlockToken(paths[begin : begin + resource.permits], node.node_rank)
        endings.callback(opened.free)
        return opened

    try:
        return together(
            lambda: [(token(r, number, 0), token(r, number, 1)) for r, number in zip(resources, numbers, strict=True)]
        )
    finally:
        if made is not None:
            shutil.rmtree(made[0])
