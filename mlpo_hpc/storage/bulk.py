"""Whole state in one HDF5 file, by parameter name: moved by hyperslabs, all ranks together.

::

    /                          attributes: what this is, versions
    /state/<name>/<vector>     fp32, in the shape of the parameter; attributes of the group: step counts and the like

A rank's part of a flattened parameter is a few boxes of it. With parallel HDF5 every rank takes
part in every call, if need be with nothing; with serial h5py each rank opens the file by itself:
to read by HDF5, to write at the offsets of the datasets, which are contiguous.
"""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mlpo_hpc import __version__
from mlpo_hpc.errors import ConfigError, here, storage_error
from mlpo_hpc.storage.base import round_up
from mlpo_hpc.storage.filesystem import describe
from mlpo_hpc.storage.hdf5 import locking, translated
from mlpo_hpc.storage.posix import sync

if TYPE_CHECKING:
    import h5py
    from mpi4py import MPI

FORMAT = "mlpo_hpc whole state"
FORMAT_VERSION = 1
MAX_CALL_BYTES = 2**30
PAGE_BYTES = 65536
"""The largest page of the machines in use."""
ITEM = np.dtype("<f4")


@dataclass(frozen=True)
class Box:
    """A block of an array, and which of its items in flat order it is (contiguous there)."""

    start: tuple[int, ...]
    count: tuple[int, ...]
    first: int

    @property
    def numel(self) -> int:
        """Items in it."""
        return math.prod(self.count)


