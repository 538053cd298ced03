"""Save and load whole state as one HDF5 file by parameter name, subgroup by subgroup: on any number of ranks."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch

from mlpo_hpc.cluster.node import Node, mpi_obstacle, start_mpi
from mlpo_hpc.cluster.verdict import gather, raise_together, together
from mlpo_hpc.engine.update import MASTER
from mlpo_hpc.errors import ConfigError, MpiMismatch, here, storage_error
from mlpo_hpc.storage.bulk import Box, OffsetFile, Parameter, SlabFile, boxes, create
from mlpo_hpc.storage.contents import Contents, Piece
from mlpo_hpc.storage.folder import private_folder
from mlpo_hpc.storage.hdf5 import has_parallel_hdf5

if TYPE_CHECKING:
    from mlpo_hpc.engine.records import Opened
    from mlpo_hpc.engine.update import BoundState
    from mlpo_hpc.state.store import Store


T = TypeVar("T")

SAVING = "the state was not saved"
LOADING = "the state was not loaded"


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
        comm, first = self._world_comm(), self._node.world_rank == 0
        makes = comm is not None or first
        with ExitStack() as endings:
            beside = private_folder(os.path.dirname(os.path.abspath(path)))
            folder = together(lambda: endings.enter_context(beside) if first else "", SAVING)
            unfinished = os.path.join(gather(folder)[0], os.path.basename(path))
            self._at_rest(lambda: create(unfinished, parameters, comm) if makes else None, SAVING)
            file = self._at_rest(
                lambda: SlabFile(unfinished, True, comm, collective) if comm else OffsetFile(unfinished), SAVING
            )
            failure = self._move_all(file.write, parameters, [contents for contents, _ in everyone], collective, False)
            self._at_rest(lambda: _close(file, failure), SAVING)
            together(lambda: _rename(unfinished, path) if first else None, SAVING)

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
        wanted = _parameters(everyone)
        comm = self._world_comm()
        file = self._at_rest(lambda: SlabFile(path, False, comm, collective), LOADING)
        there, failure = _caught(file.parameters)
        failure = failure or _difference(wanted, there or {}, path)
        if not any(gather(failure is not None)):
            failure = self._move_all(file.read, wanted, [contents for contents, _ in everyone], collective, True)
        self._at_rest(lambda: _close(file, failure), LOADING)
        together(lambda: self._set_all_scalars({name: found.scalars for name, found in (there or {}).items()}), LOADING)
        persistent = self.persistent_parameters  # type: ignore[attr-defined]
        if persistent:  # small ones that every rank holds whole
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)

    def _at_rest(self, action: Callable[[], T], failed: str) -> T:
        """Collective over the training world. Do something to the file that may be collective in MPI-IO.

        ROMIO holds one lock meanwhile: a transfer of ours in flight would wait for it with a tier's token in hand,
        for which the rank that everybody waits for may be waiting.
        """
        _, failure = _caught(self._store.pipeline.flush)
        result, later = _caught(action)
        raise_together(failure or later, failed)
        return cast(T, result)

    # ---- one call after the other, the same number on all ranks -----------------------------

    def _move_all(
        self, move: Any, parameters: Mapping[str, Parameter], everyone: list[Contents], collective: bool, writes: bool
    ) -> Exception | None:
        """Move all vectors. A rank that fails takes part with nothing to the end, for the others wait for it."""
        mine = {piece.name: piece for piece in self._contents.pieces}
        blocks = {name: list(_blocks(mine.get(name))) for name in parameters}
        records, flush = _Records(self, writes), self._store.pipeline.flush
        failure: Exception | None = None
        for name, vector, number in _calls(parameters, _rounds(everyone)):
            box = values = None
            if failure is None and number < len(blocks[name]):
                box = blocks[name][number]
                values, failure = _caught(partial(records.values, mine[name], vector, box))
            if collective and failure is None:  # see `_at_rest`
                _, failure = _caught(flush)
            _, later = _caught(partial(move, name, vector, box if values is not None else None, values))
            failure = failure or later
        for action in (records.give_back, flush):  # what is still being written may fail yet
            _, later = _caught(action)
            failure = failure or later
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

    def _set_all_scalars(self, scalars: Mapping[str, Mapping[str, float]]) -> None:
        for piece in self._contents.pieces:
            if scalars[piece.name]:
                self._state.set_scalars(piece.subgroup, scalars[piece.name])


class _Records:
    """The record that holds the piece in hand, from and back to the pipeline."""

    def __init__(self, engine: StateFile, writes: bool) -> None:
        self._engine = engine
        self._writes = writes
        self._subgroup = -1
        self._opened: Opened | None = None
        self._vectors: dict[str, torch.Tensor] = {}

    def values(self, piece: Piece, vector: str, box: Box) -> np.ndarray:
        """A view of a block's items in the record."""
        if piece.subgroup != self._subgroup:
            self.give_back()
            pipeline, state = self._engine._store.pipeline, self._engine._state
            record = pipeline.get(piece.subgroup)
            self._opened = state.records.open(piece.subgroup, record, pipeline.resize, whole=True)
            self._subgroup = piece.subgroup
            names = (MASTER, *state.specs[piece.subgroup].vectors)
            self._vectors = dict(zip(names, self._opened.vectors(), strict=True))
        begin = piece.begin + box.first - piece.first
        return self._vectors[vector].narrow(0, begin, box.numel).numpy()

    def give_back(self) -> None:
        """Hand the record back."""
        opened, self._opened = self._opened, None
        subgroup, self._subgroup = self._subgroup, -1
        vectors, self._vectors = self._vectors, {}
        if opened is None:
            return
        try:
            if self._writes:
                opened.weights.copy_(vectors[MASTER])
            opened.close(changed=self._writes)
        finally:
            self._engine._store.pipeline.put(subgroup, self._writes or opened.altered)
        if self._writes:
            self._engine._unflatten_partitioned_parameters(subgroup)  # type: ignore[attr-defined]


def _blocks(piece: Piece | None) -> Iterator[Box]:
    return iter(()) if piece is None else boxes(piece.shape, piece.first, piece.numel)


def _calls(parameters: Mapping[str, Parameter], rounds: Mapping[str, int]) -> Iterator[tuple[str, str, int]]:
    """All calls, the same on all ranks, parameter by parameter."""
    for name, parameter in parameters.items():
        for vector, number in itertools.product(parameter.vectors, range(rounds[name])):
            yield name, vector, number


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


def _caught(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What an action gave, or the exception that it raised: the other ranks wait in the next collective call."""
    try:
        return action(), None
    except Exception as error:
        return None, error


def _close(file: SlabFile | OffsetFile, failure: Exception | None) -> None:
    """Close a file; what failed before is raised rather than what fails now."""
    _, later = _caught(file.close)
    if failure or later:
        raise failure or later  # type: ignore[misc]


def _rename(unfinished: str, path: str) -> None:
    """The file is whole and on the device: it gets its name, and the name is made to last too."""
    try:
        os.rename(unfinished, path)
        folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise storage_error("naming the state file", path, error) from error
