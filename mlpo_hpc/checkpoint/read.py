"""Read what is in a checkpoint, by parameter and item: of any rank, on any number of ranks, in bounded memory."""

from __future__ import annotations

import bisect
import itertools
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import xxhash

from mlpo_hpc.checkpoint.documents import read_manifest, read_shard
from mlpo_hpc.checkpoint.files import open_file
from mlpo_hpc.checkpoint.manifest import Chunk, Manifest, PieceEntry, RecordEntry, Shard
from mlpo_hpc.errors import CorruptState, here, storage_error
from mlpo_hpc.state.codec.fp32 import ITEM_BYTES, record_bytes, stride_items
from mlpo_hpc.state.codec.split import LOW_BYTES, SplitForm, rebuild, tail_exceptions

MASTER = "fp32"
"""The master weights, as DeepSpeed's checkpoints call them."""
WEIGHT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
CACHE_BYTES = 2**28
"""Chunks that are kept in memory after they were read, for what is read next to them."""

MAX_OPEN_FILES = 128


@dataclass(frozen=True)
class Source:
    """Where a piece of a parameter is."""

    rank: int
    piece: PieceEntry


class Reader:
    """One committed checkpoint.

    Parameters
    ----------
    folder : Path
        ``DIR/TAG``.
    cache_bytes : int
        Memory for chunks.

    Raises
    ------
    CorruptState
        If its manifest or a shard is missing or damaged.
    ConfigError
        If a newer version of this library wrote it.
    """

    def __init__(self, folder: Path, cache_bytes: int = CACHE_BYTES) -> None:
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        self._cache = _Chunks(folder, cache_bytes)
        self._tails: OrderedDict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = OrderedDict()

    @cached_property
    def shards(self) -> list[Shard]:
        """Of all ranks."""
        return [read_shard(self.folder, self.manifest, rank) for rank in range(self.manifest.world_size)]

    @cached_property
    def parameters(self) -> dict[str, list[Source]]:
        """The pieces of each trained parameter, ascending, without empty ones."""
        found: dict[str, list[Source]] = {}
        for shard in self.shards:
            for piece in shard.pieces:
                sources = found.setdefault(piece.name, [])
                if piece.numel:
                    sources.append(Source(shard.rank, piece))
        for sources in found.values():
            sources.sort(key=lambda source: source.piece.first)
        return found

    def vectors(self, name: str) -> tuple[str, ...]:
        """State vectors of a parameter, without the master weights."""
        source = self._first(name)
        return self.shards[source.rank].records[source.piece.subgroup].vectors

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a parameter."""
        return self._first(name).piece.shape

    def scalars(self, name: str) -> dict[str, int | float] | None:
        """State of a parameter that is not a vector."""
        source = self._first(name)
        return self.shards[source.rank].records[source.piece.subgroup].scalars

    def _first(self, name: str) -> Source:
        sources = self.parameters[name]
        if sources:
            return sources[0]
        piece, rank = next((p, s.rank) for s in self.shards for p in s.pieces if p.name == name)
        return Source(rank, piece)  # a parameter without items

    def values(self, name: str, vector: str, first: int, numel: int) -> np.ndarray:
        """Items of a vector of a parameter, fp32 of shape ``(numel,)``, in row-major order.

        Parameters
        ----------
        name : str
            Of the parameter.
        vector : str
            ``fp32`` or one of `vectors`.
        first, numel : int
            Which items.

        Raises
        ------
        CorruptState
            If what is read is not what was saved, naming file and parameter; or if items are missing.
        """
        result, filled = np.empty(numel, np.float32), 0
        for source, begin, count, at in self._overlaps(name, first, numel):
            result[at : at + count] = self._read(source, vector, begin, count)
            filled += count
        self._check(filled == numel, f"{numel - filled} items of {name}")
        return result

    def weights(self, name: str, first: int, numel: int) -> np.ndarray:
        """Items of the 16-bit weights of a parameter, as bytes of shape ``(numel, itemsize)``."""
        size = WEIGHT_BYTES[self.manifest.weight_type]
        result, filled = np.empty((numel, size), np.uint8), 0
        for source, begin, count, at in self._overlaps(name, first, numel):
            chunks = self.shards[source.rank].records[source.piece.subgroup].weights
            data = self._cache.read(chunks, begin * size, count * size, name)
            result[at : at + count] = data.reshape(count, size)
            filled += count
        self._check(filled == numel, f"{numel - filled} weights of {name}")
        return result

    def _check(self, good: bool, what: str) -> None:
        if not good:
            raise CorruptState(f"the checkpoint lacks {what}: {here(self.folder)}")

    def _overlaps(self, name: str, first: int, numel: int) -> Iterator[tuple[Source, int, int, int]]:
        """Pieces that have a part of some items: the piece, first item in its record, how many, place in the result."""
        sources = self.parameters[name]
        ends = [source.piece.first + source.piece.numel for source in sources]
        for source in sources[bisect.bisect_right(ends, first) :]:
            piece = source.piece
            begin, end = max(first, piece.first), min(first + numel, piece.first + piece.numel)
            if begin >= end:
                return
            yield source, piece.begin + begin - piece.first, end - begin, begin - first

    def _read(self, source: Source, vector: str, begin: int, count: int) -> np.ndarray:
        record, name = self.shards[source.rank].records[source.piece.subgroup], source.piece.name
        form = form_of(record)
        if vector != MASTER or form is None or record.nbytes != form.nbytes:
            offset = (_order(record).index(vector) * stride_items(record.numel) + begin) * ITEM_BYTES
            return self._cache.read(record.chunks, offset, count * ITEM_BYTES, name).view(np.float32)
        weights = self._cache.read(record.weights, begin * LOW_BYTES, count * LOW_BYTES, name).view(np.int16)
        if _was_changed(record, source.piece):
            return rebuild(weights, np.zeros_like(weights), np.empty(0, np.int64), np.empty(0, np.int32))
        low = self._cache.read(record.chunks, form.master_offset + begin * LOW_BYTES, count * LOW_BYTES, name)
        positions, bits = self._tail(source, record, form)
        return rebuild(weights, low.view(np.int16), positions - begin, bits)

    def _tail(self, source: Source, record: RecordEntry, form: SplitForm) -> tuple[np.ndarray, np.ndarray]:
        """Positions and bits of a short record's exceptions."""
        key = (source.rank, source.piece.subgroup)
        if key not in self._tails:
            offset = form.tail_offset
            data = self._cache.read(record.chunks, offset, form.nbytes - offset, source.piece.name)
            self._tails[key] = tail_exceptions(form, data)
            if len(self._tails) > 4 * self.manifest.world_size:
                self._tails.popitem(last=False)
        return self._tails[key]

    def close(self) -> None:
        """Close all files."""
        self._cache.close()


