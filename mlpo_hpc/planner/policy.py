"""What the systems do with state, as far as it decides how long a step takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mlpo_hpc.state.layout import CHUNKS_PER_RECORD

FP32_BYTES = 12
"""fp32 weight and two moments."""
SPLIT_BYTES = 10
GRADIENT_BYTES = 4
PART_ITEMS = 2**20
"""Parameters of one part of an update, as in `engine.records`."""
FEW_CHUNKS = 4
"""Enough where a subgroup lies on one tier: in what pieces it moves there changes little."""


@dataclass(frozen=True)
class Policy:
    """How a system offloads. Bytes are for each parameter."""

    name: str
    meaning: str
    read_bytes: int
    """State, and gradients where they are swapped."""
    written_bytes: int
    order: Literal["sequential", "alternate"]
    shares: Literal["first", "ratio", "bandwidth"]
    """Where state goes: to the first tier, by whole numbers set by hand, or by what each tier lets pass."""
    whole_subgroups: bool = False
    """Whether all of a subgroup lies on one tier."""
    chunks: int = CHUNKS_PER_RECORD
    """Pieces of a subgroup that move one by one in the simulation."""
    prefetch: int | None = None
    """Subgroups read ahead at most; None: as many as memory holds."""
    keeps: bool = True
    """Whether state stays in host memory from step to step."""
    working_records: int = 0
    """Subgroups' state that host memory must have room for beside what it keeps."""
    memory_used: float = 1.0
    """Part of host memory for state that holds state: the rest is lost to the rounding of buffers."""
    across_steps: bool = True
    """Whether writing and reading ahead go on during the next forward and backward pass."""
    gradients: Literal["stay", "backward", "update"] = "stay"
    """Whether 32-bit gradients are written to storage, and when."""
    scratch_bytes: int = 4
    """Host memory for each parameter of what is updated at once: its 32-bit gradient, decoded weights."""
    early_share: float = 0.0
    """Part of a record that is updated and written part by part, the rest being written with the last part; 0: a
    subgroup is updated as a whole."""
    codec: bool = False
    """Whether state is decoded and encoded."""
    ratio: tuple[float, ...] | None = None
    """Of ``shares`` "ratio", by tier; None: of what they let pass, rounded."""
    permits: int | None = 1
    """Ranks of a node that use a tier at once; None: all."""

    def scratch_items(self, subgroup_items: float) -> float:
        """Parameters that are updated at once."""
        return min(PART_ITEMS, subgroup_items) if self.early_share else subgroup_items


ZERO3 = Policy(
    "zero3",
    "stock DeepSpeed, NVMe offload on the first tier",
    FP32_BYTES + GRADIENT_BYTES,
    FP32_BYTES,
    "sequential",
    "first",
    whole_subgroups=True,
    chunks=FEW_CHUNKS,
    prefetch=1,
    keeps=False,
    across_steps=False,
    gradients="backward",
    scratch_bytes=0,
    permits=None,
)
MLP = Policy(
    "mlp",
    "MLP-Offload, the authors' code: whole subgroups, one ahead, a ratio set by hand",
    FP32_BYTES,
    FP32_BYTES,
    "alternate",
    "ratio",
    whole_subgroups=True,
    chunks=FEW_CHUNKS,
    prefetch=1,
    working_records=3,
    memory_used=0.79,  # buffers of 0.79 GiB are rounded up to 1 GiB: the public artifact
    across_steps=False,
)
PAPER = Policy(
    "paper",
    "the paper's policies on this library's engine, as mlpo bench runs them",
    FP32_BYTES,
    FP32_BYTES,
    "alternate",
    "ratio",
    prefetch=1,
    early_share=1.0,
)
OURS = Policy(
    "ours",
    "this library as it is",
    SPLIT_BYTES,
    SPLIT_BYTES,
    "alternate",
    "bandwidth",
    scratch_bytes=8,
    early_share=0.8,  # the moments; the lower halves of the weights are complete when all of them are
    codec=True,
)
