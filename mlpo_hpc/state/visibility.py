"""Whether the nodes of a job see the same files in a tier's directory: found out, not believed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from mlpo_hpc.cluster.node import Node
from mlpo_hpc.cluster.verdict import gather, raise_together, together
from mlpo_hpc.errors import ConfigError, here, storage_error
from mlpo_hpc.storage.owner import new_name
from mlpo_hpc.storage.place import Place
from mlpo_hpc.telemetry.log import say, warn


def look_across(places: Sequence[Place], node: Node) -> list[Place]:
    """Collective over the training world. The places, with `shared` as it really is.

    The first rank of the first node writes a file of a name of its own in each directory and the other nodes look for
    it: device numbers prove nothing, for local drives have the same ones everywhere. One node has nothing to
    find out.

    Raises
    ------
    ConfigError
        If a tier is said to be shared and some node does not see it.
    """
    nodes = list(dict.fromkeys(gather(node.key)))
    if len(nodes) == 1:
        return list(places)
    with ExitStack() as files:
        names = gather(together(lambda: [_mark(place, files) for place in places] if node.world_rank == 0 else []))[0]
        seen = [os.path.exists(os.path.join(place.path, name)) for place, name in zip(places, names, strict=True)]
        elsewhere = [theirs for key, theirs in gather((node.key, seen)) if key != nodes[0]]
    everywhere = [all(column) for column in zip(*elsewhere, strict=True)]
    raise_together(_lie(places, seen, is_first=node.key == nodes[0]))
    return [_settle(place, shared) for place, shared in zip(places, everywhere, strict=True)]


def _mark(place: Place, files: ExitStack) -> str:
    path = os.path.join(place.path, new_name())
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise storage_error("writing a file to be seen by the other nodes", place.path, error) from error
    os.close(fd)
    files.callback(os.unlink, path)
    return os.path.basename(path)


def _lie(places: Sequence[Place], seen: Sequence[bool], is_first: bool) -> ConfigError | None:
    for place, sees in zip(places, seen, strict=True):
        if place.tier.kind == "shared" and not sees and not is_first:
            return ConfigError(
                f"tier {place.tier.name!r} is 'shared', but what the first node writes there is not seen on "
                f"{here(place.path)}: point 'dir' to a file system that all nodes mount, or say 'node_local'"
            )
    return None


def _settle(place: Place, shared: bool) -> Place:
    name, where = place.tier.name, f"{place.path} ({place.filesystem.type})"
    if shared and place.tier.kind == "node_local":
        warn("tier %s is 'node_local', but all nodes see the same files in %s: they share its bandwidth", name, where)
    elif shared != place.shared:
        say("tier %s: %s is %s", name, where, "shared by the nodes" if shared else "another directory on each node")
    return replace(place, shared=shared)
