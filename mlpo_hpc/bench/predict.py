"""What the simulator makes of a benchmark that was run, given its storage, host memory and passes as measured."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

from mlpo_hpc.bench.conditions import BenchTier, Conditions
from mlpo_hpc.bench.result import TIMES
from mlpo_hpc.bench.systems import buffer_count, static_weights
from mlpo_hpc.errors import ConfigError
from mlpo_hpc.planner.comparison import Comparison
from mlpo_hpc.planner.machine import CODEC_ITEMS_PS_CORE, PlanTier
from mlpo_hpc.planner.policy import OURS, PAPER, ZERO3, Policy
from mlpo_hpc.planner.simulate import Work, simulate

POLICIES = {
    "nvme": ZERO3,
    "paper-1": replace(PAPER, order="sequential", working_records=3),
    "paper-2": PAPER,
    "paper-3": PAPER,
    "paper": PAPER,
    "ours": OURS,
}
ALL_TIERS = ("paper", "ours")


def predict(text: str) -> list[Comparison]:
    """Simulate all systems of a benchmark that offload to storage.

    Parameters
    ----------
    text : str
        What ``mlpo bench --json`` wrote.

    Raises
    ------
    ConfigError
        If it is something else, or does not tell how fast weights are updated (system ``cpu``) or the host memory.
    """
    try:
        result = json.loads(text)
        conditions, rows = _conditions(result["conditions"]), result["rows"]
        in_memory = [row for row in rows if row["system"] == "cpu"]
        if not in_memory:
            raise ConfigError("this benchmark has no system cpu, which tells how fast weights are updated")
        if conditions.host_memory_bytes is None:
            raise ConfigError("this benchmark does not tell how much host memory its systems had")
        update_items_ps = conditions.numel / in_memory[0]["update_s"]["median"]
        chosen = result["tuning"]["chosen"]
        return [_compare(row, conditions, update_items_ps, chosen) for row in rows if row["system"] in POLICIES]
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"this is not what mlpo bench --json writes: {error!r}") from error


def _conditions(values: dict[str, Any]) -> Conditions:
    known = {field.name for field in fields(Conditions)}
    tiers = tuple(BenchTier(**tier) for tier in values["tiers"])
    return Conditions(**{key: value for key, value in values.items() if key in known} | {"tiers": tiers})


def _compare(
    row: dict[str, Any], conditions: Conditions, update_items_ps: float, chosen: dict[str, Any] | None
) -> Comparison:
    """One system with one number of micro-batches."""
    system = row["system"]
    size = chosen["sub_group_size"] if system == "nvme" and chosen else conditions.sub_group_size
    num_subgroups = -(-conditions.numel // conditions.ranks // conditions.largest_subgroup_numel(size))
    policy = _policy(system, conditions, num_subgroups, size)
    tiers = [PlanTier(tier.name, tier.read_bps, tier.write_bps) for tier in conditions.tiers]
    measured = {name: row[name]["median"] for name in TIMES}
    codec_s = 1 / (CODEC_ITEMS_PS_CORE * conditions.facts["cores"]) if policy.codec else 0.0
    work = Work(
        conditions.numel,
        conditions.ranks,
        num_subgroups,
        conditions.host_memory_bytes or 0,
        measured["forward_s"],
        measured["backward_s"],
        1 / (1 / update_items_ps + codec_s),
    )
    forecast = simulate(policy, tiers if system in ALL_TIERS else tiers[:1], work)
    return Comparison(f"accumulation {row['accumulation']}", system, measured, forecast)


def _policy(system: str, conditions: Conditions, num_subgroups: int, size: int) -> Policy:
    """As the system ran. Stock DeepSpeed with a buffer for each subgroup's gradient writes them in the update only."""
    policy = POLICIES[system]
    if system == "nvme" and buffer_count(conditions, size) >= num_subgroups:
        return replace(policy, gradients="update")
    return replace(policy, ratio=tuple(static_weights(conditions.tiers))) if system == "paper" else policy
