"""The machine of a plan: nodes, their accelerators and memory, and the storage that state can go to."""

from __future__ import annotations

from dataclasses import dataclass, replace

WAYS = ("read", "write")
CODEC_ITEMS_PS_CORE = 2.5e8
"""Parameters that a core decodes and encodes in a second: 8 ms for 4 M on two, see docs/architecture.md."""


@dataclass(frozen=True)
class PlanTier:
    """Storage as a node sees it, with all of its ranks together."""

    name: str
    read_bps: float
    write_bps: float
    full_duplex: bool = True
    """Whether reading does not slow down writing."""
    at_once: float = 1.0
    """Part of the bandwidth that is left when all ranks of the node use it at once."""
    shared: bool = False
    """Whether all nodes use the same one."""
    total_bps: float | None = None
    """Of a shared one: what all nodes together get each way; None: every node gets its own rates."""
    capacity_bytes: int | None = None
    """What a node may use, or of a shared tier all nodes together; None: not known."""

    def rate_bps(self, way: str) -> float:
        """Of one way."""
        return self.read_bps if way == "read" else self.write_bps

    def item_s(self, read_bytes: float, written_bytes: float) -> float:
        """Seconds in which so many bytes are read and so many written."""
        each = (read_bytes / self.read_bps, written_bytes / self.write_bps)
        return max(each) if self.full_duplex else sum(each)

    @property
    def pass_bps(self) -> float:
        """State that can pass through, in and out again, in bytes per second."""
        return 1 / self.item_s(1, 1)

    def for_nodes(self, nodes: int) -> PlanTier:
        """What is left for one of so many nodes that use it at the same time."""
        if self.total_bps is None:
            return self
        most_bps = self.total_bps / nodes
        return replace(self, read_bps=min(self.read_bps, most_bps), write_bps=min(self.write_bps, most_bps))

    def with_ranks(self, ranks: int, permits: int | None) -> PlanTier:
        """At the speed with which `permits` of a node's ranks use it at once; None: all of them.

        Between one rank alone and all at once it is taken to change evenly.
        """
        crowd = min(ranks, permits or ranks)
        kept = 1 - (1 - self.at_once) * (crowd - 1) / max(1, ranks - 1)
        return replace(self, read_bps=kept * self.read_bps, write_bps=kept * self.write_bps)


@dataclass(frozen=True)
class Machine:
    """What a job gets. Rates of computation are those that are reached, not those of a data sheet."""

    tiers: tuple[PlanTier, ...]
    nodes: int = 1
    gpus: int = 4
    """On a node; each has a rank."""
    gpu_bytes: int = 80 * 10**9
    gpu_flops: float = 3.8e14
    """Floating-point operations per second of one accelerator in a forward pass."""
    gpu_link_bps: float = 5e10
    """Of one accelerator to host memory."""
    network_bps: float = 5e10
    """Of one accelerator to other nodes."""
    node_bytes: int = 512 * 2**30
    """Host memory of a node."""
    update_items_ps: float = 1.25e10
    """Parameters of which the CPUs of a node update weights and moments in a second."""
    codec_items_ps: float = 64 * CODEC_ITEMS_PS_CORE
    """Parameters that they decode and encode in a second, where state is not stored as it is."""

    @property
    def ranks(self) -> int:
        """Of the whole job."""
        return self.nodes * self.gpus

    @property
    def local_tiers(self) -> tuple[PlanTier, ...]:
        """As one of the nodes sees them while all are at work."""
        return tuple(tier.for_nodes(self.nodes) for tier in self.tiers)
