"""How the ranks of a node share its tiers: tokens, what they are worth, and how fast each tier then is."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from mlpo_hpc.cluster.node import Node, gather_on_node
from mlpo_hpc.cluster.verdict import gather, together
from mlpo_hpc.config import OffloadConfig, Static
from mlpo_hpc.storage.contention import SCOPES, Contention, Crew, measure
from mlpo_hpc.storage.place import Place
from mlpo_hpc.storage.probe import Bandwidth, Probe, open_probe
from mlpo_hpc.telemetry.log import say
from mlpo_hpc.tokens.base import FreeToken
from mlpo_hpc.tokens.open import Resource, TokenPair, open_tokens, pick_backend

VERDICTS = {
    "off": "no turns are taken",
    "direction": "ranks take turns, one reader beside one writer",
    "tier": "ranks take turns, one at a time",
}


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
        Who keeps others out, one of `SCOPES`.
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
        rates = {f"{scope}_bps": measured.typical_bps(scope) for scope in SCOPES} if measured else {}
        return {"backend": self.backend, "scope": self.scope, **rates}


def share_tiers(
    config: OffloadConfig, places: Sequence[Place], node: Node, moves: bool, endings: ExitStack
) -> list[Sharing]:
    """Collective over the training world. Open the tokens of every tier, measure what must be measured.

    Parameters
    ----------
    config : OffloadConfig
        The same on all ranks.
    places : sequence of Place
        This rank's tiers.
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
    static = config.placement.static if isinstance(config.placement, Static) else None
    shared = []
    for index, (place, resource, pair) in enumerate(zip(places, resources, pairs, strict=True)):
        crew = _crew(resource, node)
        competes = any(gather(crew.competes)) and wanted == "auto" and backend in ("mpi", "flock")
        weigh = moves and static is None and len(places) > 1
        bandwidth, contention = _look(place, node, crew, weigh, competes)
        scope = _scope(backend, contention, waits=wanted == "auto")
        efficiency = contention.efficiency(scope) if contention else 1.0
        mine = bandwidth.round_trip_bps * efficiency if bandwidth else 1.0
        weights = gather_on_node(node, mine if static is None else static[index])
        shared.append(Sharing(_scoped(pair, scope), backend, scope, contention, sum(weights) / len(weights)))
        if contention is not None:
            say("tier %s: %s", place.tier.name, _describe(contention, scope, crew.size))
    return shared


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
    place: Place, node: Node, crew: Crew, weigh: bool, competes: bool
) -> tuple[Bandwidth | None, Contention | None]:
    """Collective over the training world. Bandwidth by the crew's first rank alone, then all against one."""
    given = place.tier.read_bps and place.tier.write_bps
    probes_bandwidth = any(gather(weigh and not given))
    bandwidth, contention = None, None
    if probes_bandwidth or competes:
        # All ranks probe, and a nearly full tier must not fail for the probe's sake.
        room = place.filesystem.free_bytes // (16 * node.node_size)
        with ExitStack() as files:
            probe = together(lambda: files.enter_context(open_probe(place.path, room)))
            found = together(lambda: probe.bandwidth() if crew.number == 0 else None)
            bandwidth = _override(place, crew.gather(found)[0])
            if competes:
                contention = _measure(probe, crew)
    elif given:
        bandwidth = Bandwidth(float(place.tier.read_bps or 0), float(place.tier.write_bps or 0))
    return (bandwidth if weigh else None), contention


def _override(place: Place, probed: Bandwidth) -> Bandwidth:
    """What the configuration says of the rates holds."""
    say("tier %s: %.2f GB/s read, %.2f GB/s write", place.tier.name, probed.read_bps / 1e9, probed.write_bps / 1e9)
    return Bandwidth(place.tier.read_bps or probed.read_bps, place.tier.write_bps or probed.write_bps)


def _measure(probe: Probe, crew: Crew) -> Contention | None:
    together(lambda: probe.fill() if crew.number else None)
    found = measure(probe, crew)
    return found if crew.competes else None


def _scope(backend: str, contention: Contention | None, waits: bool) -> str:
    if backend == "off":
        return "off"
    if contention is not None:
        return contention.best_scope()
    return "off" if waits and backend != "local" else "direction"


def _scoped(pair: TokenPair, scope: str) -> TokenPair:
    if scope == "off":
        return FreeToken(), FreeToken()
    return (pair[1], pair[1]) if scope == "tier" else pair


def _describe(contention: Contention, scope: str, size: int) -> str:
    rates = [contention.typical_bps(name) / 1e9 for name in SCOPES]
    return (
        f"{size} ranks at once pass {rates[0]:.2f} GB/s each way, one reader beside one writer {rates[1]:.2f}, "
        f"one rank alone {rates[2]:.2f}: {VERDICTS[scope]}"
    )
