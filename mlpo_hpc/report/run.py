"""A run: the journals of all ranks and all starts, merged into one line of steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlpo_hpc.errors import MlpoError
from mlpo_hpc.report.journals import Journals, Part

NodeKey = tuple[str, str]
COUNTS = ("bytes_read", "bytes_written", "read_s", "write_s", "wait_s", "tokens_taken")
MEMORY = ("cache_hits", "cache_misses", "state_bytes", "found_bytes", "host_bytes")


@dataclass(frozen=True)
class Moved:
    """What a tier did for one node in one step, all ranks of the node together."""

    bytes_read: float
    bytes_written: float
    read_s: float
    """Seconds in which it moved bytes, of ranks that move at the same time counted once."""
    write_s: float
    wait_s: float
    """For tokens, on average of the ranks' threads together."""
    exclusive: bool
    """Whether reading and writing take turns too."""

    @property
    def busy_s(self) -> float:
        """Seconds in which it was at work."""
        return self.read_s + self.write_s if self.exclusive else max(self.read_s, self.write_s)

    def bps(self, way: str) -> float | None:
        """Bytes per second while it moved any, ``read`` or ``write``; None if it moved nothing."""
        nbytes, seconds = (self.bytes_read, self.read_s) if way == "read" else (self.bytes_written, self.write_s)
        return nbytes / seconds if nbytes and seconds else None


@dataclass(frozen=True)
class Step:
    """One step of all ranks."""

    number: int
    start: int
    """Which start of the run did it."""
    time_s: float
    """When it was done, in seconds since 1970."""
    iteration_s: float | None
    """Since the step before was done; None for the first of a start."""
    phases_s: dict[str, float]
    """``forward``, ``backward`` and ``update``, on average of the ranks."""
    memory: dict[str, float]
    """Hits, misses and bytes of state, all ranks together."""
    tiers: dict[str, dict[NodeKey, Moved]]
    loss: float | None
    """NaN where it was no finite number; None where none was recorded."""
    text_tokens: int | None


@dataclass(frozen=True)
class Start:
    """One start of the run: the first, and one for each time that it was resumed."""

    began_s: float
    ranks: dict[int, dict[str, Any]]
    """What each rank said it is and has."""
    numbers: list[int] = field(default_factory=list)
    """Steps that it did."""
    ended_s: float = 0.0
    """When the last of them was done."""

    @property
    def first(self) -> dict[str, Any]:
        """What the lowest rank said."""
        return self.ranks[min(self.ranks)]

    @property
    def nodes(self) -> dict[NodeKey, list[int]]:
        """Ranks of each node."""
        found: dict[NodeKey, list[int]] = {}
        for rank, facts in sorted(self.ranks.items()):
            found.setdefault(_node(facts), []).append(rank)
        return found


@dataclass(frozen=True)
class Run:
    """All of it, in order."""

    starts: list[Start]
    steps: list[Step]
    """By number; of a step that was done again, the last time."""
    num_redone: int
    """Steps that were done again after a restart."""
    num_torn: int

    @property
    def settled(self) -> list[Step]:
        """Steps with a known duration, which the first of a start has not; all, if there are no others."""
        return [step for step in self.steps if step.iteration_s is not None] or self.steps


def build_run(journals: Journals) -> Run:
    """Merge what all ranks wrote.

    Raises
    ------
    MlpoError
        If there is no step in it.
    """
    groups: dict[float, list[Part]] = {}
    for part in journals.parts:
        groups.setdefault(part.start["began_s"], []).append(part)
    starts, steps, num_done = [], {}, 0
    for number, (began_s, parts) in enumerate(sorted(groups.items())):
        done = [_step(step, number, parts) for step in sorted(set().union(*(part.steps for part in parts)))]
        ranks = {part.start["world_rank"]: part.start for part in parts}
        starts.append(Start(began_s, ranks, [s.number for s in done], max((s.time_s for s in done), default=began_s)))
        steps.update({step.number: step for step in done})
        num_done += len(done)
    if not steps:
        raise MlpoError(_nothing(starts))
    return Run(starts, [steps[number] for number in sorted(steps)], num_done - len(steps), journals.num_torn)


def _nothing(starts: Sequence[Start]) -> str:
    if not starts:
        return "the journals are empty: the run did not start, or they are no journals of mlpo_hpc"
    hosts = ", ".join(sorted({host for start in starts for host, _ in start.nodes}))
    return (
        f"no step was done in {len(starts)} start{'s' * (len(starts) > 1)} of this run (on {hosts}): it ended before "
        "its first optimizer step. Its own log says why"
    )


def _step(number: int, start: int, parts: Sequence[Part]) -> Step:
    lines = [(part.start, part.steps[number]) for part in parts if number in part.steps]
    told = [line["iteration_s"] for _, line in lines if line.get("iteration_s") is not None]
    losses = [part.losses[number] for part in parts if number in part.losses]
    return Step(
        number,
        start,
        max(line.get("time_s", 0.0) for _, line in lines),
        max(told, default=None),
        {phase: _mean(line.get(f"{phase}_s", 0.0) for _, line in lines) for phase in ("forward", "backward", "update")},
        {key: math.fsum(line.get(key, 0) for _, line in lines) for key in MEMORY},
        _tiers(lines),
        _mean(loss for loss, _ in losses) if losses else None,
        next((tokens for _, tokens in losses if tokens), None),
    )


def _tiers(lines: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, dict[NodeKey, Moved]]:
    """Of each tier and node."""
    found: dict[str, dict[NodeKey, list[tuple[dict[str, Any], dict[str, Any]]]]] = {}
    for start, line in lines:
        for name, counts in line["tiers"].items():
            facts = start["tiers"].get(name, {})
            found.setdefault(name, {}).setdefault(_node(start), []).append((facts, counts))
    return {name: {node: _moved(ranks) for node, ranks in nodes.items()} for name, nodes in found.items()}


def _moved(ranks: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> Moved:
    """Of ranks that take turns, the seconds add up; those of ranks that move at the same time are the same seconds."""
    facts = ranks[0][0]
    sums = {key: math.fsum(counts.get(key, 0) for _, counts in ranks) for key in COUNTS}
    at_once = min(len(ranks), facts.get("at_once") or len(ranks))
    exclusive = (facts.get("tokens") or {}).get("scope") == "tier"
    read_s, write_s = (sums[key] / at_once for key in ("read_s", "write_s"))
    wait_s = sums["wait_s"] / len(ranks)
    return Moved(sums["bytes_read"], sums["bytes_written"], read_s, write_s, wait_s, exclusive)


def _node(start: dict[str, Any]) -> NodeKey:
    return (start["host"], start.get("machine", ""))


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)
