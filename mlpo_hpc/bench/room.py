"""Whether memory and disks are large enough for all systems at the same time."""

from __future__ import annotations

import os
from collections.abc import Sequence

from mlpo_hpc.bench.conditions import STATE_ITEM_BYTES, SWAPPED_ITEM_BYTES, Conditions
from mlpo_hpc.bench.systems import tiers_of
from mlpo_hpc.cluster.memory import available_bytes
from mlpo_hpc.errors import ConfigError
from mlpo_hpc.storage.filesystem import describe

PROCESS_BYTES = 500_000_000
"""Of torch and DeepSpeed, a rank."""
WORKING_ITEM_BYTES = 8
"""A parameter's weights and gradients of 16 bits, and what is made of them on the way."""
FP32_BYTES = 4
SLACK = 1.05
SLACK_BYTES = 200_000_000
"""On each tier, for its file system and for measuring it."""


def tier_bytes(conditions: Conditions, systems: Sequence[str]) -> dict[str, int]:
    """Bytes that may be written to each tier, by name: a system may put all its state on any of them."""
    needed = {tier.name: SLACK_BYTES for tier in conditions.tiers}
    for system in systems:
        item_bytes = SWAPPED_ITEM_BYTES if system == "nvme" else STATE_ITEM_BYTES
        for tier in tiers_of(system, conditions):
            needed[tier.name] += int(SLACK * item_bytes * conditions.numel)
    return needed


def memory_bytes(conditions: Conditions, systems: Sequence[str]) -> int:
    """Host memory that all systems together take, about."""
    offloaded = min(conditions.host_memory_bytes or conditions.state_bytes, conditions.state_bytes)
    in_memory = conditions.state_bytes + FP32_BYTES * conditions.numel  # stock keeps an fp32 gradient too
    states = sum(in_memory if system == "cpu" else offloaded for system in systems)
    processes = conditions.ranks * PROCESS_BYTES + WORKING_ITEM_BYTES * conditions.numel
    return states + len(systems) * processes


def require_memory(conditions: Conditions, systems: Sequence[str]) -> None:
    """Raise `ConfigError` if there is not enough host memory."""
    needed, available = memory_bytes(conditions, systems), available_bytes()
    if needed > available:
        raise ConfigError(
            f"{len(systems)} systems take about {needed / 1e9:.1f} GB of host memory together, "
            f"{available / 1e9:.1f} GB are available: give fewer --systems, or a smaller model (--blocks, --hidden)"
        )


def require_space(conditions: Conditions, systems: Sequence[str]) -> None:
    """Raise `ConfigError` if there is not enough space for the tiers, or one is in memory."""
    needed: dict[int, int] = {}
    for tier in conditions.tiers:
        if not os.path.isdir(tier.dir):
            raise ConfigError(f"tier {tier.name}: {tier.dir} is no directory: make it, or give another one")
        filesystem = describe(tier.dir)
        if filesystem.is_memory:
            raise ConfigError(
                f"tier {tier.name}: {tier.dir} is memory ({filesystem.type}): give a directory on storage"
            )
        needed[filesystem.device] = needed.get(filesystem.device, 0) + tier_bytes(conditions, systems)[tier.name]
        if needed[filesystem.device] > filesystem.free_bytes:
            raise ConfigError(
                f"tier {tier.name}: up to {needed[filesystem.device] / 1e9:.1f} GB are written to the file system of "
                f"{tier.dir}, {filesystem.free_bytes / 1e9:.1f} GB are free: free space, or give fewer --systems"
            )
