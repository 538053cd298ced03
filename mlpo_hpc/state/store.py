"""The store: the virtual tier of one rank, opened by all ranks together and closed by each alone."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mlpo_hpc.cluster.memory import AUTO_FRACTION, available_bytes, total_bytes
from mlpo_hpc.cluster.node import Node, gather_on_node
from mlpo_hpc.cluster.sites import find_site
from mlpo_hpc.cluster.verdict import gather, together
from mlpo_hpc.config import OffloadConfig, expand
from mlpo_hpc.errors import ConfigError, TierFull, here
from mlpo_hpc.state.cache import Pool
from mlpo_hpc.state.containers import open_again, open_containers, pick_means
from mlpo_hpc.state.layout import Layout, lay_out, least_host_bytes
from mlpo_hpc.state.links import Succession, can_follow
from mlpo_hpc.state.node_file import Means, Slots
from mlpo_hpc.state.pipeline import Pipeline
from mlpo_hpc.state.placement import Adaptive, Placement
from mlpo_hpc.state.sharing import Sharing, share_tiers
from mlpo_hpc.state.table import Record, Table
from mlpo_hpc.state.tiers import lock_directories, remove_leftovers, rooms_bytes, stripe_directories
from mlpo_hpc.state.visibility import look_across
from mlpo_hpc.storage.base import round_up
from mlpo_hpc.storage.contents import Contents
from mlpo_hpc.storage.filesystem import describe
from mlpo_hpc.storage.generations import Generations
from mlpo_hpc.storage.lane import Lane
from mlpo_hpc.storage.place import Place, find_places
from mlpo_hpc.storage.tier import StorageTier
from mlpo_hpc.telemetry.log import say
from mlpo_hpc.telemetry.trace import Trace, open_trace

WORKING_RECORDS = 3
"""Buffers that an order needs whose first subgroups are not in host memory: read, update, write."""


_promised: dict[int, int] = {}
"""Bytes that each open pool of this process may take."""


@dataclass(frozen=True)
class Needs:
    """What one rank wants to keep.

    Parameters
    ----------
    records : list of Record
        Its subgroups.
    scratch_bytes : int
        Its largest 32-bit gradient.
    later_bytes : int
        Host memory that it allocates later besides: the 16-bit gradients.
    contents : Contents
        What the records are made of.
    """

    records: list[Record]
    scratch_bytes: int
    later_bytes: int
    contents: Contents = field(default_factory=lambda: Contents("fp32"))

    @property
    def sizes(self) -> list[int]:
        """Bytes of each subgroup's state, at most: it must fit whatever it grows to."""
        return [record.most_bytes for record in self.records]

    def fits_in(self, host_bytes: int) -> bool:
        """Whether all state fits into that much host memory."""
        return sum(self.sizes) + round_up(self.scratch_bytes) <= host_bytes


@dataclass
class Store:
    """What `open_store` opened."""

    pipeline: Pipeline
    scratch: memoryview
    """Memory for one 32-bit gradient, out of the same pool."""
    places: list[Place]
    facts: dict[str, dict[str, Any]]
    """What each tier is, what was decided about its tokens, and why."""
    trace: Trace | None
    _resources: ExitStack
    _owner_pid: int = field(default_factory=os.getpid)
    successions: list[Succession] = field(default_factory=list)
    """Tiers whose file may become a part of a checkpoint."""

    def figures(self, found_bytes: int = 0) -> dict[str, Any]:
        """Totals of all tiers, and cache hits and misses, since the start; state in host memory before and now."""
        counts = self.pipeline.counts
        tiers = {tier.name: tier.figures() for tier in self.pipeline.tiers}
        memory = {
            "state_bytes": sum(record.nbytes for record in self.pipeline.table.records),
            "found_bytes": found_bytes,
            "reusable_bytes": self.pipeline.resident_bytes(),
            "host_bytes": self.pipeline.pool.budget_bytes,
        }
        return {"hits": counts.hits, "misses": counts.misses, "tiers": tiers, "facts": self.facts, "memory": memory}

    def write_index(self, step: int) -> None:
        """Say in the containers that are kept what they hold after a step."""
        for number, tier in enumerate(self.pipeline.tiers):
            if tier.container.index is not None:
                tier.container.index.write(step, self.pipeline.held(number))

    def leave_behind(self, step: int) -> None:
        """Make the containers that are kept complete: what is only in host memory goes there too."""
        keeps = any(tier.container.index is not None for tier in self.pipeline.tiers)
        if keeps and not self.pipeline.is_closed:
            self.pipeline.write_back()
            self.write_index(step)

    def lanes_of_device(self, path: Path) -> list[Lane]:
        """The lanes that write to the file system on which a path lies."""
        key = describe(str(path)).key
        there = {place.tier.name for place in self.places if place.device_key == key}
        return [tier.writes for tier in self.pipeline.tiers if tier.name in there]

    def close(self) -> None:
        """End threads, drop files, locks and memory. Idempotent; nothing in a forked child."""
        if os.getpid() == self._owner_pid:
            self._resources.close()


