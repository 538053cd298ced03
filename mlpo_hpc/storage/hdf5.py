"""Container ``hdf5``: one file per node that any HDF5 tool can read.

HDF5 lays the file out once and closes it; from then on bytes move to the offsets of its datasets
by a transport, and nothing of HDF5's own is ever changed. So a kill at any moment leaves a
readable file. Format 1::

    /                            attributes: what this is, which job, codec, versions
    /parameters/<name>           a row for each rank's piece: rank, subgroup, begin, first, numel; attribute shape
    /ranks/<world rank>/records  a row for each subgroup: numel, stride, names of its vectors
    /ranks/<world rank>/slots    (slots, items or bytes), contiguous
    /ranks/<world rank>/index    two copies, see `storage.index`; the valid one with the higher generation counts
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mlpo_hpc.errors import ConfigError, MlpoError, StorageError, here, storage_error
from mlpo_hpc.storage.base import ALIGNMENT_BYTES
from mlpo_hpc.storage.contents import Contents
from mlpo_hpc.storage.index import COPIES, index_type

if TYPE_CHECKING:
    import h5py
    from mpi4py import MPI

FORMAT = "mlpo_hpc state"
FORMAT_VERSION = 1

PIECE = np.dtype([("rank", "<i4"), ("subgroup", "<i4"), ("begin", "<i8"), ("first", "<i8"), ("numel", "<i8")])
NAMES_BYTES = 256
RECORD = np.dtype([("numel", "<i8"), ("stride", "<i8"), ("vectors", f"S{NAMES_BYTES}")])


@dataclass(frozen=True)
class Share:
    """What one rank has in the file.

    Parameters
    ----------
    world_rank : int
        Whose.
    chunk_bytes, slot_bytes, num_slots : int
        The largest chunk, what it may take, and how many there are; may be none.
    contents : Contents
        What the slots hold.
    """

    world_rank: int
    chunk_bytes: int
    slot_bytes: int
    num_slots: int
    contents: Contents


@dataclass(frozen=True)
class Extent:
    """Where a rank's datasets lie in the file."""

    slots: int
    index: int


def lay_out(
    path: str,
    shares: Sequence[Share],
    about: Mapping[str, str | int],
    alignment_bytes: int,
    comm: MPI.Intracomm | None = None,
) -> dict[int, Extent]:
    """Collective over `comm`, if there is one. Make the file; return where each rank's slots lie.

    Parameters
    ----------
    path : str
        Nobody else's; may exist already, with the striping that it shall have.
    shares : sequence of Share
        Of all ranks, the same on all of `comm`.
    about : mapping
        Attributes of the file.
    alignment_bytes : int
        Where datasets may begin: the stripe or block of the file system.
    comm : MPI.Intracomm, optional
        Lay out together, by parallel HDF5. Without: alone.

    Raises
    ------
    StorageError
        If the file cannot be made; `TierFull` if there is no room.
    """
    with translated("laying out a state file", path), _create(path, alignment_bytes, comm) as file:
        file.attrs.update({"format": FORMAT, "format_version": FORMAT_VERSION, **about})
        writes = comm is None or comm.rank == 0
        _describe_parameters(file.create_group("parameters"), shares, writes)
        ranks = file.create_group("ranks")
        extents = {share.world_rank: _lay_out_rank(ranks, share, writes) for share in shares}
    return extents


def _create(path: str, alignment_bytes: int, comm: MPI.Intracomm | None) -> h5py.File:
    import h5py

    parallel = {"driver": "mpio", "comm": comm} if comm is not None else {}
    return h5py.File(
        path, "w", alignment_threshold=ALIGNMENT_BYTES, alignment_interval=alignment_bytes, **locking(), **parallel
    )


def locking() -> dict[str, str]:
    """Lock where the file system can. HDF5_USE_FILE_LOCKING, if it is set, goes before."""
    import h5py

    version = h5py.version.hdf5_version_tuple
    knows = version >= (1, 12, 1) or (1, 10, 7) <= version < (1, 11)
    return {"locking": "best-effort"} if knows else {}


