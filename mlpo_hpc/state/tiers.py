"""What is done to the places of the configuration before files are made there: locks, leftovers, striping, room."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack

from mlpo_hpc.cluster.job import Slurm
from mlpo_hpc.cluster.node import Node
from mlpo_hpc.cluster.sites import find_site
from mlpo_hpc.cluster.verdict import gather, together
from mlpo_hpc.errors import StorageError, storage_error
from mlpo_hpc.storage.leftovers import Rule, clean
from mlpo_hpc.storage.lock import DirectoryLock
from mlpo_hpc.storage.place import Place
from mlpo_hpc.storage.striping import has_lfs, set_layout, wanted_layout
from mlpo_hpc.telemetry.log import logger

CLEANING_S = 30.0
"""After which a start leaves the rest of what dead jobs left in a directory."""


def lock_directories(places: Sequence[Place], node: Node, resources: ExitStack) -> None:
    """Collective over the training world. One rank of those that share a directory locks it.

    Raises
    ------
    StorageError
        If another job uses one of them.
    """
    mine = _taken_care_of([place for place in places if not place.ours], node)

    def lock() -> None:
        for place in mine:
            try:
                resources.callback(DirectoryLock(place.path).close)
            except OSError as error:
                raise storage_error("locking the tier directory", place.path, error) from error

    together(lock)


def _taken_care_of(places: Sequence[Place], node: Node) -> list[Place]:
    """Collective over the training world. Those whose directory no lower rank uses, each directory once."""
    mine = together(lambda: [place.directory_key(node.key) for place in places])
    taken = {key for keys in gather(mine)[: node.world_rank] for key in keys}
    firsts = dict(zip(reversed(mine), reversed(places), strict=True))
    return [place for key, place in firsts.items() if key not in taken]


def remove_leftovers(places: Sequence[Place], node: Node) -> None:
    """Collective over the training world. Remove what dead jobs left in the directories, by one rank of each.

    Only what is certain goes, and nothing that fails here keeps a job from starting: the log tells.
    """
    slurm = Slurm(os.environ)
    for place in _taken_care_of(places, node):
        # Of what was left on its own drives a node knows without asking; thousands would ask at once.
        _clean(place, Rule(slurm if place.shared else None))


def _clean(place: Place, rule: Rule) -> None:
    name, deadline, stays = place.tier.name, time.monotonic() + CLEANING_S, 0
    try:
        for found in clean(place.path, rule):
            stays += found.outcome in ("unknown", "failed")
            if found.outcome == "removed":
                logger.info("tier %s: removed %s, left by %s: %s", name, found.path, found.owner, found.reason)
            if time.monotonic() > deadline:
                logger.warning("tier %s: removing leftovers takes long: the rest is for 'mlpo clean'", name)
                break
    except StorageError as error:
        logger.warning("tier %s: %s", name, error)
    if stays:
        logger.warning("tier %s: %d leftovers stay, see 'mlpo clean --dry-run %s'", name, stays, place.path)


def stripe_directories(places: Sequence[Place], node: Node) -> dict[str, dict[str, str]]:
    """Collective over the training world. Set the striping of each directory, by one rank of those that share it.

    Striping is advice: what cannot be set, or is granted otherwise, is a warning.

    Returns
    -------
    dict
        Where there is no ``lfs``: hints for MPI-IO that ask for the same when a file is made, by tier.
    """
    wanted = [place for place in places if place.tier.striping.policy != "inherit"]
    mine = [place.directory_key(node.key) for place in wanted]
    everyone = gather((node.key, mine))
    num_nodes = len({key for key, _ in everyone})
    taken = {key for _, keys in everyone[: node.world_rank] for key in keys}
    hints = {
        place.tier.name: _stripe(place, num_nodes) for place, key in zip(wanted, mine, strict=True) if key not in taken
    }
    # Nothing may be made there before all have come here.
    return {name: found for theirs in gather(hints) for name, found in theirs.items() if found}


def _stripe(place: Place, num_nodes: int) -> dict[str, str]:
    """Hints for MPI-IO, if those are the only way."""
    name, directory = place.tier.name, place.path
    layout, reason = wanted_layout(place.tier.striping, "state", num_nodes, find_site(os.environ))
    if not place.filesystem.is_lustre:
        logger.info("tier %s: %s is %s, which has no stripes to set", name, directory, place.filesystem.type)
    elif place.ours:
        logger.warning("tier %s: others use %s too, so its striping is left alone: give 'dir'", name, directory)
    elif layout is None:
        logger.info("tier %s: striping left as it is (%s)", name, reason)
    else:
        try:
            granted = set_layout(directory, layout)
        except (StorageError, OSError, subprocess.SubprocessError) as error:
            hints = {} if has_lfs() else layout.hints()
            instead = f"; asking for it by the hints {hints}" if hints else ""
            logger.warning("tier %s: striping '%s' (%s) was not set: %s%s", name, layout, reason, error, instead)
            return hints
        if granted.grants(layout):
            logger.info("tier %s: striping '%s' set on %s (%s)", name, layout, directory, reason)
        else:
            logger.warning("tier %s: striping '%s' was asked for, '%s' granted on %s", name, layout, granted, directory)
    return {}


def rooms_bytes(places: Sequence[Place], node: Node, fills_tiers: bool) -> list[int]:
    """Collective over the training world. Bytes that this rank may use on each tier.

    What is free on a file system is divided by the tiers and ranks that fill it; `capacity`,
    which is per node, by the ranks of the node.
    """
    mine = [("" if place.filesystem.is_shared else node.key, place.device_key) for place in places]
    filling = [key for keys, fills in gather((mine, fills_tiers)) if fills for key in keys]
    rooms = []
    for place, key in zip(places, mine, strict=True):
        room = place.filesystem.free_bytes // max(1, filling.count(key))
        capacity = place.tier.capacity
        rooms.append(room if capacity is None else min(room, int(capacity) // node.node_size))
    return rooms
