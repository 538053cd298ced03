"""Codec ``fp32``: master weights and each state vector one after the other, as the update uses them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlpo_hpc.storage.base import round_up

if TYPE_CHECKING:
    import torch

ITEM_BYTES = 4
VECTOR_ALIGNMENT_BYTES = 64  # a cache line, so that the kernels' vector loads are aligned


def stride_items(numel: int) -> int:
    """Items from the beginning of one vector of `numel` to the next."""
    return round_up(numel * ITEM_BYTES, VECTOR_ALIGNMENT_BYTES) // ITEM_BYTES


def record_bytes(numel: int, num_vectors: int) -> int:
    """Bytes of a subgroup's state: `num_vectors` fp32 vectors of `numel` items, padded for O_DIRECT."""
    return round_up(num_vectors * stride_items(numel) * ITEM_BYTES)


def vectors(buffer: memoryview, numel: int, num_vectors: int) -> list[torch.Tensor]:
    """Views of a record's fp32 vectors, each of shape ``(numel,)``, without a copy."""
    import torch

    stride = stride_items(numel) * ITEM_BYTES
    return [torch.frombuffer(buffer, dtype=torch.float32, count=numel, offset=i * stride) for i in range(num_vectors)]
