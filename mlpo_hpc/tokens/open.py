"""The tokens of all tiers, opened by the ranks of a node together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from mlpo_hpc.cluster.node import Node, gather_on_node
from mlpo_hpc.cluster.verdict import gather, raise_together, together
from mlpo_hpc.errors import ConfigError
from mlpo_hpc.storage.folder import common_folder
from mlpo_hpc.tokens.base import FreeToken, Token
from mlpo_hpc.tokens.local import local_token
from mlpo_hpc.tokens.process import Process

TokenPair = tuple[Token, Token]
"""For reading and for writing."""

WAYS = ("reading", "writing")

CONTAINERS = "ranks of one host do not see each other's files (containers?)"


@dataclass(frozen=True)
class Resource:
    """What takes turns: a tier's device.

    Ranks of a node whose `key` is equal share its tokens.
    """

    key: Hashable
    name: str
    permits: int


def pick_backend(node: Node) -> tuple[str, str]:
    """Collective over the training world. What ``auto`` means here, and why.

    Raises
    ------
    ConfigError
        If the launcher started one world and MPI sees another.
    """
    if max(gather(node.node_size)) == 1:
        return "local", "no node has two ranks of this job"
    with common_folder(node) as folder:
        if folder is None:
            return "off", CONTAINERS
    reason = _why_not_mpi(node)
    return ("flock", reason) if reason else ("mpi", "MPI's world is the training world")


def open_tokens(
    backend: str, resources: Sequence[Resource], node: Node, timeout_s: float, endings: ExitStack
) -> list[TokenPair]:
    """Collective over the training world. The tokens of each resource.

    Parameters
    ----------
    backend : str
        ``mpi``, ``flock``, ``local`` or ``off``.
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
    if backend == "local":
        return [(_local(r, 0, timeout_s), _local(r, 1, timeout_s)) for r in resources]
    mine = [(resource.key, resource.permits) for resource in resources]
    shared = list(dict.fromkeys(entry for theirs in gather_on_node(node, mine) for entry in theirs))
    processes = gather_on_node(node, Process.this(node.world_rank, node.host))
    make = _open_mpi if backend == "mpi" else _open_flock
    return make(resources, shared, node, processes, timeout_s, endings)


def _local(resource: Resource, way: int, timeout_s: float) -> Token:
    return local_token(resource.key, f"{WAYS[way]} on {resource.name}", resource.permits, timeout_s)


def _why_not_mpi(node: Node) -> str:
    from mlpo_hpc.tokens.mpi_window import why_not

    return why_not(node)


def _open_mpi(
    resources: Sequence[Resource],
    shared: list[tuple[Hashable, int]],
    node: Node,
    processes: list[Process],
    timeout_s: float,
    _endings: ExitStack,
) -> list[TokenPair]:
    """Two tickets for each resource in the node's window, the same ones for every engine of a process."""
    reason = _why_not_mpi(node)
    raise_together(ConfigError(f"tokens.backend 'mpi' cannot work: {reason}. Use 'flock'") if reason else None)
    from mlpo_hpc.tokens.mpi_window import token_counters
    from mlpo_hpc.tokens.ticket import TicketToken

    # Containers of one name may share memory and not see each other's processes.
    looks = all(gather_on_node(node, all(process.is_alive() for process in processes)))
    keys = [(*entry, way) for entry in shared for way in WAYS]
    places = token_counters(node, keys, TicketToken.num_counters(node.node_size))

    def token(resource: Resource, way: str) -> Token:
        counters, base = places[resource.key, resource.permits, way]
        name = f"{way} on {resource.name}"
        return TicketToken(name, counters, base, resource.permits, node.node_rank, processes, timeout_s, looks)

    return [(token(r, WAYS[0]), token(r, WAYS[1])) for r in resources]


def _open_flock(
    resources: Sequence[Resource],
    shared: list[tuple[Hashable, int]],
    node: Node,
    processes: list[Process],
    _timeout_s: float,
    endings: ExitStack,
) -> list[TokenPair]:
    """Lock files in a folder of the node, opened by all and removed at once."""
    from mlpo_hpc.tokens.flock import FlockToken

    with common_folder(node) as folder:
        error = ConfigError(f"tokens.backend 'flock' cannot work: {CONTAINERS}. Use 'off'")
        raise_together(error if folder is None else None)

        def token(resource: Resource, way: str) -> Token:
            number = shared.index((resource.key, resource.permits))
            paths = [f"{folder}/{number}-{way}-{permit}" for permit in range(resource.permits)]
            opened = FlockToken(f"{way} on {resource.name}", paths, node.node_rank, processes)
            endings.callback(opened.free)
            return opened

        return together(lambda: [(token(r, WAYS[0]), token(r, WAYS[1])) for r in resources])