def form_of(record: RecordEntry) -> SplitForm | None:
    """How a record for codec ``split`` is made up; None for one of ``fp32``."""
    return SplitForm(record.numel, len(record.vectors), record.pieces) if record.split else None


def _was_changed(record: RecordEntry, piece: PieceEntry) -> bool:
    """Whether others changed its 16-bit weights since the record was made."""
    begins = list(itertools.accumulate(record.pieces, initial=0))
    return bool(record.changed) and bisect.bisect_right(begins, piece.begin) - 1 in record.changed


def _order(record: RecordEntry) -> tuple[str, ...]:
    """Vectors of a record that is stored as it is used."""
    return (*record.vectors, MASTER) if record.split else (MASTER, *record.vectors)


def sizes(record: RecordEntry) -> set[int]:
    """Bytes that a record of this kind may have."""
    form = form_of(record)
    plain = record_bytes(record.numel, 1 + len(record.vectors))
    return {plain} if form is None else {form.nbytes, form.plain_bytes}


class _Chunks:
    """Chunks of a checkpoint, each checked when it is read; the last ones used are kept."""

    def __init__(self, folder: Path, cache_bytes: int) -> None:
        self._folder = folder
        self._cache_bytes = cache_bytes
        self._kept: OrderedDict[tuple[str, int], np.ndarray] = OrderedDict()
        self._kept_bytes = 0
        self._fds: OrderedDict[str, int] = OrderedDict()

    def read(self, chunks: Sequence[Chunk], offset: int, nbytes: int, name: str) -> np.ndarray:
        """Bytes of what the chunks are together, of shape ``(nbytes,)``."""
        begins = list(itertools.accumulate((chunk.nbytes for chunk in chunks), initial=0))
        if offset + nbytes > begins[-1]:
            raise CorruptState(f"a shard of the checkpoint has too few bytes of {name}: {here(self._folder)}")
        result = np.empty(nbytes, np.uint8)
        done = 0
        index = bisect.bisect_right(begins, offset) - 1
        while done < nbytes:
            inside = offset + done - begins[index]
            data = self._chunk(chunks[index], name)[inside : inside + nbytes - done]
            result[done : done + len(data)] = data
            done, index = done + len(data), index + 1
        return result

    def _chunk(self, chunk: Chunk, name: str) -> np.ndarray:
        key = (chunk.file, chunk.offset)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        data = self._load(chunk, name)
        self._kept[key] = data
        self._kept_bytes += chunk.nbytes
        while self._kept_bytes > self._cache_bytes and len(self._kept) > 1:
            self._kept_bytes -= len(self._kept.popitem(last=False)[1])
        return data

    def _load(self, chunk: Chunk, name: str) -> np.ndarray:
        path = self._folder / chunk.file
        fd = self._open(chunk.file)
        data, done = np.empty(chunk.nbytes, np.uint8), 0
        view = memoryview(data.data)
        while done < chunk.nbytes:
            try:
                moved = os.preadv(fd, [view[done:]], chunk.offset + done)
            except OSError as error:
                raise storage_error(f"reading {name}", str(path), error) from error
            if not moved:
                raise CorruptState(f"the file ends before the state of {name}: {here(path)}")
            done += moved
        found = xxhash.xxh3_64_hexdigest(view)
        if found != chunk.checksum:
            raise CorruptState(
                f"{name} is not what was saved: checksum {found} instead of {chunk.checksum}, bytes {chunk.offset} to "
                f"{chunk.offset + chunk.nbytes} of {here(path)}. Load an older checkpoint"
            )
        return data

    def _open(self, name: str) -> int:
        """The file; of thousands of ranks only those used last stay open."""
        if name not in self._fds:
            self._fds[name] = open_file(self._folder / name)
            if len(self._fds) > MAX_OPEN_FILES:
                os.close(self._fds.popitem(last=False)[1])
        self._fds.move_to_end(name)
        return self._fds[name]

    def close(self) -> None:
        fds, self._fds = self._fds, OrderedDict()
        self._kept.clear()
        for fd in fds.values():
            os.close(fd)
