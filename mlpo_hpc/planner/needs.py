"""Memory that a job needs on an accelerator and on a node, and room on its tiers."""

from __future__ import annotations

from collections.abc import Sequence

from mlpo_hpc.planner.job import WEIGHT_BYTES, Job
from mlpo_hpc.planner.machine import PlanTier
from mlpo_hpc.planner.policy import FP32_BYTES, GRADIENT_BYTES, Policy
from mlpo_hpc.state.layout import least_host_bytes
from mlpo_hpc.state.placement import SPARE_RECORDS, divide_slots

LIVE_PARAMETERS = 10**9
"""DeepSpeed's default of ``stage3_max_live_parameters``: gathered weights that are kept."""
BUCKET_ITEMS = 5 * 10**8
"""DeepSpeed's default of ``reduce_bucket_size``: gradients on their way to their owners."""
LAYER_ACTIVATION_BYTES = 34
"""Activations of one layer, for each text token and unit of width."""
LOGIT_BYTES = 8
"""A logit and its gradient, in 32 bits."""
PARTS = 1000
"""In which shares of tiers are counted."""


def gpu_bytes(job: Job) -> dict[str, float]:
    """Memory of one accelerator, by what takes it.

    Activations are those of training that keeps the input of each layer and computes the rest again; attention is
    taken not to keep its matrix. What driver, allocator and communication library take is not in it.
    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198),
    34 s b h bytes for a layer.
    """
    model, tokens = job.model, job.sequence * job.micro_batch
    live = min(model.numel, max(LIVE_PARAMETERS, model.layer_numel))
    return {
        "weights, its part": WEIGHT_BYTES * model.numel / job.machine.ranks,
        "weights, gathered": WEIGHT_BYTES * live,
        "gradients, in a bucket": WEIGHT_BYTES * min(model.numel, BUCKET_ITEMS),
        "activations, kept": WEIGHT_BYTES * tokens * model.hidden * model.layers,
        "activations of a layer": LAYER_ACTIVATION_BYTES * tokens * model.hidden,
        "logits": LOGIT_BYTES * tokens * model.vocabulary,
    }


def host_bytes(job: Job) -> dict[str, float]:
    """Memory of one node, by what takes it; that of the training processes themselves is not in it."""
    return {"gradients, 16 bits": job.gradient_bytes, "state: buffers and cache": float(job.state_host_bytes)}


def least_state_bytes(job: Job, policy: Policy) -> int:
    """Host memory of one node for state with which every step can finish."""
    have_tiers = bool(job.machine.tiers)
    return job.machine.gpus * least_host_bytes(_sizes(job), _scratch_bytes(job, policy), have_tiers)


def fits_in_memory(job: Job, policy: Policy) -> bool:
    """Whether host memory for state holds all of it, so that no tier is used."""
    return job.state_host_bytes >= job.machine.gpus * least_host_bytes(_sizes(job), _scratch_bytes(job, policy), False)


def _sizes(job: Job) -> list[int]:
    """Records of one rank, at their largest: that is what there must be room for."""
    items = job.items / job.machine.gpus / job.num_subgroups
    return [int(FP32_BYTES * items)] * job.num_subgroups


def _scratch_bytes(job: Job, policy: Policy) -> int:
    """Host memory of one rank for what is updated at once."""
    items = policy.scratch_items(job.items / job.machine.gpus / job.num_subgroups)
    return int(max(GRADIENT_BYTES, policy.scratch_bytes) * items)


def stored_bytes(job: Job, policy: Policy) -> float:
    """State of one node on its tiers: one copy, and free slots for what is being written."""
    spare = SPARE_RECORDS / job.num_subgroups
    return max(policy.read_bytes, policy.written_bytes) * job.items * (1 + spare)


def room_bytes(tier: PlanTier, nodes: int) -> float | None:
    """What a node may use of a tier; None: not known."""
    if tier.capacity_bytes is None:
        return None
    return tier.capacity_bytes / (nodes if tier.shared else 1)


def fitting_weights(job: Job, policy: Policy, weights: Sequence[float]) -> list[float] | None:
    """Shares of the tiers, none above its room where the policy chooses them itself; None if the state does not fit."""
    total = stored_bytes(job, policy)
    rooms = [room_bytes(tier, job.machine.nodes) for tier in job.machine.tiers]
    limits = [PARTS if room is None else min(PARTS, int(PARTS * room / total)) for room in rooms]
    if policy.shares == "bandwidth":
        slots = divide_slots(PARTS, weights, limits)
        return None if slots is None else [float(count) for count in slots]
    wanted = [PARTS * weight / sum(weights) for weight in weights]
    return list(weights) if all(part <= limit for part, limit in zip(wanted, limits, strict=True)) else None
