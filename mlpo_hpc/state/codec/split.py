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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
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
ROW_ITEMS = 2**12
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


class SplitRecord:
    """A record in work: its master weights are decoded and encoded part by part, ascending.

    Parameters
    ----------
    form : SplitForm
        Of the record.
    record : memoryview
        Its bytes.
    weights : torch.Tensor
        The 16-bit weights in host memory, bf16 of shape ``(numel,)``: those of the last time before a part is decoded,
        the new ones before it is encoded.
    new : bool
        Whether there is nothing in it yet.
    """

    def __init__(self, form: SplitForm, record: memoryview, weights: torch.Tensor, new: bool = False) -> None:
        self.form = form
        self.changed: list[int] = []
        """Parameters whose 16-bit weights are not those of the last time: these become the master weights."""
        self._low = _low(form, record)
        self._tail = _Tail(form, record)
        self._weights = weights
        self._parts = _parts(form)
        self._blocks = _blocks()
        self._encoded = 0  # items before this one are encoded anew
        self._old = _Exceptions.none() if new else self._tail.exceptions()
        self._new = [_Exceptions.none()]
        if not new:
            now = zip(self._tail.checksums.tolist(), checksums(form, weights), strict=True)
            self.changed = [index for index, (before, after) in enumerate(now) if before != after]

    def decode(self, part: slice, master: torch.Tensor) -> None:
        """Rebuild the master weights of a part, fp32 of shape ``(part.stop - part.start,)``."""
        import torch

        for block, bits in _cut(part, master.view(torch.int32)):
            # Copied first, for it may be where the master weights go; and added as it is, torch would make a
            # 32-bit copy of it in new memory each time.
            lower = self._blocks.wide[: len(bits)].copy_(self._low[block])
            bits.view(torch.float32).copy_(self._weights[block])
            bits.add_(lower)
        found = self._exceptions().within(part)
        master.numpy().view(np.int32)[found.positions - part.start] = found.bits
        if part.start >= self._encoded:
            self._take_over(part, master)

    def _take_over(self, part: slice, master: torch.Tensor) -> None:
        for index in self.changed:
            begin, end = max(part.start, self._parts[index].start), min(part.stop, self._parts[index].stop)
            if begin < end:
                master[begin - part.start : end - part.start].copy_(self._weights[begin:end])

    def encode(self, part: slice, master: torch.Tensor) -> bool:
        """Store the master weights of the part that follows.

        Returns
        -------
        bool
            False if there are more exceptions by now than the record has room for: `expand` it.
        """
        import torch

        for block, bits in _cut(part, master.view(torch.int32)):
            lower, found = _differences(self._blocks, bits, self._weights[block])
            if len(found):
                self._new.append(_Exceptions(found + block.start, bits.numpy()[found]))
            self._low[block].copy_(lower)  # last, for it may be where the master weights are
        self._encoded = part.stop
        return sum(len(exceptions.positions) for exceptions in self._new) <= self.form.capacity

    def close(self) -> None:
        """Make the record whole, when its last part is encoded."""
        tail, all_of_it = self._tail, self._exceptions()
        count = len(all_of_it.positions)
        tail.clear()
        tail.count[0] = count
        tail.positions[:count], tail.bits[:count] = all_of_it.positions, all_of_it.bits
        tail.checksums[:] = checksums(self.form, self._weights)

    def expand(self, record: memoryview) -> None:
        """Make it plain, in place.

        Parameters
        ----------
        record : memoryview
            The same memory, and more of it.
        """
        master = plain_master(self.form, record)
        blocks = list(_cut(slice(0, self.form.numel), master))
        for block, part in reversed(blocks):  # the low halves of those before it end where it begins
            self.decode(block, part)

    def _exceptions(self) -> _Exceptions:
        """Of what is encoded anew, and of the rest."""
        return _Exceptions.joined([*self._new, self._old.within(slice(self._encoded, self.form.numel))])


def shorten(form: SplitForm, record: memoryview, weights: torch.Tensor) -> bool:
    """Encode a plain record in place.

    Parameters
    ----------
    form : SplitForm
        Of the record.
    record : memoryview
        A plain one; what it has too much afterwards is undefined.
    weights : torch.Tensor
        The 16-bit weights in host memory, bf16 of shape ``(numel,)``.

    Returns
    -------
    bool
        False if it has more exceptions than there is room for: nothing was changed.
    """
    import torch

    blocks, master = _blocks(), plain_master(form, record)
    parts = list(_cut(slice(0, form.numel), master))
    found = (len(_differences(blocks, part.view(torch.int32), weights[block])[1]) for block, part in parts)
    if sum(found) > form.capacity:
        return False
    short = SplitRecord(form, record, weights, new=True)
    for block, part in parts:
        short.encode(block, part)
    short.close()
    return True


@dataclass
class _Blocks:
    """Memory for one block."""

    wide: torch.Tensor
    """Rows of it are compared whole."""
    narrow: torch.Tensor


@cache
def _blocks() -> _Blocks:
    import torch

    return _Blocks(torch.empty(BLOCK_ITEMS, dtype=torch.int32), torch.empty(BLOCK_ITEMS, dtype=torch.int16))


