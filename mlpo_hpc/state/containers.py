"""The containers of all tiers, opened by the ranks together: which kind, moved by which transport, and why."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack

from mlpo_hpc.cluster.node import Node, gather_on_node, mpi_obstacle, node_communicator
from mlpo_hpc.cluster.verdict import gather, together
from mlpo_hpc.errors import ConfigError, MpiMismatch
from mlpo_hpc.state.node_file import Means, Slots, open_node_file, tell_of_hints
from mlpo_hpc.storage.base import FileContainer
from mlpo_hpc.storage.contents import Contents
from mlpo_hpc.storage.folder import private_folder
from mlpo_hpc.storage.place import Place
from mlpo_hpc.storage.posix import open_raw
from mlpo_hpc.telemetry.log import say

UNSEEN = "ranks of one host do not see the same files in its directory (containers?)"


def open_containers(
    places: Sequence[Place],
    means: Mapping[str, Means],
    wanted: Sequence[Slots],
    contents: Contents,
    node: Node,
    creation_hints: Mapping[str, Mapping[str, str]],
    opening: ExitStack,
    staying: Collection[str] = (),
) -> list[FileContainer | None]:
    """Collective over the training world. The container of each tier; None where this rank wants no slots.

    Parameters
    ----------
    places : sequence of Place
        The tiers, the same number on all ranks.
    means : mapping
        How each is made and moved, by name.
    wanted : sequence of Slots
        Of each.
    contents : Contents
        What this rank's slots will hold.
    node : Node
        This rank's place in the job.
    creation_hints : mapping
        Of a tier's name to hints for MPI-IO that ask for its striping.
    opening : ExitStack
        Gets what must be done if something fails later.
    staying : collection of str
        Tiers whose file of a node has a name as long as it is open.

    Raises
    ------
    StorageError
        If one cannot be made, the same on all ranks; nothing is left behind.
    """
    used = [any(gather(slots.num_slots > 0)) for slots in wanted]
    opened: list[FileContainer | None] = []
    for place, slots, use in zip(places, wanted, used, strict=True):
        if not use:
            opened.append(None)
        elif means[place.tier.name].container == "raw":
            opened.append(_open_raw(place, slots, means[place.tier.name], opening))
            tell_of_hints(place.tier.name, opened[-1], place.tier.hints)
        else:
            hints = {**creation_hints.get(place.tier.name, {}), **place.tier.hints}
            how = means[place.tier.name]
            opened.append(open_node_file(place, slots, contents, node, how, hints, opening, place.tier.name in staying))
            tell_of_hints(place.tier.name, opened[-1], hints)
    return opened


def open_again(
    place: Place,
    means: Means,
    slots: Slots,
    contents: Contents,
    node: Node,
    creation_hints: Mapping[str, Mapping[str, str]],
) -> FileContainer | None:
    """Another container like one that was opened by `open_containers`.

    ``hdf5``: collective over the training world, and with a name as long as it is open; ``raw``: of this rank alone.
    """
    if means.container == "raw":
        return open_own_file(place, means.transport, slots)
    hints = {**creation_hints.get(place.tier.name, {}), **place.tier.hints}
    with ExitStack() as opening:
        container = open_node_file(place, slots, contents, node, means, hints, opening, stays=True)
        opening.pop_all()
    return container


def pick_means(places: Sequence[Place], node: Node) -> dict[str, Means]:
    """Collective over the training world. Container and transport of each tier, and why.

    Raises
    ------
    ConfigError
        If HDF5 is asked for and h5py is missing.
    """
    containers = _pick_containers(places, node)
    asked = {place.tier.name: place.tier.transport or _usual_transport(containers[place.tier.name]) for place in places}
    built = "hdf5" in containers.values() and all(gather(together(_parallel_hdf5)))
    obstacle = ""
    if built or "mpiio" in asked.values():
        obstacle = _why_not_mpi(node, alone=any(place.tier.transport == "mpiio" for place in places))
    parallel = built and not obstacle and all(gather(node_communicator().size == node.node_size))
    means = {}
    for name, container in containers.items():
        transport = "posix" if obstacle else asked[name]
        means[name] = Means(container, transport, parallel and container == "hdf5")
        if transport != asked[name]:
            say("tier %s: transport 'posix', for MPI-IO cannot be used: %s", name, obstacle)
    return means


def _why_not_mpi(node: Node, alone: bool) -> str:
    """Collective over the training world. Bytes can go another way, so nothing here is an error."""
    try:
        return mpi_obstacle(node, alone)
    except MpiMismatch as error:
        return str(error).splitlines()[-1]


def _pick_containers(places: Sequence[Place], node: Node) -> dict[str, str]:
    """Collective over the training world. One file for a node needs ranks that see the same directory."""
    picked: dict[str, str] = gather({place.tier.name: _container(place) for place in places})[0]
    for place in places:
        name = place.tier.name
        if picked[name] == "hdf5" and not _see_the_same(place, node):
            if place.tier.keep:
                raise ConfigError(f"tier {name!r}: {UNSEEN}: do without 'keep'")
            say("tier %s: container 'raw', for %s", name, UNSEEN)
            picked[name] = "raw"
    return picked


def _see_the_same(place: Place, node: Node) -> bool:
    """Collective over the training world. Whether the ranks of each node see what its first one makes there."""
    with ExitStack() as endings:
        first = node.node_rank == 0
        mine = together(lambda: endings.enter_context(private_folder(place.path)) if first else None)
        folder = next(path for path in gather_on_node(node, mine) if path is not None)
        return all(gather(os.path.isdir(folder)))


def _container(place: Place) -> str:
    if place.tier.container is not None:
        return place.tier.container
    return "hdf5" if place.shared or place.tier.keep else "raw"


def _usual_transport(container: str) -> str:
    return "mpiio" if container == "hdf5" else "posix"


def _parallel_hdf5() -> bool:
    try:
        from mlpo_hpc.storage.hdf5 import has_parallel_hdf5

        return has_parallel_hdf5()
    except ImportError as error:
        raise ConfigError(f'container \'hdf5\' needs h5py ({error}): install it, or say "container": "raw"') from error


def _open_raw(place: Place, slots: Slots, means: Means, opening: ExitStack) -> FileContainer | None:
    """Collective over the training world. A file of each rank's own, without a name: nothing is left."""

    def make() -> FileContainer | None:
        if not slots.num_slots:
            return None
        container = open_own_file(place, means.transport, slots)
        opening.callback(container.close)
        return container

    return together(make)


def open_own_file(place: Place, transport: str, slots: Slots) -> FileContainer:
    """Container ``raw``: a file of this rank's own, without a name.

    Raises
    ------
    StorageError
        If it cannot be made.
    """
    if transport == "posix":
        return open_raw(place.path, slots.chunk_bytes, slots.num_slots)
    from mlpo_hpc.storage.mpiio import MpiFile, create

    with private_folder(place.path) as folder:
        path = os.path.join(folder, "state")
        create(path, place.tier.hints, slots.chunk_bytes * slots.num_slots)
        file = MpiFile(path, place.tier.hints)
        file.path = place.path
        return FileContainer(file, slots.chunk_bytes, slots.num_slots)
