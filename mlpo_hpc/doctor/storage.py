"""The directory of one tier: usable, no memory, direct I/O, striping."""

from __future__ import annotations

import os
import subprocess

from pydantic import BaseModel

from mlpo_hpc.cluster.sites import find_site
from mlpo_hpc.config import OffloadConfig, Striping, Tier
from mlpo_hpc.doctor.finding import Finding, split_advice
from mlpo_hpc.doctor.memory import gigabytes
from mlpo_hpc.errors import MlpoError, StorageError
from mlpo_hpc.storage.base import ALIGNMENT_BYTES
from mlpo_hpc.storage.filesystem import describe
from mlpo_hpc.storage.place import NODE_LOCAL_CANDIDATES, SHARED_CANDIDATES, Place, find_places
from mlpo_hpc.storage.posix import open_unnamed
from mlpo_hpc.storage.striping import get_layout, wanted_layout


class Room(BaseModel):
    """What a tier has on this node.

    Parameters
    ----------
    path, filesystem : str
        Where it is, and the type of what is mounted there.
    device : str
        Equal for the tiers of a node that fill one file system.
    free_bytes : int
        On that file system.
    capacity_bytes : int, optional
        What the configuration allows, a node.
    shared : bool
        Whether all nodes fill it.
    """

    path: str
    filesystem: str
    device: str
    free_bytes: int
    capacity_bytes: int | None
    shared: bool


class TierFacts(BaseModel):
    """What a child saw; no room if the tier cannot be used."""

    findings: list[Finding]
    room: Room | None = None


def look(tier_json: str, num_nodes: str) -> TierFacts:
    """Look at one tier as the start of training does. Nothing is left behind.

    Parameters
    ----------
    tier_json : str
        A `Tier`.
    num_nodes : str
        That write there.
    """
    tier = Tier.model_validate_json(tier_json)
    try:
        (place,) = find_places(OffloadConfig(tiers=[tier]))
        file = open_unnamed(place.path, ALIGNMENT_BYTES)
        direct = file.direct
        file.close()
    except (MlpoError, OSError) as error:
        return TierFacts(findings=[_unusable(tier, str(error))])
    filesystem = place.filesystem
    kind = "shared" if place.shared else "node-local"
    seen = f"{place.path} ({filesystem.type}, {kind}), {gigabytes(filesystem.free_bytes)} free"
    findings = [
        Finding(check="tier", verdict="ok", seen=seen, subject=tier.name),
        _direct(place, direct),
        *_striping(place, int(num_nodes)),
    ]
    capacity = None if tier.capacity is None else int(tier.capacity)
    room = Room(
        path=place.path,
        filesystem=filesystem.type,
        device=repr(place.device_key),
        free_bytes=filesystem.free_bytes,
        capacity_bytes=capacity,
        shared=place.shared,
    )
    return TierFacts(findings=findings, room=room)


def _unusable(tier: Tier, text: str) -> Finding:
    seen, advice = split_advice(text.removeprefix(f"tier {tier.name!r}: "))
    advice = advice or "correct the tier's 'dir', or set the variable in the job"
    return Finding(check="tier", verdict="fail", seen=seen, advice=advice, subject=tier.name)


def _direct(place: Place, direct: bool) -> Finding:
    name = place.tier.name
    if direct:
        return Finding(check="direct I/O", verdict="ok", seen="O_DIRECT works", subject=name)
    if place.filesystem.is_memory:
        return Finding(check="direct I/O", verdict="skipped", seen="memory ('allow_memory')", subject=name)
    return Finding(
        check="direct I/O",
        verdict="warn",
        seen=f"{place.filesystem.type} does not take O_DIRECT: each chunk goes through the page cache and is synced",
        advice="measure it with 'mlpo probe'; a directory on another file system may be faster",
        subject=name,
    )


def _striping(place: Place, num_nodes: int) -> list[Finding]:
    """On Lustre only: what new files get, against what this library would set."""
    if not place.filesystem.is_lustre:
        return []
    name, directory = place.tier.name, place.path
    try:
        layout = get_layout(directory)
    except (StorageError, OSError, subprocess.SubprocessError) as error:
        seen, advice = split_advice(str(error))
        advice = advice or "load Lustre's tools on the node, or set the striping by hand before the job (mlpo stripe)"
        return [Finding(check="striping", verdict="warn", seen=seen, advice=advice, subject=name)]
    asked = place.tier.striping
    if asked.policy != "inherit":
        wanted, reason = wanted_layout(asked, "state", num_nodes, find_site(os.environ))
        seen = f"'{layout}' now; '{wanted}' will be set ({reason})" if wanted else f"'{layout}' stays ({reason})"
        return [Finding(check="striping", verdict="ok", seen=seen, subject=name)]
    usual, reason = wanted_layout(Striping(policy="auto"), "state", num_nodes, find_site(os.environ))
    if usual is None or layout.grants(usual):
        return [Finding(check="striping", verdict="ok", seen=f"'{layout}'", subject=name)]
    return [
        Finding(
            check="striping",
            verdict="warn",
            seen=f"new files get '{layout}', '{usual}' is usual ({reason})",
            advice=f"set it on a directory of your own: mlpo stripe {directory} --auto, or measure: --tune",
            subject=name,
        )
    ]


def look_at_places() -> TierFacts:
    """Finding ``tier`` where none is configured: which of the usual places are here, and which of them are memory."""
    paths = [os.path.expandvars(path) for path in (*NODE_LOCAL_CANDIDATES, *SHARED_CANDIDATES)]
    usable = [
        describe(path) for path in dict.fromkeys(paths) if os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)
    ]
    disks = [f"{fs.path} ({fs.type}, {gigabytes(fs.free_bytes)} free)" for fs in usable if not fs.is_memory]
    memory = [f"{fs.path} ({fs.type})" for fs in usable if fs.is_memory]
    seen = f"none configured; usual places here: {', '.join(disks) or 'none'}"
    seen += f"; memory, and so no storage: {', '.join(memory)}" if memory else ""
    advice = "say which storage to use: 'tiers' of the section mlp_offload (see the README)"
    return TierFacts(findings=[Finding(check="tier", verdict="skipped", seen=seen, advice=advice)])