def share_bytes(config: OffloadConfig, node: Node, later_bytes: int) -> int:
    """Collective over the training world. A rank's part of ``host_memory``.

    ``auto`` is 80 % of what the node has left, once every rank of it has allocated `later_bytes` more
    and the other engines of this process have filled their pools.
    """
    mine = gather_on_node(node, (later_bytes + sum(_promised.values()), available_bytes()))
    if config.host_memory != "auto":
        return int(config.host_memory) // node.node_size
    rest = min(free for _, free in mine) - sum(later for later, _ in mine)
    return max(0, int(AUTO_FRACTION * rest)) // node.node_size


def open_store(config: OffloadConfig, node: Node, needs: Needs) -> Store:
    """Collective over the training world. Check, lay out and open everything that holds state.

    Parameters
    ----------
    config : OffloadConfig
        The same on all ranks.
    node : Node
        This rank's place.
    needs : Needs
        This rank's subgroups.

    Raises
    ------
    MlpoError
        The same on all ranks, and nothing is left behind.
    """
    with ExitStack() as resources:
        places = look_across(together(lambda: find_places(config)), node)
        lock_directories(places, node, resources)
        remove_leftovers(places, node)
        together(lambda: find_site(os.environ))  # a wrong MLPO_HPC_SITE is an error for all
        creation_hints = stripe_directories(places, node)
        share = share_bytes(config, node, needs.later_bytes)
        together(lambda: _check_budget(config, needs, share, node, have_tiers=bool(places)))
        # What is kept needs slots, even if host memory could hold it.
        keeps = any(place.tier.keep for place in places)
        alone = not keeps and (not places or needs.fits_in(share))
        moves = not all(gather(alone))
        means = pick_means(places, node) if moves else {}
        sharing = share_tiers(config, places, means, node, moves, resources)
        layout = _plan(config, node, needs, alone, sharing, places)
        tiers, successions = _open_tiers(config, node, needs, places, means, sharing, layout, creation_hints, resources)
        trace = together(lambda: _open_trace(config, node, tiers, resources))
        store = _assemble(config, needs, share, layout, sharing, tiers, places, trace, resources)
        store.successions = successions
        _describe(config, node, needs, share, layout, tiers)
    return store


def _check_budget(config: OffloadConfig, needs: Needs, share: int, node: Node, have_tiers: bool) -> None:
    if config.host_memory != "auto" and int(config.host_memory) > total_bytes():
        raise ConfigError(
            f"'host_memory' is {int(config.host_memory):,} bytes, but {node.host} has {total_bytes():,}. "
            "It is what buffers and cache may take on each node: use less, or 'auto'"
        )
    least = least_host_bytes(needs.sizes, needs.scratch_bytes, have_tiers)
    if share < least:
        raise ConfigError(
            f"'host_memory' leaves {share:,} bytes for {here()}, one of {node.node_size} ranks on its host, but "
            f"the smallest that works is {least:,} bytes a rank, {least * node.node_size:,} bytes a node. "
            + ("Raise 'host_memory', or make 'sub_group_size' smaller" if have_tiers else "Raise it, or add 'tiers'")
        )


def _plan(
    config: OffloadConfig,
    node: Node,
    needs: Needs,
    alone: bool,
    sharing: Sequence[Sharing],
    places: Sequence[Place],
) -> Layout:
    """Collective over the training world. Slots on each tier; none if all state stays in host memory."""
    rooms = rooms_bytes(places, node, fills_tiers=not alone)
    weights = [tier.weight for tier in sharing]

    def lay() -> Layout:
        if alone:
            return Layout(int(config.chunk_bytes), [0] * len(places))
        try:
            free = config.placement == "adaptive"
            seals = config.checkpoint.commit == "background"
            return lay_out(needs.sizes, int(config.chunk_bytes), weights, rooms, free, seals)
        except TierFull as error:
            found = ", ".join(
                f"{p.tier.name} {room:,} bytes at {p.path}" for p, room in zip(places, rooms, strict=True)
            )
            raise TierFull(
                f"{here()} {error} ({found}). Free space there, raise 'capacity' or 'host_memory', add a tier, or "
                "use more nodes"
            ) from error

    return together(lay)


