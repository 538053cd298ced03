"""Records into the shard of a checkpoint, and from a checkpoint of any number of ranks into records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mlpo_hpc.checkpoint.copy_on_write import CopyOnWrite
from mlpo_hpc.checkpoint.manifest import PieceEntry, RecordEntry
from mlpo_hpc.checkpoint.read import Reader
from mlpo_hpc.checkpoint.save import Outline, Save
from mlpo_hpc.checkpoint.write import ShardWriter
from mlpo_hpc.cluster.memory import SPARE_FACTOR, available_bytes
from mlpo_hpc.engine.update import MASTER, set_group
from mlpo_hpc.errors import ConfigError, here
from mlpo_hpc.state.links import LinkedFile, link_files
from mlpo_hpc.storage.contents import Contents, Piece

if TYPE_CHECKING:
    from mlpo_hpc.cluster.node import Node
    from mlpo_hpc.engine.records import Opened
    from mlpo_hpc.engine.update import BoundState
    from mlpo_hpc.state.store import Store

PLAIN_TYPES = (bool, int, float, str, type(None))


class OwnCheckpoint:
    """The part of `OffloadStage3` that saves and loads state in our own format; nothing in it is collective."""

    _node: Node
    _store: Store
    _opened: dict[int, Opened]
    _give_back: Callable[..., None]
    _state: BoundState
    _contents: Contents
    _next_order: Callable[[], list[int]]
    _flipped: bool
    _steps: int
    optimizer: torch.optim.Optimizer
    loss_scaler: Any
    overflow: bool
    sub_group_to_group_id: Mapping[int, int]

    # ---- saving -----------------------------------------------------------------------------

    def link_files(self, folder: Path, unique: str, failed: str) -> dict[str, LinkedFile]:
        """Collective over all ranks. See `state.links.link_files`."""
        return link_files(self._store.successions, self._node, folder, unique, failed)

    def begin_save(
        self,
        folder: Path,
        rank: int,
        unique: str,
        small: Mapping[str, Any],
        files: Mapping[str, LinkedFile],
        background: bool,
    ) -> Save:
        """Seal the state as it is now, for a shard that `Save.run` writes.

        Parameters
        ----------
        folder, rank, unique
            See `ShardWriter`.
        small : mapping
            The tensors and generators of an `Outline`.
        files : mapping
            What `link_files` found.
        background : bool
            Whether training goes on meanwhile.
        """
        for left in list(self._opened):  # by a debug call
            self._give_back(left, dirty=True)
        tiers, numels = self._store.pipeline.tiers, self._state.numels
        lanes, pipeline = self._store.lanes_of_device(folder) if background else [], self._store.pipeline
        with ExitStack() as undoing:
            for file in files.values():
                undoing.callback(file.undo)
            writer = ShardWriter(folder, rank, unique, pipeline.pace(lanes))
            undoing.callback(writer.remove)
            linked = {number: files[tier.name] for number, tier in enumerate(tiers) if tier.name in files}
            writer.adopted += [file.path.name for file in linked.values() if file.is_ours]
            following = {number: file.following for number, file in linked.items()}
            seal = self._store.pipeline.seal(write_back=background, following=following)
            undoing.pop_all()
        records = [self._outline(subgroup, seal.sizes[subgroup]) for subgroup in range(len(numels))]
        pieces = [PieceEntry(**vars(piece)) for piece in self._contents.pieces]
        outline = Outline(records, pieces, self._next_order(), **small)
        paces = [pipeline.pace([tier.reads] if background else []) for tier in tiers]
        weight_bytes = sum(flat.nbytes for flat in self.fp16_partitioned_groups_flat)  # type: ignore[attr-defined]
        copies = background and self._can_copy(weight_bytes + sum(map(len, seal.memory.values())))
        weights = [self._weights_of(subgroup) for subgroup in range(len(numels))]
        return Save(writer, outline, seal, weights, self._state.records.changes(), tiers, paces, copies, linked)

    def _outline(self, subgroup: int, nbytes: int) -> RecordEntry:
        form, scalars = self._state.records.form(subgroup), self._state.scalars(subgroup)
        return RecordEntry(
            numel=self._state.numels[subgroup],
            vectors=self._state.specs[subgroup].vectors,
            pieces=form.pieces if form is not None else (),
            split=form is not None,
            nbytes=nbytes,
            chunks=(),
            weights=(),
            scalars=None if scalars is None else {key: _number(value) for key, value in scalars.items()},
        )

    def _can_copy(self, nbytes: int) -> bool:
        """Whether the node has memory to spare for a copy of what the next update changes, on each of its ranks."""
        return available_bytes() >= SPARE_FACTOR * nbytes * self._node.node_size

    def _weights_of(self, subgroup: int) -> CopyOnWrite:
        flat: torch.Tensor = self.fp16_partitioned_groups_flat[subgroup].detach()  # type: ignore[attr-defined]

        def fetch() -> memoryview:
            data: memoryview = flat.cpu().view(torch.uint8).numpy().data
            return data

        return CopyOnWrite(fetch, is_live=flat.device.type == "cpu")

    def describe_training(self) -> dict[str, Any]:
        """Loss scaler, parameter groups and what the next step begins with: plain values."""
        scaler = {key: value for key, value in vars(self.loss_scaler).items() if isinstance(value, PLAIN_TYPES)}
        groups = [
            {key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups
        ]
        return {
            "loss_scaler": scaler,
            "overflow": bool(self.overflow),
            "param_groups": groups,
            "group_of_subgroup": [self.sub_group_to_group_id[i] for i in range(len(self._state.numels))],
            "flipped": self._flipped,
            "steps": self._steps,
        }

    # ---- loading ----------------------------------------------------------------------------

    def check_records(self, reader: Reader, with_state: bool) -> None:
        """Whether a checkpoint is of this model and optimizer, before anything is changed.

        Raises
        ------
        ConfigError
            If it is not, naming parameters.
        """
        mine = {piece.name: piece.shape for piece in self._contents.pieces}
        there = {name: reader.shape(name) for name in reader.parameters}
        if mine != there:
            only = [sorted(set(a.items()) - set(b.items())) for a, b in ((mine, there), (there, mine))]
            raise ConfigError(
                f"{here(reader.folder)} is of another model: in this run only, or of another shape: {_some(only[0])}; "
                f"in the checkpoint: {_some(only[1])}"
            )
        for piece in self._contents.pieces if with_state else ():
            wanted, found = self._state.specs[piece.subgroup].vectors, reader.vectors(piece.name)
            if set(wanted) != set(found):
                raise ConfigError(
                    f"{here(reader.folder)} is of another optimizer: it keeps {list(found)} for {piece.name}, this one "
                    f"{list(wanted)}. Load with load_optimizer_states=False to take the weights alone"
                )

    def load_records(self, reader: Reader, with_state: bool, weights_only: bool) -> None:
        """Fill all records and the 16-bit weights of this rank, the first ones of the next step last."""
        pipeline = self._store.pipeline
        fill = list(reversed(self._next_order()))
        pipeline.plan(fill)
        for subgroup in fill:
            record = pipeline.create(subgroup) if with_state else pipeline.get(subgroup)
            opened = self._state.records.open(subgroup, record, pipeline.resize, new=with_state)
            try:
                source = _Source(reader, self._contents, subgroup, opened.weights.dtype, weights_only)
                self._state.load(subgroup, opened, source.fetch, with_state)
            finally:
                opened.close()
                pipeline.put(subgroup)
            if with_state:
                self._state.set_scalars(subgroup, source.scalars())
            self._unflatten_partitioned_parameters(subgroup)  # type: ignore[attr-defined]

    def load_training(self, values: Mapping[str, Any], with_groups: bool) -> None:
        """Set what `describe_training` told."""
        here_, there = len(self.optimizer.param_groups), len(values["param_groups"])
        if with_groups and here_ != there:
            raise ConfigError(f"the checkpoint has {there} parameter groups, this optimizer {here_}")
        vars(self.loss_scaler).update(values["loss_scaler"])
        for group, kept in zip(self.optimizer.param_groups, values["param_groups"], strict=True) if with_groups else ():
            set_group(group, kept)
        self._flipped, self._steps = values["flipped"], values["steps"]

    def share_persistent_parameters(self) -> None:
        """Collective over the data-parallel group. Small parameters that every rank holds whole."""
        persistent = self.persistent_parameters  # type: ignore[attr-defined]
        if persistent:
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)


class _Source:
    """What a checkpoint has for one of our subgroups."""

    def __init__(
        self, reader: Reader, contents: Contents, subgroup: int, weight_type: torch.dtype, weights_only: bool
    ) -> None:
        self._reader = reader
        self._pieces: list[Piece] = [piece for piece in contents.pieces if piece.subgroup == subgroup]
        self._weight_type = weight_type
        self._weights_only = weights_only
        self._same_type = str(weight_type).removeprefix("torch.") == reader.manifest.weight_type

    def scalars(self) -> dict[str, float] | None:
        """State that is not a vector."""
        return self._reader.scalars(self._pieces[0].name)

    def fetch(self, vector: str | None, part: slice) -> torch.Tensor:
        """Items of a part; padding is zero."""
        as_weights = (vector is None and self._same_type) or self._weights_only
        result = torch.zeros(part.stop - part.start, dtype=self._weights if as_weights else torch.float32)
        for piece in self._pieces:
            begin, end = max(part.start, piece.begin), min(part.stop, piece.begin + piece.numel)
            if begin < end:
                first = piece.first + begin - piece.begin
                values = self._read(piece.name, vector, as_weights, first, end - begin)
                result[begin - part.start : end - part.start] = values
        return result

    @property
    def _weights(self) -> torch.dtype:
        kind: torch.dtype = getattr(torch, self._reader.manifest.weight_type)
        return kind

    def _read(self, name: str, vector: str | None, as_weights: bool, first: int, numel: int) -> torch.Tensor:
        if as_weights:
            return torch.from_numpy(np.ascontiguousarray(self._reader.weights(name, first, numel)).reshape(-1)).view(
                self._weights
            )
        return torch.from_numpy(self._reader.values(name, vector or MASTER, first, numel))


def _number(value: Any) -> int | float:
    """A scalar of the optimizer: a tensor as a float, so that what is whole was no tensor."""
    return float(value) if torch.is_tensor(value) else value


def _some(pairs: list[tuple[str, Any]]) -> str:
    names = [f"{name} {list(shape)}" for name, shape in pairs]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "none"
