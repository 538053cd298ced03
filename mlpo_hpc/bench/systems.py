"""The systems that are compared, as DeepSpeed configurations. Pure: nothing is started here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlpo_hpc.bench.conditions import BenchTier, Conditions
from mlpo_hpc.config import SECTION

SYSTEMS = {
    "nvme": "stock DeepSpeed, state on the first tier",
    "cpu": "stock DeepSpeed, all state in host memory: the limit",
    "paper-1": "ours with one tier and 16-bit gradients, in sequential order",
    "paper-2": "and alternating order",
    "paper-3": "and turns on the tier",
    "paper": "and all tiers: the paper's policies",
    "ours": "ours as it is without settings",
}
"""Name -> what it is. Each ``paper-N`` has one principle more than the one before."""
QUICK = ("nvme", "cpu", "paper", "ours")
STOCK = ("nvme", "cpu")
WITHOUT_TIERS = ("cpu", "ours")

QUEUE_DEPTHS = (16, 32)
LEAST_BUFFERS = 12
"""DeepSpeed's pipelined swapper runs out of buffers with fewer."""
FP32_BYTES = 4


@dataclass(frozen=True)
class Swap:
    """How stock DeepSpeed swaps to NVMe."""

    queue_depth: int
    sub_group_size: int
    """Parameters."""


def swaps_to_try(conditions: Conditions) -> tuple[list[Swap], list[str]]:
    """Settings that fit into host memory, and what was left out and why."""
    tried, left_out = [], []
    for size in (conditions.sub_group_size, 2 * conditions.sub_group_size):
        count = buffer_count(conditions, size)
        if count < LEAST_BUFFERS:
            left_out.append(
                f"nvme with sub_group_size {size:,}: host memory holds {count} buffers, it needs {LEAST_BUFFERS}"
            )
        else:
            tried += [Swap(depth, size) for depth in QUEUE_DEPTHS]
    return tried, left_out


def buffer_count(conditions: Conditions, sub_group_size: int) -> int:
    """Swap buffers of one rank that its share of host memory holds, to the nearest: stock may take a little more."""
    share_bytes = (conditions.host_memory_bytes or 0) / conditions.ranks
    return round(share_bytes / (FP32_BYTES * conditions.largest_subgroup_numel(sub_group_size)))


def tiers_of(system: str, conditions: Conditions) -> tuple[BenchTier, ...]:
    """The tiers that a system uses."""
    if system == "cpu":
        return ()
    return conditions.tiers[:1] if system in ("nvme", "paper-1", "paper-2", "paper-3") else conditions.tiers


def ds_config(system: str, conditions: Conditions, tiers: Sequence[BenchTier], swap: Swap | None) -> dict[str, Any]:
    """DeepSpeed's configuration of a system.

    Parameters
    ----------
    system : str
        One of `SYSTEMS`.
    conditions : Conditions
        What all have in common.
    tiers : sequence of BenchTier
        Those of `tiers_of`, with this system's own directories.
    swap : Swap or None
        For ``nvme``.
    """
    zero: dict[str, Any] = {"stage": 3, "sub_group_size": conditions.sub_group_size}
    config = {
        "train_micro_batch_size_per_gpu": conditions.rows,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": conditions.learning_rate}},
        "zero_optimization": zero,
    }
    if system == "nvme":
        assert swap is not None
        return config | _swapping(zero, conditions, tiers[0], swap)
    if system == "cpu":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        return config
    return config | {SECTION: _section(system, conditions, tiers)}


def _swapping(zero: dict[str, Any], conditions: Conditions, tier: BenchTier, swap: Swap) -> dict[str, Any]:
    zero["sub_group_size"] = swap.sub_group_size
    zero["offload_optimizer"] = {
        "device": "nvme",
        "nvme_path": tier.dir,
        "pin_memory": True,
        "buffer_count": buffer_count(conditions, swap.sub_group_size),
        "pipeline_read": True,
        "pipeline_write": True,
    }
    aio = {"block_size": 2**20, "queue_depth": swap.queue_depth, "single_submit": False, "overlap_events": True}
    return {"aio": {**aio, "intra_op_parallelism": 1}}


def _section(system: str, conditions: Conditions, tiers: Sequence[BenchTier]) -> dict[str, Any]:
    section: dict[str, Any] = {"tiers": [{"name": tier.name, "dir": tier.dir} for tier in tiers]}
    if conditions.host_memory_bytes is not None:
        section["host_memory"] = conditions.host_memory_bytes
    return section if system == "ours" else section | _paper(system, conditions.ranks, tiers)


def _paper(system: str, ranks: int, tiers: Sequence[BenchTier]) -> dict[str, Any]:
    """The paper's policies, as many of them as the system has."""
    takes_turns = system in ("paper-3", "paper")
    turns = "local" if ranks == 1 else "flock"
    return {
        "state_format": "fp32",
        "prefetch": 1,
        "order": "sequential" if system == "paper-1" else "alternate",
        "tokens": {"backend": turns if takes_turns else "off"},
        "placement": {"static": static_weights(tiers)},
    }


def static_weights(tiers: Sequence[BenchTier]) -> list[float]:
    """The paper's: fixed, in whole numbers, by how fast the tiers are, such as 2:1."""
    slowest_bps = min((tier.rate_bps for tier in tiers), default=0.0)
    return [float(round(tier.rate_bps / slowest_bps)) if slowest_bps else 1.0 for tier in tiers]