def _open_tiers(
    config: OffloadConfig,
    node: Node,
    needs: Needs,
    places: Sequence[Place],
    means: Mapping[str, Means],
    sharing: Sequence[Sharing],
    layout: Layout,
    creation_hints: Mapping[str, Mapping[str, str]],
    resources: ExitStack,
) -> tuple[list[StorageTier], list[Succession]]:
    """Collective over the training world. The tiers on which this rank has slots, and what follows their files."""
    tiers: list[StorageTier] = []
    resources.callback(lambda: _close_all(tiers))
    wanted = [Slots(layout.chunk_bytes, num_slots) for num_slots in layout.slots]

    def start() -> None:
        for place, shared, container in zip(places, sharing, containers, strict=True):
            if container is not None:
                whole = Generations(container) if place.tier.name in followed else container
                tiers.append(StorageTier(place.tier.name, whole, shared.tokens, config.checksum != "off"))

    followed = [place.tier.name for place in places if means and can_follow(config, place, means[place.tier.name])]
    with ExitStack() as opening:
        containers = open_containers(places, means, wanted, needs.contents, node, creation_hints, opening, followed)
        together(start)
        opening.pop_all()
    return tiers, _successions(node, needs, places, means, wanted, creation_hints, followed, tiers)


def _successions(
    node: Node,
    needs: Needs,
    places: Sequence[Place],
    means: Mapping[str, Means],
    wanted: Sequence[Slots],
    creation_hints: Mapping[str, Mapping[str, str]],
    followed: Sequence[str],
    tiers: Sequence[StorageTier],
) -> list[Succession]:
    """Collective over the training world. How the files of tiers are followed by others, the same tiers on all."""
    opened = {tier.name: tier for tier in tiers}
    used = [place.tier.name for place, slots in zip(places, wanted, strict=True) if any(gather(slots.num_slots > 0))]
    found = []
    for number, (place, slots) in enumerate(zip(places, wanted, strict=True)):
        name = place.tier.name
        if name in followed and name in used:
            again = partial(open_again, place, means[name], slots, needs.contents, node, creation_hints)
            found.append(Succession(number, opened.get(name), means[name].container == "hdf5", again))
    return found


def _open_trace(config: OffloadConfig, node: Node, tiers: Sequence[StorageTier], resources: ExitStack) -> Trace | None:
    """Begin the trace of this rank, if one is wanted, and let the lanes tell it."""
    telemetry = config.telemetry
    if not telemetry.trace or telemetry.dir is None:
        return None
    trace = open_trace(expand(telemetry.dir), node.world_rank, node.host)
    resources.callback(trace.close)
    resources.callback(trace.flush)
    for tier in tiers:
        tier.reads.meter.record = trace.track(f"{tier.name} read")
        tier.writes.meter.record = trace.track(f"{tier.name} write")
    return trace


def _close_all(tiers: Sequence[StorageTier]) -> None:
    for tier in tiers:
        tier.close()


def _assemble(
    config: OffloadConfig,
    needs: Needs,
    share: int,
    layout: Layout,
    sharing: Sequence[Sharing],
    tiers: list[StorageTier],
    places: list[Place],
    trace: Trace | None,
    resources: ExitStack,
) -> Store:
    pool = Pool(share)
    _promised[id(pool)] = share
    resources.callback(lambda: _promised.pop(id(pool)))
    fits = pool.take(round_up(needs.scratch_bytes))
    assert fits, "the budget was checked"
    scratch = pool.reserve(round_up(needs.scratch_bytes))
    # `alternate` begins with what the last step kept; `sequential` needs buffers beside what is kept.
    reserve = 0 if config.order == "alternate" or not tiers else WORKING_RECORDS * max(needs.sizes)
    used = [shared for shared, num_slots in zip(sharing, layout.slots, strict=True) if num_slots]
    prefetch = None if config.prefetch == "auto" else config.prefetch
    table = Table(needs.records, layout.chunk_bytes)
    weights = [shared.weight for shared in used]
    placement = Adaptive(weights, tiers) if config.placement == "adaptive" else Placement(weights)
    pipeline = Pipeline(table, pool, tiers, placement, reserve, prefetch, config.tokens.timeout_s)
    resources.callback(pipeline.close)
    figures = {
        tier.name: {**tier.container.facts(), "tokens": shared.figures()}
        for tier, shared in zip(tiers, used, strict=True)
    }
    return Store(pipeline, scratch.view(scratch.nbytes), places, figures, trace, resources.pop_all())


def _describe(
    config: OffloadConfig, node: Node, needs: Needs, share: int, layout: Layout, tiers: list[StorageTier]
) -> None:
    say("configuration: %s", config.model_dump_json())
    say(
        "%d subgroups a rank, %.1f MB of state (%s); host memory %.1f MB a rank (%d ranks on this host); "
        "chunks of %.1f MB",
        len(needs.records),
        sum(record.nbytes for record in needs.records) / 1e6,
        needs.contents.codec,
        share / 1e6,
        node.node_size,
        layout.chunk_bytes / 1e6,
    )
    where = ", ".join(f"{tier.name} {tier.container} ({tier.container.num_slots} slots)" for tier in tiers)
    say("tiers: %s", where or "none needed, all state fits in host memory")
