"""Save and load whole state as one HDF5 file by parameter name, subgroup by subgroup: on any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mlpo_hpc.cluster.node import Node, mpi_obstacle, start_mpi
from mlpo_hpc.cluster.verdict import gather, raise_together, together
from mlpo_hpc.errors import ConfigError, MpiMismatch, here, storage_error
from mlpo_hpc.storage.bulk import Box, OffsetFile, Parameter, SlabFile, boxes, create
from mlpo_hpc.storage.contents import Contents, Piece
from mlpo_hpc.storage.hdf5 import has_parallel_hdf5

if TYPE_CHECKING:
    from mlpo_hpc.engine.update import BoundState
    from mlpo_hpc.state.store import Store


class StateFile:
    """The part of `OffloadStage3` that saves and loads whole state."""

    _store: Store
    _state: BoundState
    _node: Node
    _contents: Contents

    def save_hdf5(self, path: str, collective: bool = False) -> None:
        """Collective over the training world. Save master weights and optimizer state by parameter name.

        Parameters
        ----------
        path : str
            Of one file on storage that all ranks see. It appears there when it is whole.
        collective : bool
            With parallel HDF5: whether MPI-IO gathers the ranks' pieces, or each rank writes its own.

        Raises
        ------
        StorageError
            If it cannot be written, the same on all ranks; a file of that name is left as it was.

        Notes
        -----
        Read it with ``h5py.File(path)["state/<name>/exp_avg"][...]``; master weights are ``fp32``.
        """
        everyone = gather((self._contents, self._all_scalars()))
        parameters = _parameters(everyone)
        comm, partial = self._world_comm(), f"{path}.partial"
        makes = comm is not None or self._node.world_rank == 0
        together(lambda: create(partial, parameters, comm) if makes else None)
        try:
            file = together(lambda: SlabFile(partial, True, comm, collective) if comm else OffsetFile(partial))
            failure = self._move_all(file.write, parameters, [contents for contents, _ in everyone], writes=False)
            raise_together(_closed(file, failure))
            together(lambda: _rename(partial, path) if self._node.world_rank == 0 else None)
        finally:
            if self._node.world_rank == 0:
                with suppress(FileNotFoundError):
                    os.unlink(partial)

    def load_hdf5(self, path: str, collective: bool = False) -> None:
        """Collective over the training world. Load what `save_hdf5` saved, on any number of ranks.

        Parameters
        ----------
        path : str
            Of the file.
        collective : bool
            As in `save_hdf5`.

        Raises
        ------
        ConfigError
            If the file is of another model or optimizer, before anything is changed.
        StorageError
            If it cannot be read.
        """
        everyone = gather((self._contents, {}))
        comm = self._world_comm()
        file = together(lambda: SlabFile(path, False, comm, collective))
        try:
            there = file.parameters()
            raise_together(_difference(_parameters(everyone), there, path))
            failure = self._move_all(file.read, there, [contents for contents, _ in everyone], writes=True)
        finally:
            file.close()
        raise_together(failure)
        self._take_scalars({name: parameter.scalars for name, parameter in there.items()})
        self._refresh_weights()

    # ---- one call after the other, the same number on all ranks -----------------------------

    def _move_all(
        self, move: Any, parameters: Mapping[str, Parameter], everyone: list[Contents], writes: bool
    ) -> Exception | None:
        """Move all vectors. A rank that fails takes part with nothing to the end, for the others wait for it."""
        mine = {piece.name: piece for piece in self._contents.pieces}
        rounds = _rounds(everyone)
        failure: Exception | None = None
        with _Records(self, writes) as records:
            for name, parameter in parameters.items():
                for vector in parameter.vectors:
                    blocks = list(_blocks(mine.get(name)))
                    for number in range(rounds.get(name, 0)):
                        box = blocks[number] if number < len(blocks) and failure is None else None
                        try:
                            move(name, vector, box, None if box is None else records.values(mine[name], vector, box))
                        except Exception as error:
                            failure = failure or error
        return failure

    def _world_comm(self) -> Any:
        """Collective over the training world. MPI's world, if parallel HDF5 can be used there."""
        if not all(gather(has_parallel_hdf5())):
            return None
        try:
            return None if mpi_obstacle(self._node) else start_mpi()
        except MpiMismatch:
            return None

    # ---- what is no vector ------------------------------------------------------------------

    def _all_scalars(self) -> dict[str, dict[str, float]]:
        """Step counts and the like, by parameter."""
        found = {}
        for piece in self._contents.pieces:
            scalars = self._state.scalars(piece.subgroup) or {}
            found[piece.name] = {key: float(value) for key, value in scalars.items() if _is_number(value)}
        return found

    def _take_scalars(self, scalars: Mapping[str, Mapping[str, float]]) -> None:
        for piece in self._contents.pieces:
            if scalars[piece.name]:
                self._state.set_scalars(piece.subgroup, scalars[piece.name])

    def _refresh_weights(self) -> None:
        """The 16-bit weights from the new master weights."""
        pipeline = self._store.pipeline
        for subgroup in range(len(self._state.numels)):
            record = pipeline.get(subgroup)
            try:
                self._set_weights(subgroup, record)  # type: ignore[attr-defined]
            finally:
                pipeline.put(subgroup, dirty=False)
        persistent = self.persistent_parameters  # type: ignore[attr-defined]
        if persistent:  # small ones that every rank holds whole
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)


