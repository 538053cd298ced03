"""Whether the state of a model fits on the tiers and in the host memory of each node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlpo_hpc.doctor.finding import Finding
from mlpo_hpc.doctor.memory import gigabytes
from mlpo_hpc.doctor.storage import Room

COPIES_TO_SAVE = 2
"""Of the state on tiers, while a checkpoint is saved."""


def room_bytes(rooms: Sequence[Room], num_nodes: int) -> int:
    """Bytes that one node may fill.

    Parameters
    ----------
    rooms : sequence of Room
        Of its tiers. What is free on a file system counts once, and is divided by the nodes that fill it.
    num_nodes : int
        Of the job.
    """
    total = 0
    for device in {room.device for room in rooms}:
        on_device = [room for room in rooms if room.device == device]
        free = min(room.free_bytes // (num_nodes if room.shared else 1) for room in on_device)
        wanted = [free if room.capacity_bytes is None else room.capacity_bytes for room in on_device]
        total += min(free, sum(wanted))
    return total


def judge_space(state_bytes: int, rooms: Sequence[Room], budget_bytes: int, num_nodes: int) -> Finding:
    """Finding ``space`` of one node.

    Parameters
    ----------
    state_bytes : int
        Of this node.
    rooms : sequence of Room
        Of its tiers.
    budget_bytes : int
        Host memory for state.
    num_nodes : int
        Of the job.
    """
    room = room_bytes(rooms, num_nodes)
    have = f"{gigabytes(room)} on tiers, {gigabytes(budget_bytes)} of host memory"
    seen = f"{gigabytes(state_bytes)} of state a node; {have}"
    advice = "use more nodes, free space, raise 'capacity' or add a tier"
    if state_bytes <= budget_bytes:
        return Finding(check="space", verdict="ok", seen=f"{seen}: it fits into memory")
    if state_bytes > room:
        return Finding(check="space", verdict="fail", seen=seen, advice=advice)
    if COPIES_TO_SAVE * state_bytes > room:
        return Finding(
            check="space", verdict="warn", seen=f"{seen}: no room for a second copy while saving", advice=advice
        )
    return Finding(check="space", verdict="ok", seen=seen)


def judge_devices(rooms: Mapping[str, Room]) -> list[Finding]:
    """A finding ``tier`` for each tier that is on the device of an earlier one.

    Parameters
    ----------
    rooms : mapping
        By name of the tier, of one node.
    """
    found: list[Finding] = []
    first: dict[str, str] = {}
    for name, room in rooms.items():
        other = first.setdefault(room.device, name)
        if other != name:
            seen = f"on one device with tier {other}: they share its bandwidth"
            advice = "give one directory on each storage; a second one on the same device adds nothing"
            found.append(Finding(check="tier", verdict="warn", seen=seen, advice=advice, subject=name))
    return found
