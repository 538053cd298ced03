"""What all systems of a benchmark have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MATRICES_A_BLOCK = 2
WIDENING = 4
"""Width of a block's middle, in widths of its ends."""
STATE_ITEM_BYTES = 12
"""fp32 weight and two fp32 moments of a parameter."""
SWAPPED_ITEM_BYTES = 16
"""What stock DeepSpeed reads from NVMe for a parameter: its state and its fp32 gradient."""

USUAL_HOST_BYTES = 268_000_000


@dataclass(frozen=True)
class BenchTier:
    """A directory to offload to, and how fast it is."""

    name: str
    dir: str
    read_bps: float = 0.0
    """Bytes per second of a plain sequential reader, as measured."""
    write_bps: float = 0.0
    """Bytes per second of a plain sequential writer, as measured."""
    direct: bool = True
    """Whether it was measured without the page cache."""

    @property
    def rate_bps(self) -> float:
        """The slower way: what is updated is read once and written once."""
        return min(self.read_bps, self.write_bps)


@dataclass(frozen=True)
class Conditions:
    """Model, data, host memory, storage and how often."""

    tiers: tuple[BenchTier, ...]
    """Empty: host memory only."""
    blocks: int = 8
    """Residual blocks: hidden -> 4 hidden -> hidden, ReLU between, no bias."""
    hidden: int = 1024
    rows: int = 4
    """Rows of a micro-batch: one row counts as one text token."""
    sub_group_size: int = 4_000_000
    """Parameters."""
    host_memory_bytes: int | None = USUAL_HOST_BYTES
    """Of the node, for buffers and cache together; None: ours chooses."""
    iterations: int = 6
    """Counted ones of each system and accumulation, at least."""
    warm: int = 2
    """Iterations before the first turn that do not count."""
    accumulations: tuple[int, ...] = (1, 8)
    """Micro-batches an iteration."""
    ranks: int = 1
    """Processes of each system, on this host."""
    threads: int | None = None
    """With which each of them computes; None: the cores of the host, divided among them."""
    seed: int = 1
    learning_rate: float = 1e-4
    facts: dict[str, Any] = field(default_factory=dict)
    """For the reader only: versions, cores, caps."""

    @property
    def numel(self) -> int:
        """Parameters of the model."""
        return self.blocks * MATRICES_A_BLOCK * WIDENING * self.hidden**2

    @property
    def state_bytes(self) -> int:
        """fp32 state of all ranks."""
        return STATE_ITEM_BYTES * self.numel

    def largest_subgroup_numel(self, sub_group_size: int) -> int:
        """Parameters of one rank's largest subgroup: DeepSpeed adds whole matrices until the size is reached."""
        matrix_numel = -(-WIDENING * self.hidden**2 // self.ranks)
        num_matrices = min(-(-sub_group_size // matrix_numel), self.blocks * MATRICES_A_BLOCK)
        return num_matrices * matrix_numel
