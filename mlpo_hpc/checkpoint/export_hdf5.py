"""The state in a checkpoint to one plain HDF5 file by parameter name, the same that a running engine saves."""

from __future__ import annotations

import math
import os
from pathlib import Path

from mlpo_hpc.checkpoint.read import MASTER, Reader
from mlpo_hpc.checkpoint.target import Told, share, whole
from mlpo_hpc.checkpoint.weights import PIECE_ITEMS
from mlpo_hpc.cluster.crowd import Ranks, each
from mlpo_hpc.errors import storage_error
from mlpo_hpc.storage.bulk import ITEM, OffsetFile, Parameter, boxes, create

FILE = "state.h5"


def export_hdf5(reader: Reader, target: Path, ranks: Ranks, told: Told) -> int:
    """Collective over `ranks`. Write master weights and optimizer state, see `storage.bulk`.

    Parameters
    ----------
    reader : Reader
        Of the checkpoint.
    target : Path
        The file, which does not exist.
    ranks : Ranks
        That share the work.
    told : callable
        Hears how far this rank is.

    Returns
    -------
    int
        Bytes of all vectors.

    Raises
    ------
    ConfigError
        If the target exists.
    StorageError
        If something cannot be read or written, or is not what was saved. Nothing is left then.
    """
    with whole(target, ranks, FILE) as folder:
        parameters = each(ranks, lambda: _parameters(reader))
        path = str(folder / FILE)
        each(ranks, lambda: _create(path, parameters) if ranks.rank == 0 else None)
        sizes = [_nbytes(parameter) for parameter in parameters.values()]
        mine = [list(parameters.items())[number] for number in share(sizes, ranks)]
        each(ranks, lambda: _write(path, mine, reader, told))
    return sum(sizes)


def _parameters(reader: Reader) -> dict[str, Parameter]:
    return {
        name: Parameter(reader.shape(name), (MASTER, *reader.vectors(name)), reader.scalars(name) or {})
        for name in reader.parameters
    }


def _nbytes(parameter: Parameter) -> int:
    return ITEM.itemsize * math.prod(parameter.shape) * len(parameter.vectors)


def _create(path: str, parameters: dict[str, Parameter]) -> None:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))  # HDF5 keeps its mode
    except OSError as error:
        raise storage_error("creating a state file", path, error) from error
    create(path, parameters)


def _write(path: str, parameters: list[tuple[str, Parameter]], reader: Reader, told: Told) -> None:
    all_bytes = sum(_nbytes(parameter) for _, parameter in parameters)
    told(0, all_bytes)
    file = OffsetFile(path)
    try:
        for name, parameter in parameters:
            for vector in parameter.vectors:
                for box in boxes(parameter.shape, 0, math.prod(parameter.shape), PIECE_ITEMS):
                    file.write(name, vector, box, reader.values(name, vector, box.first, box.numel))
                    told(ITEM.itemsize * box.numel, all_bytes)
    finally:
        file.close()
