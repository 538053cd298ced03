"""The store: the virtual tier of one rank, opened by all ranks together and closed by each alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mlpo_hpc.cluster.memory import AUTO_FRACTION, available_bytes
from mlpo_hpc.cluster.node import Node
from mlpo_hpc.cluster.verdict import gather, raise_together
from mlpo_hpc.config import OffloadConfig, Static, Tier
from mlpo_hpc.errors import ConfigError, MlpoError, TierFull, here, storage_error
from mlpo_hpc.state.cache import Pool
from mlpo_hpc.state.layout import Layout, lay_out, least_host_bytes
from mlpo_hpc.state.pipeline import Pipeline
from mlpo_hpc.state.table import Record, Table
from mlpo_hpc.storage.base import round_up
from mlpo_hpc.storage.lock import DirectoryLock
from mlpo_hpc.storage.place import Place, find_places, remove_default_tiers
from mlpo_hpc.storage.posix import RawFile
from mlpo_hpc.storage.probe import Bandwidth, quick_bandwidth
from mlpo_hpc.storage.tier import StorageTier
from mlpo_hpc.telemetry.log import say
from mlpo_hpc.tokens.base import FreeToken, Token
from mlpo_hpc.tokens.local import local_token

WORKING_RECORDS = 3
"""Buffers that an order needs whose first subgroups are not in host memory: read, update, write."""

T = TypeVar("T")


@dataclass
class Store:
    """What `open_store` opened."""

    pipeline: Pipeline
    scratch: memoryview
    """Memory for one 32-bit gradient, out of the same pool."""
    places: list[Place]
    share_bytes: int
    """This rank's part of ``host_memory``."""
    _resources: ExitStack = field(default_factory=ExitStack)
    _owner_pid: int = field(default_factory=os.getpid)

    def close(self) -> None:
        """End threads, drop files, locks and memory. Idempotent; nothing in a forked child."""
        if os.getpid() == self._owner_pid:
            self._resources.close()


def node_share_bytes(config: OffloadConfig, node: Node, still_needed_bytes: int) -> int:
    """Collective over the training world. A rank's part of ``host_memory``.

    Parameters
    ----------
    config : OffloadConfig
        ``host_memory`` is bytes, or ``auto``: 80 % of what is left.
    node : Node
        The ranks that share it.
    still_needed_bytes : int
        What this rank will allocate later besides state (gradients); `auto` leaves it free.
    """
    needed = gather((node.host, still_needed_bytes, available_bytes()))
    mine = [entry for entry in needed if entry[0] == node.host]
    if config.host_memory != "auto":
        return int(config.host_memory) // node.node_size
    left = min(entry[2] for entry in mine) - sum(entry[1] for entry in mine)
    return max(0, int(AUTO_FRACTION * left)) // node.node_size


def open_store(
    config: OffloadConfig, node: Node, records: list[Record], scratch_bytes: int, still_needed_bytes: int
) -> Store:
    """Collective over the training world. Check, lay out and open everything that holds state.

    Parameters
    ----------
    config : OffloadConfig
        The same on all ranks.
    node : Node
        This rank's place.
    records : list of Record
        The subgroups of this rank.
    scratch_bytes : int
        Size of the largest 32-bit gradient.
    still_needed_bytes : int
        See `node_share_bytes`.

    Raises
    ------
    MlpoError
        The same on all ranks, before anything is left behind.
    """
    resources = ExitStack()
    try:
        store = _open(config, node, records, scratch_bytes, still_needed_bytes, resources)
    except BaseException:
        resources.close()
        raise
    return store


def _open(
    config: OffloadConfig,
    node: Node,
    records: list[Record],
    scratch_bytes: int,
    still_needed_bytes: int,
    resources: ExitStack,
) -> Store:
    if config.tiers is None:
        resources.callback(remove_default_tiers)
    places = _together(lambda: find_places(config))
    share_bytes = node_share_bytes(config, node, still_needed_bytes)
    sizes = [record.nbytes for record in records]
    _together(lambda: _check_budget(sizes, scratch_bytes, share_bytes, node, bool(places)))
    _lock_directories(places, node, resources)

    # All state in host memory: the tiers are not touched, and no space is taken on them.
    if not places or sum(sizes) + round_up(scratch_bytes) <= share_bytes:
        in_host = gather(True)
    else:
        in_host = gather(False)
    weights = _weights(config, places, node) if places and not all(in_host) else [1.0] * len(places)
    if in_host[node.world_rank]:
        layout, used = Layout(config.chunk_bytes, []), []
    else:
        layout, used = None, places
    rooms = _rooms(places, node, [not alone for alone in in_host])
    layout = _together(lambda: layout or _lay_out(config, sizes, weights, places, rooms))

    tiers: list[StorageTier] = []
    resources.callback(lambda: [tier.close() for tier in tiers])
    _together(lambda: tiers.extend(_tier(config, place, layout, i) for i, place in enumerate(used) if layout.slots[i]))
    kept = [weight for i, weight in enumerate(weights) if used and layout.slots[i]]

    pool = Pool(share_bytes)
    scratch = pool.acquire(round_up(scratch_bytes))
    assert scratch is not None, "the budget was checked"
    reserve_bytes = 0 if config.order == "alternate" or not tiers else WORKING_RECORDS * max(sizes)
    reserve_bytes = min(reserve_bytes, share_bytes - scratch.nbytes)
    prefetch = None if config.prefetch == "auto" else config.prefetch
    table = Table(records, layout.chunk_bytes)
    pipeline = Pipeline(table, pool, tiers, kept, reserve_bytes, prefetch, config.tokens.timeout_s)
    resources.callback(pipeline.close)
    _describe(config, node, sizes, share_bytes, layout, tiers)
    return Store(pipeline, scratch.view(scratch.nbytes), places, share_bytes, resources)