def boxes(shape: Sequence[int], first: int, numel: int, most: int = MAX_CALL_BYTES // ITEM.itemsize) -> Iterator[Box]:
    """Cut a range of a flattened array into blocks, none of more than `most` items.

    Parameters
    ----------
    shape : sequence of int
        Of the array; ``()`` for a single number.
    first, numel : int
        The range, counted row by row.
    most : int
        Largest block.
    """
    if not shape:
        yield from [Box((), (), 0)] if numel else []
        return
    end = first + numel
    while first < end:
        yield (box := _largest_box(shape, first, min(end - first, most)))
        first += box.numel


def _largest_box(shape: Sequence[int], first: int, most: int) -> Box:
    """The largest block that begins at an item: along the outermost axis on which it may grow."""
    start = [int(index) for index in np.unravel_index(first, shape)]
    axis, below = len(shape) - 1, 1
    while axis > 0 and start[axis] == 0 and below * shape[axis] <= most:
        below *= shape[axis]
        axis -= 1
    grown = min(shape[axis] - start[axis], most // below)
    count = [1] * axis + [grown, *shape[axis + 1 :]]
    return Box(tuple(start), tuple(count), first)


@dataclass(frozen=True)
class Parameter:
    """What the file holds of a parameter."""

    shape: tuple[int, ...]
    vectors: tuple[str, ...]
    scalars: Mapping[str, float]


def create(path: str, parameters: Mapping[str, Parameter], comm: MPI.Intracomm | None = None) -> None:
    """Collective over `comm`, if there is one. Lay out a file of whole state.

    Raises
    ------
    StorageError
        If it cannot be made.
    """
    with translated("creating a state file", path), _open(path, "w", comm) as file:
        file.attrs.update({"format": FORMAT, "format_version": FORMAT_VERSION, "library_version": __version__})
        for name, parameter in parameters.items():
            group = file.require_group(f"state/{name}")
            group.attrs.update(parameter.scalars)
            for vector in parameter.vectors:
                _allocate(group, vector, parameter.shape)


def _open(path: str, mode: str, comm: MPI.Intracomm | None) -> h5py.File:
    parallel = {} if comm is None else {"driver": "mpio", "comm": comm}
    import h5py

    return h5py.File(path, mode, **locking(), **parallel)


def _allocate(group: h5py.Group, name: str, shape: tuple[int, ...]) -> None:
    """Contiguous, in place before anything is written."""
    import h5py

    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    space = h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)
    h5py.h5d.create(group.id, name.encode(), h5py.h5t.IEEE_F32LE, space, dcpl=properties)


class SlabFile:
    """A file of whole state, moved by hyperslabs. All methods are collective over `comm`, if there is one.

    Parameters
    ----------
    path : str
        Of the file.
    writes : bool
        Whether to open it for writing too.
    comm : MPI.Intracomm, optional
        The ranks that move data together, with parallel HDF5. Without: this rank alone.
    collective : bool
        With `comm`: whether MPI-IO gathers the ranks' pieces, or each rank moves its own.

    Raises
    ------
    StorageError
        If it cannot be opened.
    ConfigError
        If it is another file, or of another format.
    """

    def __init__(
        self, path: str, writes: bool = False, comm: MPI.Intracomm | None = None, collective: bool = False
    ) -> None:
        self.path = path
        self._writes = writes
        with translated("opening a state file", path):
            self._file = _open(path, "r+" if writes else "r", comm)
        import h5py

        self._transfer = h5py.h5p.create(h5py.h5p.DATASET_XFER)
        if comm is not None:
            mode = h5py.h5fd.MPIO_COLLECTIVE if collective else h5py.h5fd.MPIO_INDEPENDENT
            self._transfer.set_dxpl_mpio(mode)
        _check_format(self._file, path)

    def parameters(self) -> dict[str, Parameter]:
        """What is in the file."""
        import h5py

        found: dict[str, Parameter] = {}

        def note(name: str, item: Any) -> None:
            if isinstance(item, h5py.Dataset):
                name, _, vector = name.rpartition("/")
                before = found.get(name, Parameter(item.shape, (), {}))
                scalars = {key: float(value) for key, value in item.parent.attrs.items()}
                found[name] = Parameter(item.shape, (*before.vectors, vector), scalars)

        self._file["state"].visititems(note)
        return found

    def write(self, name: str, vector: str, box: Box | None, values: np.ndarray | None) -> None:
        """Write a block; None takes part with nothing.

        Raises
        ------
        StorageError
            If it cannot be written.
        """
        self._move("write", f"state/{name}/{vector}", box, values)

    def read(self, name: str, vector: str, box: Box | None, values: np.ndarray | None) -> None:
        """Read a block into `values`; None takes part with nothing.

        Raises
        ------
        StorageError
            If it cannot be read.
        """
        self._move("read", f"state/{name}/{vector}", box, values)

    def _move(self, call: str, name: str, box: Box | None, values: np.ndarray | None) -> None:
        import h5py

        with translated(f"{'writing' if call == 'write' else 'reading'} {name}", self.path):
            dataset = self._file[name].id
            space, memory = dataset.get_space(), h5py.h5s.create_simple((1 if box is None else box.numel,))
            if box is None:
                space.select_none()
                memory.select_none()
            elif box.start:
                space.select_hyperslab(box.start, box.count)
            values = np.empty(1, ITEM) if values is None else values
            getattr(dataset, call)(memory, space, values, dxpl=self._transfer)

    def close(self) -> None:
        """Close the file; what was written is on the device then.

        Raises
        ------
        StorageError
            If it is not.
        """
        with translated("closing a state file", self.path):
            self._file.close()
        if self._writes:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                sync(fd, self.path)
            finally:
                os.close(fd)


class OffsetFile:
    """A file of whole state to which each rank writes by itself, at the offsets of its datasets.

    Parameters
    ----------
    path : str
        Of a file that was created.

    Raises
    ------
    StorageError
        If it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._offsets: dict[str, int] = {}
        with translated("opening a state file", path):
            with _open(path, "r", None) as file:
                file.visititems(self._note)
            # NFS clients write whole pages back: a locked range is theirs alone, neighbours in a page included.
            self._locks = describe(path).type.startswith("nfs")
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def _note(self, name: str, item: Any) -> None:
        import h5py

        if isinstance(item, h5py.Dataset):
            self._offsets[name] = item.id.get_offset()

    def write(self, name: str, vector: str, box: Box | None, values: np.ndarray | None) -> None:
        """Write a block; None does nothing.

        Raises
        ------
        StorageError
            If it cannot be written.
        """
        if box is None or values is None:
            return
        offset = self._offsets[f"state/{name}/{vector}"] + box.first * ITEM.itemsize
        view = values.reshape(-1).view(np.uint8).data
        while view.nbytes:
            try:
                with self._locked(offset, min(view.nbytes, MAX_CALL_BYTES)):
                    done = os.pwrite(self._fd, view[:MAX_CALL_BYTES], offset)
            except OSError as error:
                raise storage_error(f"writing state at byte {offset}", self.path, error) from error
            view, offset = view[done:], offset + done

    @contextmanager
    def _locked(self, offset: int, size_bytes: int) -> Iterator[None]:
        """Collides with nobody on the pages of a range; releasing the lock sends them."""
        if not self._locks:
            yield
            return
        first = offset - offset % PAGE_BYTES
        length = round_up(offset + size_bytes, PAGE_BYTES) - first
        fcntl.lockf(self._fd, fcntl.LOCK_EX, length, first)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, length, first)

    def close(self) -> None:
        """Close the file; what was written is on the device then.

        Raises
        ------
        StorageError
            If it is not.
        """
        fd, self._fd = self._fd, -1
        try:
            sync(fd, self.path)
        finally:
            os.close(fd)


def _check_format(file: h5py.File, path: str) -> None:
    found = file.attrs.get("format"), int(file.attrs.get("format_version", 0))
    if found != (FORMAT, FORMAT_VERSION):
        file.close()
        raise ConfigError(
            f"{here(path)} is no file of whole state in format {FORMAT_VERSION}, which this library reads: it says "
            f"{found[0]!r}, format {found[1]}"
        )
