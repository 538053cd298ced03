"""Codec ``split``: without loss, 2 instead of 4 bytes for each master weight of a model in bf16.

A bf16 weight is the upper half of its fp32 master weight, rounded. Only the lower half is stored, as a
**signed** 16-bit number: ``master = (weight << 16) + low`` in integer arithmetic undoes the rounding by itself.
Exceptions are exact ties that were rounded down to an even upper half (one in some 2^17), NaNs
and whatever else does not come back; they are found by comparing and stored by position, whatever their cause.

A record: the state vectors (fp32), the low halves, then the tail: number of exceptions, a
checksum of each parameter's 16-bit weights, positions and bits of the exceptions. A record with more
exceptions than it has room for is stored *plain*, with the fp32 master weights in place of the low halves.
The two differ in length.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import xxhash

from mlpo_hpc.state.codec.fp32 import ITEM_BYTES, VECTOR_ALIGNMENT_BYTES, record_bytes, stride_items
from mlpo_hpc.storage.base import round_up

if TYPE_CHECKING:
    import torch

LOW_BYTES = 2
BLOCK_ITEMS = 2**18
"""Items that are worked on before the next: they stay in the cache between the passes, and torch does not share so few
with its other threads, which would have to wait for the ones that move bytes."""
SPARE_EXCEPTIONS = 64
ITEMS_PER_EXCEPTION = 1024


@dataclass(frozen=True)
class SplitForm:
    """How the record of one subgroup is made up.

    Parameters
    ----------
    numel : int
        Items of the master weights and of each state vector.
    num_vectors : int
        State vectors beside the master weights.
    pieces : tuple of int
        Items of each parameter in it, in order.
    """

    numel: int
    num_vectors: int
    pieces: tuple[int, ...]

    @property
    def capacity(self) -> int:
        """Exceptions that a record has room for."""
        return SPARE_EXCEPTIONS + self.numel // ITEMS_PER_EXCEPTION

    @property
    def master_offset(self) -> int:
        """Byte at which the low halves begin, or the plain master weights."""
        return self.num_vectors * stride_items(self.numel) * ITEM_BYTES

    @property
    def tail_offset(self) -> int:
        """Byte at which the tail begins."""
        return self.master_offset + round_up(self.numel * LOW_BYTES, VECTOR_ALIGNMENT_BYTES)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a record."""
        return round_up(self.tail_offset + 8 * (1 + len(self.pieces)) + 12 * self.capacity)

    @cached_property
    def plain_bytes(self) -> int:
        """Bytes of a plain record."""
        return record_bytes(self.numel, self.num_vectors + 1)

    @property
    def pays(self) -> bool:
        """Whether it is shorter than a plain one; very small ones are not."""
        return self.nbytes < self.plain_bytes


