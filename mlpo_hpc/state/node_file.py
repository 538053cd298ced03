"""The file of an ``hdf5`` container, made by the ranks of a node: laid out, opened by all, then named or not."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlpo_hpc import __version__
from mlpo_hpc.cluster.node import Node, gather_on_node, node_communicator
from mlpo_hpc.cluster.verdict import gather, together
from mlpo_hpc.errors import StorageError, TierFull, here
from mlpo_hpc.storage.base import FileContainer, Transport, round_up
from mlpo_hpc.storage.contents import Contents
from mlpo_hpc.storage.folder import private_folder
from mlpo_hpc.storage.index import SlotIndex
from mlpo_hpc.storage.place import Place
from mlpo_hpc.storage.posix import open_posix
from mlpo_hpc.storage.striping import file_alignment_bytes
from mlpo_hpc.telemetry.log import say, warn

if TYPE_CHECKING:
    from mlpo_hpc.storage.hdf5 import Extent, Share

ROOM_FOR_LAYOUT_BYTES = 2**20
"""What HDF5's own part of a file may take: a full file system is better found before."""
ROOM_FOR_NAME_BYTES = 4096
"""The same for what is said of a parameter (1 KB was seen with 8 ranks)."""

_numbers = itertools.count()


@dataclass(frozen=True)
class Slots:
    """What a rank wants of one tier."""

    chunk_bytes: int
    num_slots: int


@dataclass(frozen=True)
class Means:
    """How the file of a tier is made and moved."""

    container: str
    transport: str
    together: bool
    """Laid out by all ranks of the node, with parallel HDF5."""


@dataclass(frozen=True)
class Plan:
    """What the first rank of a node decides for the others."""

    path: str
    final: str | None
    """Its name when it is kept."""
    alignment_bytes: int
    about: dict[str, str | int]


def open_node_file(
    place: Place,
    slots: Slots,
    contents: Contents,
    node: Node,
    means: Means,
    hints: Mapping[str, str],
    opening: ExitStack,
    stays: bool = False,
) -> FileContainer | None:
    """Collective over the training world. This rank's slots in its node's file; None if it wants none.

    Parameters
    ----------
    place, slots, contents, node, means, hints, opening
        As in `open_containers`.
    stays : bool
        Whether a file that is not kept has its name, in a folder of ours, until it is closed: without one it could not
        become a part of a checkpoint.

    Raises
    ------
    StorageError
        If the file cannot be made, the same on all ranks; nothing is left behind.
    """
    with ExitStack() as endings:
        mine = together(lambda: _plan(place, node, endings) if node.node_rank == 0 else None)
        plan = next(theirs for theirs in gather_on_node(node, mine) if theirs is not None)
        shares = gather_on_node(node, _share(node.world_rank, slots, contents, plan))
        together(lambda: _prepare(plan, shares, means, hints) if node.node_rank == 0 else None)
        made = together(lambda: _lay_out(plan, shares, node, means))
        extents = next(found for found in gather_on_node(node, made) if found is not None)
        share = shares[node.node_rank]
        container = together(lambda: _open(plan, share, extents[node.world_rank], means, hints, opening))
        named = stays and shares[0].num_slots > 0
        together(lambda: _settle(plan, opening) if node.node_rank == 0 and not named else None)
        if named and container is not None:
            container.endings = endings.pop_all()
            opening.callback(container.close)
    if plan.final is not None:
        say("tier %s: what it holds stays in %s", place.tier.name, plan.final)
    return container


