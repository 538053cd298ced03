"""A training job, and what it asks of one node: computation, host memory, subgroups."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlpo_hpc.cluster.memory import AUTO_FRACTION
from mlpo_hpc.planner.machine import Machine
from mlpo_hpc.planner.model import Model
from mlpo_hpc.planner.policy import FEW_CHUNKS, Policy
from mlpo_hpc.planner.simulate import Work
from mlpo_hpc.state.layout import LEAST_SUBGROUPS

WEIGHT_BYTES = 2
"""A weight or a gradient in 16 bits."""
RECOMPUTED_PASSES = 3
"""A backward pass takes two forward passes' operations, and one more to compute activations again."""
MANY_SUBGROUPS = 32
"""More of a rank move in fewer pieces each."""


@dataclass(frozen=True)
class Job:
    """What is trained, and on what."""

    model: Model
    machine: Machine
    sequence: int = 2048
    """Text tokens."""
    micro_batch: int = 1
    """Sequences of a rank."""
    accumulation: int = 1
    """Micro-batches an iteration."""
    host_bytes: int | None = None
    """Host memory of a node for state, buffers and cache together; None: what ``host_memory: auto`` takes."""
    sub_group_size: int = 10**8
    """Parameters."""

    @property
    def items(self) -> float:
        """Parameters whose state a node has."""
        return self.model.numel / self.machine.nodes

    @property
    def text_tokens(self) -> int:
        """Of an iteration, of all ranks."""
        return self.sequence * self.micro_batch * self.accumulation * self.machine.ranks

    @property
    def gradient_bytes(self) -> float:
        """16-bit gradients in the host memory of a node."""
        return WEIGHT_BYTES * self.items

    @property
    def state_host_bytes(self) -> int:
        """Host memory of a node for state, as given or as the engine would take it."""
        if self.host_bytes is not None:
            return self.host_bytes
        return max(0, int(AUTO_FRACTION * (self.machine.node_bytes - self.gradient_bytes)))

    @property
    def num_subgroups(self) -> int:
        """Of each rank."""
        return max(LEAST_SUBGROUPS, round(self.items / self.machine.gpus / self.sub_group_size))

    @property
    def forward_s(self) -> float:
        """Of an iteration. Weights cross the network meanwhile."""
        gather_s = WEIGHT_BYTES * self.model.numel / self.machine.network_bps if self.machine.nodes > 1 else 0.0
        return self.accumulation * max(self._pass_s, gather_s)

    @property
    def backward_s(self) -> float:
        """Of an iteration. Weights and gradients cross the network meanwhile; then gradients go to host memory."""
        traffic_bytes = 2 * WEIGHT_BYTES * self.model.numel
        network_s = traffic_bytes / self.machine.network_bps if self.machine.nodes > 1 else 0.0
        copy_s = self.gradient_bytes / self.machine.gpus / self.machine.gpu_link_bps
        return self.accumulation * (max(RECOMPUTED_PASSES * self._pass_s, network_s) + copy_s)

    @property
    def _pass_s(self) -> float:
        """The operations of one micro-batch's forward pass."""
        return self.sequence * self.micro_batch * self.model.forward_flops(self.sequence) / self.machine.gpu_flops

    def work(self, policy: Policy) -> Work:
        """Of one node."""
        item_s = 1 / self.machine.update_items_ps + (1 / self.machine.codec_items_ps if policy.codec else 0.0)
        return Work(
            self.items,
            self.machine.gpus,
            self.num_subgroups,
            self.state_host_bytes,
            self.forward_s,
            self.backward_s,
            1 / item_s,
        )

    def simulated(self, policy: Policy) -> Policy:
        """The policy with fewer pieces where there are many subgroups: what they decide averages out."""
        return replace(policy, chunks=FEW_CHUNKS) if self.num_subgroups > MANY_SUBGROUPS else policy