class Split:
    """Encodes and decodes, block by block with one piece of memory."""

    def __init__(self) -> None:
        import torch

        self._block = torch.empty(BLOCK_ITEMS, dtype=torch.int32)

    def decode(self, form: SplitForm, record: memoryview, weights: torch.Tensor, master: torch.Tensor) -> list[int]:
        """Rebuild the master weights.

        Parameters
        ----------
        form : SplitForm
            Of the record.
        record : memoryview
            Encoded.
        weights : torch.Tensor
            The 16-bit weights, bf16 of shape ``(numel,)``.
        master : torch.Tensor
            Gets the result, fp32 of shape ``(numel,)``.

        Returns
        -------
        list of int
            Parameters whose 16-bit weights are not those of the last `encode`: these became the master weights.
        """
        import torch

        low, tail = _low(form, record), _Tail(form, record)
        for part, bits, upper, lower in self._cut(master, master.view(torch.int32), weights, low):
            part.copy_(upper)
            # Added as it is, torch would make a 32-bit copy of it first, in new memory each time.
            bits.add_(self._block[: len(lower)].copy_(lower))
        count = int(tail.count[0])
        if count:
            master.numpy().view(np.int32)[tail.positions[:count]] = tail.bits[:count]
        return take_over(form, tail.checksums.tolist(), weights, master)

    def encode(self, form: SplitForm, record: memoryview, weights: torch.Tensor, master: torch.Tensor) -> bool:
        """Store the master weights; parameters as for `decode`.

        Returns
        -------
        bool
            False if there are more exceptions than the record has room for; what it holds is then nothing.
        """
        import torch

        low, tail = _low(form, record), _Tail(form, record)
        bits = master.view(torch.int32)
        positions: list[torch.Tensor] = []
        for number, (part, upper, lower) in enumerate(self._cut(bits, weights, low)):
            block = self._block[: len(lower)]
            block.view(torch.float32).copy_(upper)
            torch.sub(part, block, out=block)
            lower.copy_(block)
            # What does not fit into 16 bits has another upper half than 0 now.
            found = block.add_(2**15).bitwise_and_(-(2**16)).nonzero().flatten()
            if len(found):
                positions.append(found + number * BLOCK_ITEMS)
                if sum(map(len, positions)) > form.capacity:
                    return False
        np.frombuffer(record, np.uint8)[form.master_offset + form.numel * LOW_BYTES : form.nbytes] = 0
        where = torch.cat(positions).numpy() if positions else np.empty(0, np.int64)
        tail.count[0] = len(where)
        tail.positions[: len(where)] = where
        tail.bits[: len(where)] = bits.numpy()[where]
        tail.checksums[:] = checksums(form, weights)
        return True

    def _cut(self, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        return zip(*(cast(Any, tensor).split(BLOCK_ITEMS) for tensor in tensors), strict=True)


class _Tail:
    """Views of what follows the low halves."""

    def __init__(self, form: SplitForm, record: memoryview) -> None:
        def view(kind: type[np.generic], count: int, offset: int) -> np.ndarray:
            return np.frombuffer(record, kind, count, offset)

        num_pieces, capacity, begin = len(form.pieces), form.capacity, form.tail_offset
        self.count = view(np.int64, 1, begin)
        self.checksums = view(np.uint64, num_pieces, begin + 8)
        self.positions = view(np.int64, capacity, begin + 8 * (1 + num_pieces))
        self.bits = view(np.int32, capacity, begin + 8 * (1 + num_pieces + capacity))


def _low(form: SplitForm, record: memoryview) -> torch.Tensor:
    import torch

    return torch.frombuffer(record, dtype=torch.int16, count=form.numel, offset=form.master_offset)


def checksums(form: SplitForm, weights: torch.Tensor) -> list[int]:
    """One of the 16-bit weights of each parameter."""
    import torch

    items = weights.view(torch.int16).numpy()
    return [xxhash.xxh3_64_intdigest(cast(Any, items[part])) for part in _parts(form)]


def take_over(form: SplitForm, before: list[int], weights: torch.Tensor, master: torch.Tensor) -> list[int]:
    """Let 16-bit weights that are not those of the checksums become the master weights; which parameters these are."""
    parts, now = _parts(form), checksums(form, weights)
    changed = [index for index, (old, new) in enumerate(zip(before, now, strict=True)) if old != new]
    for index in changed:
        master[parts[index]].copy_(weights[parts[index]])
    return changed


def _parts(form: SplitForm) -> list[slice]:
    ends = list(itertools.accumulate(form.pieces))
    return [slice(end - numel, end) for end, numel in zip(ends, form.pieces, strict=True)]


def state_vectors(form: SplitForm, record: memoryview) -> list[torch.Tensor]:
    """Views of the state vectors, each fp32 of shape ``(numel,)``; the same in a plain record."""
    import torch

    stride = stride_items(form.numel) * ITEM_BYTES
    kind, count = torch.float32, form.numel
    return [torch.frombuffer(record, dtype=kind, count=count, offset=i * stride) for i in range(form.num_vectors)]


def plain_master(form: SplitForm, record: memoryview) -> torch.Tensor:
    """A view of the master weights of a plain record."""
    import torch

    return torch.frombuffer(record, dtype=torch.float32, count=form.numel, offset=form.master_offset)