def _plan(place: Place, node: Node, endings: ExitStack) -> Plan:
    folder = endings.enter_context(private_folder(place.path))
    job = os.environ.get("SLURM_JOB_ID", "")
    restart = os.environ.get("SLURM_RESTART_COUNT", "0")
    about: dict[str, str | int] = {
        "library": "mlpo_hpc",
        "library_version": __version__,
        "tier": place.tier.name,
        "host": node.host,
        "job": job,
        "restart_count": int(restart),
        "world_size": node.world_size,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    final = None
    if place.tier.keep:
        whose = f"job{job}.{restart}" if job else time.strftime("%Y%m%d-%H%M%S")
        final = os.path.join(place.path, f"{place.tier.name}-{whose}-{node.host}-{os.getpid()}.{next(_numbers)}.h5")
    return Plan(
        os.path.join(folder, "state.h5"), final, file_alignment_bytes(place.path, place.filesystem.is_lustre), about
    )


def _share(world_rank: int, slots: Slots, contents: Contents, plan: Plan) -> Share:
    from mlpo_hpc.storage.hdf5 import Share

    # Large slots begin on a stripe; what is between them is never written and takes no space.
    unit = plan.alignment_bytes if slots.chunk_bytes >= plan.alignment_bytes else 1
    # Nobody can read what a file without a name says; to say it takes a second for 1000 parameters.
    said = contents if plan.final is not None else Contents(contents.codec)
    return Share(world_rank, slots.chunk_bytes, round_up(slots.chunk_bytes, unit), slots.num_slots, said)


def _prepare(plan: Plan, shares: Sequence[Share], means: Means, hints: Mapping[str, str]) -> None:
    """What may fail on one rank alone, before all ranks of the node do something collective."""
    names = {piece.name for share in shares for piece in share.contents.pieces}
    _look_for_room(plan.path, ROOM_FOR_LAYOUT_BYTES + ROOM_FOR_NAME_BYTES * len(names))
    if hints and means.transport == "mpiio":
        from mlpo_hpc.storage.mpiio import create

        create(plan.path, hints)


def _lay_out(plan: Plan, shares: Sequence[Share], node: Node, means: Means) -> dict[int, Extent] | None:
    from mlpo_hpc.storage.hdf5 import lay_out

    if means.together:
        return lay_out(plan.path, shares, plan.about, plan.alignment_bytes, node_communicator())
    return lay_out(plan.path, shares, plan.about, plan.alignment_bytes) if node.node_rank == 0 else None


def _look_for_room(path: str, needed_bytes: int) -> None:
    space = os.statvfs(os.path.dirname(path))
    if space.f_bavail * space.f_frsize < needed_bytes:
        raise TierFull(f"there is no room for a state file on {here(path)}: free space there, or point 'dir' elsewhere")


def _open(
    plan: Plan, share: Share, extent: Extent, means: Means, hints: Mapping[str, str], opening: ExitStack
) -> FileContainer | None:
    if not share.num_slots:
        return None
    transport: Transport
    if means.transport == "mpiio":
        from mlpo_hpc.storage.mpiio import MpiFile

        transport = MpiFile(plan.path, hints)
    else:
        transport = open_posix(plan.path)
    opening.callback(transport.close)
    # As it will be called, or where it was: it has no name soon.
    transport.path = plan.final or os.path.dirname(os.path.dirname(plan.path))
    index = SlotIndex(transport, extent.index, share.num_slots) if plan.final else None
    return FileContainer(transport, share.slot_bytes, share.num_slots, "hdf5", extent.slots, index)


def _settle(plan: Plan, opening: ExitStack) -> None:
    """All have it open: it gets its name, or none."""
    if plan.final is None:
        os.unlink(plan.path)
        return
    if os.path.exists(plan.final):
        raise StorageError(f"there is a file {here(plan.final)} already: use another directory, or remove it")
    os.rename(plan.path, plan.final)
    opening.callback(os.unlink, plan.final)  # if a later tier fails


def tell_of_hints(name: str, container: FileContainer | None, hints: Mapping[str, str]) -> None:
    """Collective over the training world. Say once what MPI did not take."""
    if not hints:
        return
    ignored: dict[str, str | None] | None = None
    if container is not None and container.transport.name == "mpiio":
        from mlpo_hpc.storage.mpiio import MpiFile, ignored_hints

        assert isinstance(container.transport, MpiFile)
        ignored = ignored_hints(hints, container.transport.get_hints())
    found = [theirs for theirs in gather(ignored) if theirs is not None]
    if not found:
        warn("tier %s: the hints %s are for MPI-IO, which does not move its bytes: not used", name, ", ".join(hints))
    elif found[0]:
        said = ", ".join(
            f"{key} = {hints[key]} ({'not known' if used is None else f'{used} is used'})"
            for key, used in found[0].items()
        )
        warn("tier %s: MPI-IO ignores the hints %s", name, said)
