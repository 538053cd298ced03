"""Whether the parts of a checkpoint fit together, without reading its chunks: what is missing, too short, or twice."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mlpo_hpc.checkpoint.documents import read_manifest, read_shard
from mlpo_hpc.checkpoint.files import open_file
from mlpo_hpc.checkpoint.manifest import MANIFEST, Chunk, Manifest, PieceEntry, RecordEntry, Shard
from mlpo_hpc.checkpoint.read import WEIGHT_BYTES, form_of, sizes
from mlpo_hpc.checkpoint.tensors_file import Tensor, read_header
from mlpo_hpc.errors import ConfigError, StorageError, here
from mlpo_hpc.state.codec.fp32 import ITEM_BYTES, stride_items
from mlpo_hpc.state.codec.split import LOW_BYTES, SplitForm


@dataclass(frozen=True)
class Fault:
    """Something wrong with a checkpoint.

    Parameters
    ----------
    file : str
        Of the checkpoint, where it was found.
    text : str
        What, and where, for people.
    parameters : tuple of str
        Of which something is lost.
    """

    file: str
    text: str
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Extent:
    """Bytes of a checkpoint that have one checksum, and parameters with something in them."""

    chunk: Chunk
    parameters: tuple[str, ...]


@dataclass
class Outline:
    """What a checkpoint says of itself, as far as it can be understood."""

    folder: Path
    manifest: Manifest | None = None
    shards: list[Shard] = field(default_factory=list)
    extents: dict[str, list[Extent]] = field(default_factory=dict)
    """What is to be read of each file; those that are missing or too short are not there."""
    faults: list[Fault] = field(default_factory=list)

    @property
    def num_items(self) -> int:
        """Items of all trained parameters."""
        return sum(piece.numel for shard in self.shards for piece in shard.pieces)

    @property
    def nbytes(self) -> int:
        """Bytes of all that is to be read."""
        return sum(extent.chunk.nbytes for extents in self.extents.values() for extent in extents)


def outline(folder: Path) -> Outline:
    """Look at manifest, shards and the sizes of files.

    Parameters
    ----------
    folder : Path
        ``DIR/TAG``.
    """
    found = Outline(folder)
    try:
        found.manifest = read_manifest(folder)
    except (StorageError, ConfigError) as error:
        found.faults.append(Fault(MANIFEST, str(error)))
        return found
    for rank in range(found.manifest.world_size):
        try:
            found.shards.append(read_shard(folder, found.manifest, rank))
        except StorageError as error:
            found.faults.append(Fault(found.manifest.shards[rank].file, str(error)))
    for shard in found.shards:
        found.faults += _shard_faults(folder, found.manifest, shard)
        for extent in _extents(found.manifest, shard):
            found.extents.setdefault(extent.chunk.file, []).append(extent)
    found.faults += _coverage_faults(folder, found.shards)
    for name, extents in list(found.extents.items()):
        if fault := _file_fault(folder, name, extents):
            found.faults.append(fault)
            del found.extents[name]
    found.faults += _frozen_faults(found, found.manifest)
    return found


# ---- one shard ------------------------------------------------------------------------------


def _shard_faults(folder: Path, manifest: Manifest, shard: Shard) -> Iterator[Fault]:
    """Records of another size than their kind has, pieces that are not in one."""
    file = manifest.shards[shard.rank].file
    by_subgroup = _by_subgroup(shard)
    for subgroup, pieces in by_subgroup.items():
        names = tuple(piece.name for piece in pieces)
        if subgroup >= len(shard.records):
            yield Fault(file, f"subgroup {subgroup} has no record: {here(folder / file)}", names)
            continue
        for text in _record_faults(shard.records[subgroup], pieces, manifest):
            yield Fault(file, f"subgroup {subgroup}: {text}: {here(folder / file)}", names)


def _record_faults(record: RecordEntry, pieces: Sequence[PieceEntry], manifest: Manifest) -> Iterator[str]:
    there = sum(chunk.nbytes for chunk in record.chunks)
    if record.nbytes not in sizes(record):
        yield f"a record of {record.nbytes} bytes, which can have {sorted(sizes(record))}"
    if there != record.nbytes:
        yield f"chunks of {there} bytes for a record of {record.nbytes}"
    wanted = record.numel * WEIGHT_BYTES[manifest.weight_type]
    if sum(chunk.nbytes for chunk in record.weights) != wanted:
        yield f"{sum(chunk.nbytes for chunk in record.weights)} bytes of 16-bit weights instead of {wanted}"
    if record.split and sum(record.pieces) != record.numel:
        yield f"parts of {sum(record.pieces)} items in a record of {record.numel}"
    spans = sorted((piece.begin, piece.begin + piece.numel) for piece in pieces if piece.numel)
    ends_at = spans[-1][1] if spans else 0
    if any(end > begin for (_, end), (begin, _) in itertools.pairwise(spans)) or ends_at > record.numel:
        yield f"parameters overlap in the record, or are beyond its {record.numel} items"


def _by_subgroup(shard: Shard) -> dict[int, list[PieceEntry]]:
    found: dict[int, list[PieceEntry]] = {}
    for piece in shard.pieces:
        found.setdefault(piece.subgroup, []).append(piece)
    return found


# ---- all shards together --------------------------------------------------------------------


def _coverage_faults(folder: Path, shards: Sequence[Shard]) -> Iterator[Fault]:
    """Items of a parameter that are in no shard, or in two."""
    pieces: dict[str, list[PieceEntry]] = {}
    for shard in shards:
        for piece in shard.pieces:
            pieces.setdefault(piece.name, []).append(piece)
    for name, parts in pieces.items():
        if len({part.shape for part in parts}) > 1:
            yield Fault(MANIFEST, f"the ranks give {name} different shapes: {here(folder)}", (name,))
            continue
        at = 0
        for part in sorted((part for part in parts if part.numel), key=lambda part: part.first):
            if part.first != at:
                yield _hole(folder, name, at, part.first)
            at = part.first + part.numel
        if at != math.prod(parts[0].shape):
            yield _hole(folder, name, at, math.prod(parts[0].shape))


def _hole(folder: Path, name: str, at: int, found: int) -> Fault:
    what = "are in no shard" if found > at else "are there twice, or beyond its end"
    text = f"items {min(at, found)} to {max(at, found) - 1} of {name} {what}: {here(folder)}"
    return Fault(MANIFEST, text, (name,))


def _frozen_faults(found: Outline, manifest: Manifest) -> Iterator[Fault]:
    """Partitions of frozen parameters that are missing, or of unequal size."""
    headers: list[dict[str, Tensor]] = []
    for shard in found.shards if manifest.frozen else ():
        if shard.tensors.file in found.extents:
            try:
                headers.append(read_header(found.folder / shard.tensors.file))
            except StorageError as error:
                yield Fault(shard.tensors.file, str(error), tuple(entry.name for entry in manifest.frozen))
    for entry in manifest.frozen:
        parts = [header[f"frozen/{entry.name}"] for header in headers if f"frozen/{entry.name}" in header]
        kinds = {(part.dtype, part.numel) for part in parts}
        items = sum(part.numel for part in parts)
        if len(parts) < manifest.world_size or len(kinds) > 1 or items < math.prod(entry.shape):
            text = f"the ranks have {items} items of {entry.name} in {len(parts)} partitions, {math.prod(entry.shape)} "
            yield Fault(MANIFEST, f"{text}are wanted in {manifest.world_size}: {here(found.folder)}", (entry.name,))


# ---- bytes ----------------------------------------------------------------------------------


def _extents(manifest: Manifest, shard: Shard) -> Iterator[Extent]:
    """All that has a checksum in what a shard refers to."""
    by_subgroup, weight_bytes = _by_subgroup(shard), WEIGHT_BYTES[manifest.weight_type]
    for subgroup, record in enumerate(shard.records):
        pieces = by_subgroup.get(subgroup, [])
        yield from _of_chunks(record.chunks, pieces, _vectors(record), _tail_offset(record))
        yield from _of_chunks(record.weights, pieces, [(0, weight_bytes)], record.numel * weight_bytes)
    names = tuple(entry.name for entry in manifest.frozen)
    yield Extent(Chunk(offset=0, **shard.tensors.model_dump()), names)


def _of_chunks(
    chunks: Sequence[Chunk], pieces: Sequence[PieceEntry], vectors: Sequence[tuple[int, int]], tail: int
) -> Iterator[Extent]:
    """What of the bytes of a record is in which chunk; all its parameters need what is after `tail`."""
    begin = 0
    for chunk in chunks:
        end = begin + chunk.nbytes
        all_names = [piece.name for piece in pieces if piece.numel]
        yield Extent(chunk, tuple(all_names if end > tail else _parameters_in(pieces, vectors, begin, end)))
        begin = end


def _short_form(record: RecordEntry) -> SplitForm | None:
    form = form_of(record)
    return form if form is not None and record.nbytes == form.nbytes else None


def _tail_offset(record: RecordEntry) -> int:
    """Where the exceptions of a short record begin; other records have none."""
    form = _short_form(record)
    return record.nbytes if form is None else form.tail_offset


def _vectors(record: RecordEntry) -> list[tuple[int, int]]:
    """Where each vector of a record begins, and bytes of its items."""
    stride_bytes = stride_items(record.numel) * ITEM_BYTES
    whole = [(number * stride_bytes, ITEM_BYTES) for number in range(len(record.vectors))]
    return [*whole, (len(whole) * stride_bytes, LOW_BYTES if _short_form(record) else ITEM_BYTES)]


def _parameters_in(pieces: Sequence[PieceEntry], vectors: Sequence[tuple[int, int]], begin: int, end: int) -> list[str]:
    """Parameters with items in a range of bytes; none where it is padding."""
    found: dict[str, None] = {}
    for offset, item_bytes in vectors:
        first, last = (begin - offset) // item_bytes, -(-(end - offset) // item_bytes)
        inside = (piece for piece in pieces if max(first, piece.begin) < min(last, piece.begin + piece.numel))
        found |= {piece.name: None for piece in inside}
    return list(found)


def _file_fault(folder: Path, name: str, extents: Sequence[Extent]) -> Fault | None:
    """A file that is missing, or shorter than what is referred to."""
    parameters = tuple(dict.fromkeys(each for extent in extents for each in extent.parameters))
    wanted = max(extent.chunk.offset + extent.chunk.nbytes for extent in extents)
    try:
        fd = open_file(folder / name)
    except StorageError as error:
        return Fault(name, str(error), parameters)
    try:
        there = os.fstat(fd).st_size
    finally:
        os.close(fd)
    if there >= wanted:
        return None
    lost = (extent.parameters for extent in extents if extent.chunk.offset + extent.chunk.nbytes > there)
    parameters = tuple(dict.fromkeys(each for some in lost for each in some))
    return Fault(name, f"the file has {there} bytes of {wanted}: {here(folder / name)}", parameters)
