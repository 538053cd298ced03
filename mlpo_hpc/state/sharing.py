"""How the ranks of a node share its tiers: tokens, what they are worth, and how fast each tier then is."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from mlpo_hpc.cluster.node import Node
from mlpo_hpc.cluster.verdict import gather, together
from mlpo_hpc.config import OffloadConfig, Static
from mlpo_hpc.state.containers import open_own_file
from mlpo_hpc.state.node_file import Means, Slots
from mlpo_hpc.storage.contention import Contention, Crew, measure
from mlpo_hpc.storage.place import Place
from mlpo_hpc.storage.probe import NUM_SLOTS, Probe, pick_chunk_bytes
from mlpo_hpc.telemetry.log import say, warn
from mlpo_hpc.tokens.base import FreeToken
from mlpo_hpc.tokens.open import Resource, TokenPair, open_tokens, pick_backend

VERDICTS = {
    "off": "no turns are taken",
    "direction": "ranks take turns, one reader beside one writer",
    "tier": "ranks take turns, one at a time",
}


_looked_at: dict[Hashable, Contention] = {}
"""What this process has measured: a tier's answer is good for all its engines."""


@dataclass(frozen=True)
class Sharing:
    """How the ranks of a node share one tier.

    Parameters
    ----------
    tokens : tuple of Token
        For reading and for writing; one and the same where a rank keeps all others out.
    backend : str
        Of the tokens.
    scope : str
        Who keeps others out: ``off``, ``direction`` or ``tier``.
    contention : Contention or None
        What was measured, if anything was.
    weight : float
        Placement weight: bytes per second in relation to the other tiers.
    """

    tokens: TokenPair
    backend: str
    scope: str
    contention: Contention | None
    weight: float

    def figures(self) -> dict[str, Any]:
        """For the report: what is done and the rates that decided it."""
        measured = self.contention
        rates = {f"{scope}_bps": measured.typical_bps(scope) for scope in measured.rates_bps} if measured else {}
        return {"backend": self.backend, "scope": self.scope, **rates}


def share_tiers(
    config: OffloadConfig,
    places: Sequence[Place],
    means: Mapping[str, Means],
    node: Node,
    moves: bool,
    endings: ExitStack,
) -> list[Sharing]:
    """Collective over the training world. Open the tokens of every tier, measure what must be measured.

    Parameters
    ----------
    config : OffloadConfig
        The same on all ranks.
    places : sequence of Place
        This rank's tiers.
    means : mapping
        How each is moved, by name; empty if no rank moves anything.
    node : Node
        This rank's place in the job.
    moves : bool
        Whether any rank will move bytes at all; the same on all ranks.
    endings : ExitStack
        Gets what must be done at the end.
    """
    wanted = config.tokens.backend
    backend, reason = str(wanted), "as configured"
    if wanted == "auto":
        backend, reason = pick_backend(node) if places and moves else ("off", "no tier is used")
    resources = together(lambda: [_resource(config, node, place) for place in places])
    pairs = open_tokens(backend, resources, node, config.tokens.timeout_s, endings)
    say("tokens: backend '%s' (%s)", backend, reason)
    measured = wanted == "auto" and backend in ("mpi", "flock")
    given = all(place.tier.read_bps and place.tier.write_bps for place in places)
    weighed = moves and len(places) > 1 and not given and not isinstance(config.placement, Static)
    _warn_of_lone_rates(places, given)
    shared = []
    for index, (place, resource, pair) in enumerate(zip(places, resources, pairs, strict=True)):
        crew = _crew(resource, node)
        competes = measured and any(gather(crew.competes))
        contention = _look(resource, place, means, node, crew, competes) if competes or weighed else None
        scope = _scope(wanted, backend, contention if competes else None)
        weight = _weight(config, index, contention, scope, crew, given)
        shared.append(Sharing(_scoped(pair, scope), backend, scope, contention, weight))
        _say(place.tier.name, node, crew, contention, scope)
    return shared


