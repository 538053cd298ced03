"""What the records of this rank hold, by parameter name: DeepSpeed's partitions in the words of the storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlpo_hpc.engine.update import MASTER, BoundState
from mlpo_hpc.state.codec.fp32 import stride_items
from mlpo_hpc.storage.contents import Contents, Piece, RecordForm


def describe_contents(state: BoundState, groups: Sequence[Sequence[Any]], names: Mapping[Any, str]) -> Contents:
    """Describe the partitions of all subgroups.

    Parameters
    ----------
    state : BoundState
        How records are made up.
    groups : sequence of sequence of Parameter
        DeepSpeed's partitioned parameters of each subgroup, in order.
    names : mapping
        Parameter to name.
    """
    codec = state.records.codec
    forms = [
        RecordForm(numel, stride_items(numel), (MASTER, *spec.vectors) if codec == "fp32" else (*spec.vectors, MASTER))
        for numel, spec in zip(state.numels, state.specs, strict=True)
    ]
    pieces: list[Piece] = []
    for subgroup, params in enumerate(groups):
        begin = 0
        for place, param in enumerate(params):
            name = names.get(param, f"unnamed.{subgroup}.{place}")
            pieces.append(_piece(param, name, subgroup, begin))
            begin += int(param.partition_numel())
    return Contents(codec, tuple(forms), tuple(pieces))


def _piece(param: Any, name: str, subgroup: int, begin: int) -> Piece:
    """ZeRO-3 cuts a flattened parameter into equal parts; the last one may be padded, or nothing but padding."""
    part = int(param.partition_numel())
    first = min(int(param.ds_zero_partition_rank) * part, int(param.ds_numel))
    numel = min(part, int(param.ds_numel) - first)
    return Piece(name, tuple(int(size) for size in param.ds_shape), first, numel, subgroup, begin)
