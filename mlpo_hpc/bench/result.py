"""What was measured, and what follows from it. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mlpo_hpc.bench.conditions import SWAPPED_ITEM_BYTES, Conditions
from mlpo_hpc.bench.systems import Swap, tiers_of

TIMES = ("forward_s", "backward_s", "update_s", "iteration_s")
COUNTS = ("state_bytes", "found_bytes", "reusable_bytes", "host_bytes")
LONG = 8
"""Micro-batches of the iteration in which most of the offloading should be hidden."""

LOSS_TOLERANCE = 0.05


@dataclass(frozen=True)
class Sample:
    """One counted iteration of one system: the slowest rank's times, all ranks' bytes."""

    system: str
    accumulation: int
    round: int
    forward_s: float
    backward_s: float
    update_s: float
    iteration_s: float
    loss: float
    read_bytes: dict[str, int]
    """By tier."""
    written_bytes: dict[str, int]
    state_bytes: int | None = None
    """All state as stored; None where the system does not tell."""
    found_bytes: int | None = None
    """State in host memory when the update began."""
    reusable_bytes: int | None = None
    """State in host memory at the end that the next update will use."""
    host_bytes: int | None = None
    """What buffers and cache may take."""


@dataclass
class Outcome:
    """All that a benchmark found."""

    conditions: Conditions
    systems: tuple[str, ...]
    samples: list[Sample] = field(default_factory=list)
    tuning: list[dict[str, Any]] = field(default_factory=list)
    """What stock DeepSpeed's NVMe offload was tried with, and its seconds."""
    swap: Swap | None = None
    """What was chosen."""
    timelines: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of rank 0's last iteration at the least accumulation, by system."""
    built: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What each system said about itself."""
    notes: list[str] = field(default_factory=list)
    """What one must know to read the figures."""

    def of(self, system: str, accumulation: int) -> list[Sample]:
        """Samples of one system."""
        return [s for s in self.samples if s.system == system and s.accumulation == accumulation]


def merge(system: str, accumulation: int, number: int, ranks: Sequence[dict[str, Any]]) -> Sample:
    """One iteration as its ranks saw it.

    Parameters
    ----------
    system : str
        Whose.
    accumulation : int
        Its micro-batches.
    number : int
        Of the round.
    ranks : sequence of dict
        What each rank measured.
    """
    figures: dict[str, Any] = {name: max(rank[name] for rank in ranks) for name in TIMES}
    figures |= {name: _sum_or_none(rank.get(name) for rank in ranks) for name in COUNTS}
    figures |= {way: _sum_by_tier(rank[way] for rank in ranks) for way in ("read_bytes", "written_bytes")}
    figures["loss"] = statistics.fmean(rank["loss"] for rank in ranks)
    return Sample(system, accumulation, number, **figures)


def _sum_or_none(values: Iterable[int | None]) -> int | None:
    numbers = list(values)
    return None if None in numbers else sum(value for value in numbers if value is not None)


def _sum_by_tier(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for of_rank in counts:
        for name, count in of_rank.items():
            total[name] = total.get(name, 0) + count
    return total


def floor_s(sample: Sample, conditions: Conditions) -> float | None:
    """Seconds in which storage as fast as measured brings what is not in host memory; None if that is not known.

    Stock DeepSpeed's NVMe offload reads all state and the fp32 gradients.
    """
    rate_bps = sum(tier.rate_bps for tier in tiers_of(sample.system, conditions))
    if sample.system == "cpu" or not rate_bps:
        return 0.0
    if sample.system == "nvme":
        return SWAPPED_ITEM_BYTES * conditions.numel / rate_bps
    if sample.state_bytes is None or sample.found_bytes is None:
        return None
    return (sample.state_bytes - sample.found_bytes) / rate_bps


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratios(outcome: Outcome) -> dict[str, dict[str, float]]:
    """Speed-ups and distances, each over the rounds; absent where a system did not run.

    Speed-ups are the other's time in units of ours. `update_vs_floor` and
    `iteration_ga8_vs_cpu_plus_floor` are ours in units of what they are held against.
    """
    short = min(outcome.conditions.accumulations)

    def update(sample: Sample) -> float:
        return sample.update_s

    def iteration(sample: Sample) -> float:
        return sample.iteration_s

    def floor(sample: Sample) -> float | None:
        return floor_s(sample, outcome.conditions)

    ours, ours_long = _by_round(outcome, "ours", short), _by_round(outcome, "ours", LONG)
    nvme, paper, cpu_long = (_by_round(outcome, *key) for key in (("nvme", short), ("paper", short), ("cpu", LONG)))
    bound = _pairs(cpu_long, iteration, ours_long, floor)
    hidden = _pairs(ours_long, iteration, cpu_long, iteration) if bound else []
    found = {
        "update_vs_nvme": _quotients(_pairs(nvme, update, ours, update)),
        "update_vs_floor": _quotients(_pairs(ours, update, ours, floor)),
        "iteration_vs_nvme": _quotients(_pairs(nvme, iteration, ours, iteration)),
        "iteration_ga8_vs_cpu_plus_floor": [
            mine / (limit + least) for (mine, limit), (_, least) in zip(hidden, bound, strict=True)
        ],
        "update_vs_paper_policies": _quotients(_pairs(paper, update, ours, update)),
        "reusable_host_share": _quotients(
            _pairs(ours, lambda sample: sample.reusable_bytes, ours, lambda sample: sample.host_bytes)
        ),
    }
    return {name: spread(values) for name, values in found.items() if values}


Rounds = dict[int, list[Sample]]
Figure = Callable[[Sample], float | None]


def _by_round(outcome: Outcome, system: str, accumulation: int) -> Rounds:
    rounds: Rounds = {}
    for sample in outcome.of(system, accumulation):
        rounds.setdefault(sample.round, []).append(sample)
    return rounds


def _pairs(left: Rounds, of_left: Figure, right: Rounds, of_right: Figure) -> list[tuple[float, float]]:
    """Medians of the rounds in which both ran: systems drift together, so that pairs spread less than each does."""
    pairs = [(_median(left[n], of_left), _median(right[n], of_right)) for n in sorted(left.keys() & right.keys())]
    return [(a, b) for a, b in pairs if a is not None and b is not None]


def _median(samples: Sequence[Sample], figure: Figure) -> float | None:
    values = [value for sample in samples if (value := figure(sample)) is not None]
    return statistics.median(values) if values else None


def _quotients(pairs: Iterable[tuple[float, float]]) -> list[float]:
    return [a / b for a, b in pairs if b]


def losses_differ(outcome: Outcome) -> bool:
    """Whether any system's loss in its first counted iteration is not that of the first system.

    All begin with the same weights and see the same data. Later losses drift with rounding.
    """
    accumulation = min(outcome.conditions.accumulations)
    firsts = [samples[0].loss for system in outcome.systems if (samples := outcome.of(system, accumulation))]
    return any(abs(loss - firsts[0]) > LOSS_TOLERANCE * abs(firsts[0]) for loss in firsts)


def rows(outcome: Outcome) -> list[dict[str, Any]]:
    """A row for each system and accumulation that ran: spreads of times, GB/s of each tier, and the floor."""
    return [
        _row(outcome, system, accumulation, samples)
        for accumulation in outcome.conditions.accumulations
        for system in outcome.systems
        if (samples := outcome.of(system, accumulation))
    ]


def _row(outcome: Outcome, system: str, accumulation: int, samples: list[Sample]) -> dict[str, Any]:
    conditions = outcome.conditions
    floor = _median(samples, lambda sample: floor_s(sample, conditions))
    row: dict[str, Any] = {"system": system, "accumulation": accumulation, "iterations": len(samples)}
    row["text_tokens"] = conditions.rows * accumulation * conditions.ranks
    row |= {name: spread([getattr(sample, name) for sample in samples]) for name in TIMES}
    row["tiers"] = {tier.name: _rates(samples, tier.name) for tier in tiers_of(system, conditions)}
    row["floor_s"] = floor
    row["update_to_floor"] = row["update_s"]["median"] / floor if floor else None
    return row


def _rates(samples: list[Sample], tier: str) -> dict[str, float]:
    """Bytes per second over whole iterations."""
    return {
        "read_bps": statistics.median(s.read_bytes.get(tier, 0) / s.iteration_s for s in samples),
        "write_bps": statistics.median(s.written_bytes.get(tier, 0) / s.iteration_s for s in samples),
    }


def plain(outcome: Outcome) -> dict[str, Any]:
    """All of it, for programs."""
    return {
        "conditions": asdict(outcome.conditions),
        "systems": outcome.built,
        "tuning": {"tried": outcome.tuning, "chosen": asdict(outcome.swap) if outcome.swap else None},
        "rows": rows(outcome),
        "ratios": ratios(outcome),
        "notes": outcome.notes,
        "samples": [asdict(sample) for sample in outcome.samples],
        "timelines": outcome.timelines,
    }