def _differences(blocks: _Blocks, bits: torch.Tensor, upper: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
    """What the low halves of a block are, and where they do not tell all."""
    import torch

    wide, narrow = blocks.wide[: len(bits)], blocks.narrow[: len(bits)]
    wide.view(torch.float32).copy_(upper)
    torch.sub(bits, wide, out=wide)
    narrow.copy_(wide)
    return narrow, _not_in_16_bits(blocks.wide, len(bits)).numpy()


def _not_in_16_bits(items: torch.Tensor, count: int) -> torch.Tensor:
    """Which of the first items do not fit, ascending. They are rare: most rows of a block are only compared."""
    rows = items[: round_up(count, ROW_ITEMS)].view(-1, ROW_ITEMS)
    items[count : rows.numel()] = 0
    odd = ((rows.amax(1) >= 2**15) | (rows.amin(1) < -(2**15))).nonzero().flatten()
    inside = rows[odd]
    row, column = ((inside >= 2**15) | (inside < -(2**15))).nonzero(as_tuple=True)
    return odd[row] * ROW_ITEMS + column


def _cut(part: slice, items: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """The blocks of a part, and what of its items is in each."""
    begins = range(part.start, part.stop, BLOCK_ITEMS)
    blocks = [slice(begin, min(part.stop, begin + BLOCK_ITEMS)) for begin in begins]
    return zip(blocks, cast(Any, items).split(BLOCK_ITEMS), strict=True)


@dataclass(frozen=True)
class _Exceptions:
    """Positions, ascending, and what is there."""

    positions: np.ndarray
    bits: np.ndarray

    @classmethod
    def none(cls) -> _Exceptions:
        return cls(np.empty(0, np.int64), np.empty(0, np.int32))

    @classmethod
    def joined(cls, some: Sequence[_Exceptions]) -> _Exceptions:
        return cls(np.concatenate([each.positions for each in some]), np.concatenate([each.bits for each in some]))

    def within(self, part: slice) -> _Exceptions:
        begin, end = np.searchsorted(self.positions, (part.start, part.stop))
        return _Exceptions(self.positions[begin:end], self.bits[begin:end])


class _Tail:
    """Views of what follows the low halves."""

    def __init__(self, form: SplitForm, record: memoryview) -> None:
        def view(kind: type[np.generic], count: int, offset: int) -> np.ndarray:
            return np.frombuffer(record, kind, count, offset)

        num_pieces, capacity, begin = len(form.pieces), form.capacity, form.tail_offset
        low_end = form.master_offset + form.numel * LOW_BYTES
        self._all = view(np.uint8, form.nbytes - low_end, low_end)
        self.count = view(np.int64, 1, begin)
        self.checksums = view(np.uint64, num_pieces, begin + 8)
        self.positions = view(np.int64, capacity, begin + 8 * (1 + num_pieces))
        self.bits = view(np.int32, capacity, begin + 8 * (1 + num_pieces + capacity))

    def exceptions(self) -> _Exceptions:
        count = int(self.count[0])
        return _Exceptions(self.positions[:count].copy(), self.bits[:count].copy())

    def clear(self) -> None:
        """Padding too, so that equal state is equal bytes."""
        self._all[:] = 0


def _low(form: SplitForm, record: memoryview) -> torch.Tensor:
    import torch

    return torch.frombuffer(record, dtype=torch.int16, count=form.numel, offset=form.master_offset)


def stamps(form: SplitForm, record: memoryview) -> list[int]:
    """The checksums of 16-bit weights that a short record has."""
    return [int(checksum) for checksum in _Tail(form, record).checksums]


def checksums(form: SplitForm, weights: torch.Tensor) -> list[int]:
    """One of the 16-bit weights of each parameter."""
    import torch

    items = weights.view(torch.int16).numpy()
    return [xxhash.xxh3_64_intdigest(cast(Any, items[part])) for part in _parts(form)]


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


def tail_exceptions(form: SplitForm, tail: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions and bits of the exceptions, from the bytes of a short record from `SplitForm.tail_offset` on."""
    first = 8 * (1 + len(form.pieces))
    count = int(tail[:8].view(np.int64)[0])
    bits_at = first + 8 * form.capacity
    return tail[first : first + 8 * count].view(np.int64), tail[bits_at : bits_at + 4 * count].view(np.int32)


def rebuild(weights: np.ndarray, low: np.ndarray, positions: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """Master weights of a range, without torch.

    Parameters
    ----------
    weights, low : np.ndarray
        Bits of the bf16 weights and the low halves, int16 of shape ``(n,)``.
    positions, bits : np.ndarray
        Exceptions, positions counted from the first item of the range; others are left out.

    Returns
    -------
    np.ndarray
        fp32 of shape ``(n,)``.
    """
    items: np.ndarray = (weights.astype(np.int32) << 16) + low
    inside = (positions >= 0) & (positions < len(items))
    items[positions[inside]] = bits[inside]
    return items.view(np.float32)
