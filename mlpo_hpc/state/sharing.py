"""How the ranks of a node share its tiers: tokens, what they are worth, and how fast each tier then is."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from mlpo_hpc.cluster.node import Node, gather_on_node
from mlpo_hpc.cluster.verdict import gather, together
from mlpo_hpc.config import OffloadConfig, Static
from mlpo_hpc.storage.contention import Contention, Crew, measure
from mlpo_hpc.storage.place import Place
from mlpo_hpc.storage.probe import open_probe
from mlpo_hpc.telemetry.log import say
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
    measured = wanted == "auto" and backend in ("mpi", "flock")
    weighed = moves and len(places) > 1 and not isinstance(config.placement, Static)
    shared = []
    for index, (place, resource, pair) in enumerate(zip(places, resources, pairs, strict=True)):
        crew = _crew(resource, node)
        competes = measured and any(gather(crew.competes))
        looks = competes or (weighed and not _given(place))
        contention = _look(resource, place, node, crew, competes) if looks else None
        scope = _scope(wanted, backend, contention if competes else None)
        weight = _weight(config, index, contention, scope) if moves else 1.0
        weights = gather_on_node(node, weight)
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


def _given(place: Place) -> bool:
    return bool(place.tier.read_bps and place.tier.write_bps)


def _look(resource: Resource, place: Place, node: Node, crew: Crew, compare: bool) -> Contention:
    """Collective over the training world. Measure a tier, once a process."""
    key = (resource.key, resource.permits, compare)
    if not all(gather(key in _looked_at)):
        # All ranks look, and a nearly full tier must not fail for that.
        room = place.filesystem.free_bytes // (16 * node.node_size)
        with ExitStack() as files:
            probe = together(lambda: files.enter_context(open_probe(place.path, room)))
            together(probe.fill)
            _looked_at[key] = measure(probe, crew, compare)
    return _looked_at[key]


def _weight(config: OffloadConfig, index: int, contention: Contention | None, scope: str) -> float:
    """Bytes per second that pass the tier each way at the same time, as configured or as measured."""
    if isinstance(config.placement, Static):
        return config.placement.static[index]
    tier = config.tiers[index] if config.tiers else None
    if tier is not None and tier.read_bps and tier.write_bps:
        return 2 / (1 / tier.read_bps + 1 / tier.write_bps)
    if contention is None:
        return 1.0
    return contention.typical_bps(scope if scope in contention.rates_bps else "off")


def _scope(wanted: str, backend: str, contention: Contention | None) -> str:
    if contention is not None:
        return contention.best_scope()
    return "off" if backend == "off" or (wanted == "auto" and backend != "local") else "direction"


def _scoped(pair: TokenPair, scope: str) -> TokenPair:
    if scope == "off":
        return FreeToken(), FreeToken()
    return (pair[1], pair[1]) if scope == "tier" else pair


def _describe(contention: Contention, scope: str, size: int) -> str:
    rates = {name: contention.typical_bps(name) / 1e9 for name in contention.rates_bps}
    if len(rates) == 1:
        return f"{rates['off']:.2f} GB/s each way at the same time"
    return (
        f"{size} ranks at once pass {rates['off']:.2f} GB/s each way, one reader beside one writer "
        f"{rates['direction']:.2f}, one rank alone {rates['tier']:.2f}: {VERDICTS[scope]}"
    )