def _describe_parameters(group: h5py.Group, shares: Sequence[Share], writes: bool) -> None:
    rows: dict[str, list[tuple[int, ...]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for share in shares:
        for piece in share.contents.pieces:
            row = (share.world_rank, piece.subgroup, piece.begin, piece.first, piece.numel)
            rows.setdefault(piece.name, []).append(row)
            shapes[piece.name] = piece.shape
    for name, found in rows.items():
        dataset = _allocate(group, name, (len(found),), PIECE)
        dataset.attrs["shape"] = np.array(shapes[name], np.int64)
        if writes:
            dataset[:] = np.array(found, PIECE)


def _lay_out_rank(ranks: h5py.Group, share: Share, writes: bool) -> Extent:
    group = ranks.create_group(str(share.world_rank))
    group.attrs["chunk_bytes"] = share.chunk_bytes
    group.attrs["codec"] = share.contents.codec
    forms = share.contents.records
    if any(len(" ".join(form.vectors)) > NAMES_BYTES for form in forms):
        raise ConfigError(f"the optimizer keeps too many vectors to be named in {NAMES_BYTES} bytes: do without 'keep'")
    if forms:
        records = _allocate(group, "records", (len(forms),), RECORD)
        if writes:
            records[:] = np.array([(f.numel, f.stride, " ".join(f.vectors)) for f in forms], RECORD)
    if not share.num_slots:
        return Extent(0, 0)
    # Readable as numbers where the codec is plain.
    item = np.dtype("<f4" if share.contents.codec == "fp32" else "u1")
    slots = _allocate(group, "slots", (share.num_slots, share.slot_bytes // item.itemsize), item)
    index = _allocate(group, "index", (COPIES,), index_type(share.num_slots))
    return Extent(slots.id.get_offset(), index.id.get_offset())


def _allocate(group: h5py.Group, name: str, shape: tuple[int, ...], kind: np.dtype[Any]) -> h5py.Dataset:
    """A contiguous dataset whose place is known now and whose bytes nobody fills."""
    import h5py

    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.CONTIGUOUS)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)  # for a name with a slash
    links.set_char_encoding(h5py.h5t.CSET_UTF8)
    space = h5py.h5s.create_simple(shape)
    kind_id = h5py.h5t.py_create(kind, logical=True)
    return h5py.Dataset(h5py.h5d.create(group.id, name.encode(), kind_id, space, dcpl=properties, lcpl=links))


def has_parallel_hdf5() -> bool:
    """Whether h5py was built with MPI."""
    import h5py

    return bool(h5py.get_config().mpi)


@contextmanager
def open_for_reading(path: str) -> Iterator[h5py.File]:
    """Open a state file that was kept.

    Raises
    ------
    ConfigError
        If it is another file, or of another format.
    StorageError
        If it cannot be opened.
    """
    import h5py

    with translated("opening a state file", path):
        file = h5py.File(path, "r", **locking())
    with file:
        found = file.attrs.get("format"), int(file.attrs.get("format_version", 0))
        if found[0] != FORMAT:
            raise ConfigError(f"{here(path)} is no state file of mlpo_hpc")
        if found[1] != FORMAT_VERSION:
            raise ConfigError(
                f"{here(path)} has format {found[1]}, this library reads {FORMAT_VERSION}: use mlpo_hpc "
                f"{file.attrs.get('library_version', 'of another version')}"
            )
        yield file


@contextmanager
def translated(action: str, path: str) -> Iterator[None]:
    """Turn what HDF5 raises into ours: several exceptions, with the number of the system's error in their text.

    Raises
    ------
    StorageError
        Saying what was done, where, and what HDF5 said.
    """
    try:
        yield
    except MlpoError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        number = re.search(r"errno ?= ?(\d+)", str(error))
        code = getattr(error, "errno", None) or (int(number.group(1)) if number else None)
        if code:
            raise storage_error(action, path, OSError(code, f"HDF5: {error}")) from error
        raise StorageError(f"{action} failed on {here(path)}: HDF5 says {error}") from error