def _warn_of_lone_rates(places: Sequence[Place], given: bool) -> None:
    lone = [place.tier.name for place in places if place.tier.read_bps or place.tier.write_bps]
    if lone and not given:
        warn(
            "'read_bps' and 'write_bps' of tier %s are not used: they weigh tiers against each other only where "
            "all tiers have both. All are measured instead",
            ", ".join(lone),
        )


def _resource(config: OffloadConfig, node: Node, place: Place) -> Resource:
    """Ranks whose tiers of one name lie on one device take turns, whatever their directories."""
    owner = "" if place.shared else node.key
    key = (place.tier.name, owner, place.device_key)
    return Resource(key, place.tier.name, place.tier.permits or config.tokens.permits)


def _crew(resource: Resource, node: Node) -> Crew:
    everyone = gather((node.key, resource.key))
    mine = (node.key, resource.key)

    def gather_crew(value: Any) -> list[Any]:
        return [theirs for key, theirs in zip(everyone, gather(value), strict=True) if key == mine]

    number = everyone[: node.world_rank].count(mine)
    return Crew(number, everyone.count(mine), resource.permits, gather_crew)


def _look(
    resource: Resource, place: Place, means: Mapping[str, Means], node: Node, crew: Crew, compare: bool
) -> Contention:
    """Collective over the training world. Measure a tier, once a process."""
    transport = means[place.tier.name].transport
    key = (resource.key, resource.permits, transport, compare)
    if not all(gather(key in _looked_at)):
        # All ranks look, and a nearly full tier must not fail for that.
        capacity = int(place.tier.capacity or place.filesystem.free_bytes)
        room = min(crew.gather(min(capacity, place.filesystem.free_bytes // 16) // node.node_size))
        with ExitStack() as files:
            probe = together(lambda: files.enter_context(open_probe(place, transport, room)))
            together(probe.fill)
            _looked_at[key] = measure(probe, crew, compare)
    return _looked_at[key]


def open_probe(place: Place, transport: str, room_bytes: int) -> Probe:
    """A file without a name to measure with, moved as the state will be.

    Raises
    ------
    StorageError
        If the directory does not take it.
    """
    return Probe(open_own_file(place, transport, Slots(pick_chunk_bytes(room_bytes), NUM_SLOTS)))


def _weight(
    config: OffloadConfig, index: int, contention: Contention | None, scope: str, crew: Crew, given: bool
) -> float:
    """What one rank of the crew gets, in bytes per second each way at the same time, as configured or as measured."""
    if isinstance(config.placement, Static):
        return config.placement.static[index]
    if given and config.tiers:
        tier = config.tiers[index]
        return 2 / (1 / float(tier.read_bps or 1) + 1 / float(tier.write_bps or 1)) / crew.size
    if contention is None:
        return 1.0
    return contention.typical_bps(scope if scope in contention.rates_bps else "off") / crew.size


def _scope(wanted: str, backend: str, contention: Contention | None) -> str:
    if contention is not None:
        return contention.best_scope()
    return "off" if backend == "off" or (wanted == "auto" and backend != "local") else "direction"


def _scoped(pair: TokenPair, scope: str) -> TokenPair:
    if scope == "off":
        return FreeToken(), FreeToken()
    return (pair[1], pair[1]) if scope == "tier" else pair


def _say(name: str, node: Node, crew: Crew, contention: Contention | None, scope: str) -> None:
    """Collective over the training world. What was found, once for each different decision."""
    said = set()
    for host, size, found, decided in gather((node.host, crew.size, contention, scope)):
        if found is not None and (size, decided) not in said:
            say("tier %s on %s: %s", name, host, _describe(found, decided, size))
            said.add((size, decided))


def _describe(contention: Contention, scope: str, size: int) -> str:
    rates = {name: contention.typical_bps(name) / 1e9 for name in contention.rates_bps}
    if len(rates) == 1:
        return f"{rates['off']:.2f} GB/s each way at the same time"
    return (
        f"{size} ranks at once pass {rates['off']:.2f} GB/s each way, one reader beside one writer "
        f"{rates['direction']:.2f}, one rank alone {rates['tier']:.2f}: {VERDICTS[scope]}"
    )