def _together(action: Callable[[], T]) -> T:
    """Collective over the training world. Do something alone; if it fails on any rank, raise on all."""
    result, failure = None, None
    try:
        result = action()
    except MlpoError as error:
        failure = error
    raise_together(failure)
    return result  # type: ignore[return-value]


def _check_budget(sizes: Sequence[int], scratch_bytes: int, share_bytes: int, node: Node, have_tiers: bool) -> None:
    least = least_host_bytes(sizes, scratch_bytes, have_tiers)
    if share_bytes < least:
        raise ConfigError(
            f"'host_memory' leaves {share_bytes:,} bytes for {here()}, one of {node.node_size} ranks on its host, but "
            f"the smallest that works is {least:,} bytes a rank, {least * node.node_size:,} bytes a node. "
            "Raise 'host_memory', or make 'sub_group_size' smaller"
        )


def _lock_directories(places: Sequence[Place], node: Node, resources: ExitStack) -> None:
    """Collective over the training world. One rank of those that share a directory locks it."""
    mine = [(place.shared or node.host, place.directory_key) for place in places]
    everyone = gather(mine)
    earlier = {key for rank, keys in enumerate(everyone) if rank < node.world_rank for key in keys}

    def lock() -> None:
        for place, key in zip(places, mine, strict=True):
            if key not in earlier:
                try:
                    resources.callback(DirectoryLock(place.path).close)
                except OSError as error:
                    raise storage_error("locking the tier directory", place.path, error) from error
                earlier.add(key)

    _together(lock)


def _weights(config: OffloadConfig, places: Sequence[Place], node: Node) -> list[float]:
    """Collective over the training world. Placement weight of each tier, equal on the ranks of a node."""
    if isinstance(config.placement, Static):
        return list(config.placement.static)
    if len(places) == 1:
        return [1.0]
    rates = _together(lambda: [_bandwidth(place.tier, place.path).round_trip_bps for place in places])
    of_node = [entry[1] for entry in gather((node.host, rates)) if entry[0] == node.host]
    return [sum(column) / len(column) for column in zip(*of_node, strict=True)]


def _bandwidth(tier: Tier, path: str) -> Bandwidth:
    if tier.read_bps and tier.write_bps:
        return Bandwidth(tier.read_bps, tier.write_bps)
    probed = quick_bandwidth(path)
    say("tier %s: %.2f GB/s read, %.2f GB/s write", tier.name, probed.read_bps / 1e9, probed.write_bps / 1e9)
    return Bandwidth(tier.read_bps or probed.read_bps, tier.write_bps or probed.write_bps)


def _rooms(places: Sequence[Place], node: Node, users: Sequence[bool]) -> list[int]:
    """Collective over the training world. Bytes that this rank may use on each tier.

    What is free on a file system is divided by the tiers and ranks that fill it.
    """
    keys = [(True if place.shared else node.host, place.device_key) for place in places]
    filling = [key for rank, theirs in enumerate(gather(keys)) if users[rank] for key in theirs]
    rooms = []
    for place, key in zip(places, keys, strict=True):
        room = place.filesystem.free_bytes // max(1, filling.count(key))
        capacity = place.tier.capacity
        rooms.append(min(room, int(capacity) // node.node_size) if capacity is not None else room)
    return rooms


def _lay_out(
    config: OffloadConfig, sizes: Sequence[int], weights: Sequence[float], places: Sequence[Place], rooms: Sequence[int]
) -> Layout:
    try:
        return lay_out(sizes, int(config.chunk_bytes), weights, rooms)
    except TierFull as error:
        room = ", ".join(f"{p.tier.name} {r:,} bytes at {p.path}" for p, r in zip(places, rooms, strict=True))
        raise TierFull(
            f"{here()} {error} ({room}). Free space there, raise 'capacity' or 'host_memory', add a tier, "
            "or use more nodes"
        ) from error


def _tier(config: OffloadConfig, place: Place, layout: Layout, index: int) -> StorageTier:
    container = RawFile(place.path, layout.chunk_bytes, layout.slots[index])
    return StorageTier(place.tier.name, container, _tokens(config, place), config.checksum != "off")


def _tokens(config: OffloadConfig, place: Place) -> tuple[Token, Token]:
    if config.tokens.backend == "off":
        return FreeToken(), FreeToken()
    permits = place.tier.permits or config.tokens.permits
    device, timeout_s = place.filesystem.device, config.tokens.timeout_s
    return local_token(device, "reading", permits, timeout_s), local_token(device, "writing", permits, timeout_s)


def _describe(
    config: OffloadConfig, node: Node, sizes: Sequence[int], share_bytes: int, layout: Layout, tiers: list[StorageTier]
) -> None:
    say("configuration: %s", config.model_dump_json())
    say(
        "%d subgroups a rank, %.1f MB of state; host memory %.1f MB a rank (%d ranks on this host); chunks of %.1f MB",
        len(sizes),
        sum(sizes) / 1e6,
        share_bytes / 1e6,
        node.node_size,
        layout.chunk_bytes / 1e6,
    )
    where = ", ".join(f"{tier.name} {tier.container.path} ({tier.container.num_slots} slots)" for tier in tiers)
    say("tiers: %s", where or "none needed, all state fits in host memory")


def figures(pipeline: Pipeline) -> dict[str, Any]:
    """Totals of all tiers, and cache hits and misses, since the start."""
    counts = pipeline.counts
    return {
        "hits": counts.hits,
        "misses": counts.misses,
        "tiers": {tier.name: tier.figures() for tier in pipeline.tiers},
    }