class _Records:
    """The record that holds the piece in hand, from and back to the pipeline."""

    def __init__(self, engine: StateFile, writes: bool) -> None:
        self._engine = engine
        self._writes = writes
        self._subgroup: int | None = None
        self._vectors: dict[str, torch.Tensor] = {}

    def __enter__(self) -> _Records:
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back()

    def values(self, piece: Piece, vector: str, box: Box) -> np.ndarray:
        """A view of a block's items in the record."""
        if piece.subgroup != self._subgroup:
            self._give_back()
            record = self._engine._store.pipeline.get(piece.subgroup)
            self._subgroup = piece.subgroup
            names = self._engine._contents.records[piece.subgroup].vectors
            self._vectors = dict(zip(names, self._engine._state.vectors(piece.subgroup, record), strict=True))
        begin = piece.begin + box.first - piece.first
        return self._vectors[vector].narrow(0, begin, box.numel).numpy()

    def _give_back(self) -> None:
        self._vectors = {}
        if self._subgroup is not None:
            self._engine._store.pipeline.put(self._subgroup, dirty=self._writes)
            self._subgroup = None


def _blocks(piece: Piece | None) -> Iterator[Box]:
    return iter(()) if piece is None else boxes(piece.shape, piece.first, piece.numel)


def _rounds(everyone: list[Contents]) -> dict[str, int]:
    """Calls for one vector of each parameter: as many as the rank with most blocks needs."""
    rounds: dict[str, int] = {}
    for contents in everyone:
        for piece in contents.pieces:
            rounds[piece.name] = max(rounds.get(piece.name, 0), sum(1 for _ in _blocks(piece)))
    return rounds


def _parameters(everyone: list[tuple[Contents, dict[str, dict[str, float]]]]) -> dict[str, Parameter]:
    """All parameters of all ranks, in the order of the subgroups, so that each record is fetched once."""
    found: dict[str, Parameter] = {}
    for contents, scalars in everyone:
        for piece in contents.pieces:
            vectors = contents.records[piece.subgroup].vectors
            found.setdefault(piece.name, Parameter(piece.shape, vectors, scalars.get(piece.name, {})))
    return found


def _difference(here_: Mapping[str, Parameter], there: Mapping[str, Parameter], path: str) -> ConfigError | None:
    def forms(parameters: Mapping[str, Parameter]) -> set[tuple[Any, ...]]:
        return {(name, parameter.shape, frozenset(parameter.vectors)) for name, parameter in parameters.items()}

    only = [sorted(name for name, *_ in forms(a) - forms(b)) for a, b in ((here_, there), (there, here_))]
    if not any(only):
        return None
    return ConfigError(
        f"{here(path)} is of another model or optimizer: parameters that are here only, or have another shape or other "
        f"vectors there: {_some(only[0])}; there only: {_some(only[1])}"
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "none"


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if torch.is_tensor(value) else isinstance(value, int | float)


def _closed(file: SlabFile | OffsetFile, failure: Exception | None) -> Exception | None:
    try:
        file.close()
    except Exception as error:
        return failure or error
    return failure


def _rename(partial: str, path: str) -> None:
    """The file is whole and on the device: it gets its name, and the name is made to last too."""
    try:
        os.rename(partial, path)
        folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise storage_error("naming the state file", path, error) from error
