"""What is in the files of a universal checkpoint of DeepSpeed, made of one of ours.

::

    zero/NAME/fp32.pt  exp_avg.pt  exp_avg_sq.pt    the vectors of a parameter, whole and flat
    zero/optimizer_state.pt                         what the first rank's optimizer saves, with its part of the state
    zero_pp_rank_3_mp_rank_00_model_states.pt       of rank 3: counters, scheduler, buffers, its frozen partitions

This is what ``deepspeed.checkpoint.ds_to_universal`` of DeepSpeed 0.19.8 makes of a checkpoint of stock ZeRO-3
(https://www.deepspeed.ai/tutorials/universal-checkpointing).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from mlpo_hpc.checkpoint.manifest import MANIFEST, PieceEntry
from mlpo_hpc.checkpoint.plain import decode
from mlpo_hpc.checkpoint.read import MASTER, Reader
from mlpo_hpc.checkpoint.tensors_file import Tensor, read_bytes, read_header
from mlpo_hpc.checkpoint.torch_file import TYPES, Foreign, Streamed
from mlpo_hpc.checkpoint.weights import NAMES, PIECE_ITEMS
from mlpo_hpc.errors import ConfigError, CorruptState, here
from mlpo_hpc.state.codec.fp32 import ITEM_BYTES

VECTORS = ("exp_avg", "exp_avg_sq")
SCALARS = ("step",)
"""With the vectors the state of Adam and AdamW: all that DeepSpeed's converter takes and its loader restores."""
TRAINING = ("global_steps", "global_samples", "skipped_steps", "lr_scheduler", "shared_params", "optimizer")
OPTIMIZER = ("loss_scaler", "param_groups", "overflow", "group_of_subgroup")
PIECE_BYTES = PIECE_ITEMS * ITEM_BYTES

SCALERS = {"__module__": "deepspeed.runtime.fp16.loss_scaler"}
STAGES = {
    "__module__": "deepspeed.runtime.zero.config",
    "__reduce__": lambda self: (type(self), (int(self),)),  # as an enum is pickled
}


class Universal:
    """The files of a universal checkpoint.

    Parameters
    ----------
    reader : Reader
        Of a checkpoint of ours.

    Raises
    ------
    ConfigError
        If DeepSpeed could not go on from it, because the optimizer keeps something else than Adam does.
    CorruptState
        If a file is missing or damaged, or has what nobody wrote.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._check_names()
        self._check_state()
        self._first = _small_tensors(reader, 0)
        self._training = self._having(TRAINING, reader.manifest.training)
        self._optimizer = self._having(OPTIMIZER, self._plain(self._training["optimizer"]))

    def files(self) -> dict[str, Any]:
        """What is in each file, by its path in the folder: see `torch_file.write`."""
        found: dict[str, Any] = {}
        for rank in range(self._reader.manifest.world_size):
            found[f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"] = self._model_states(rank)
        found["zero/optimizer_state.pt"] = self._optimizer_state()
        for name in self._reader.parameters:
            numel = math.prod(self._reader.shape(name))
            for vector in (MASTER, *VECTORS):
                found[f"zero/{name}/{vector}.pt"] = _flat(vector, numel, partial(self._values, name, vector, numel))
        return found

    # ---- what cannot be exported ------------------------------------------------------------

    def _check_names(self) -> None:
        for name in self._reader.parameters:
            if Path(name).name != name or name in {"", ".."}:
                raise CorruptState(f"{name!r} cannot be the name of a parameter's folder: {here(self._reader.folder)}")

    def _check_state(self) -> None:
        for name in self._reader.parameters:
            vectors, scalars = self._reader.vectors(name), self._reader.scalars(name)
            if scalars is None:
                raise ConfigError(
                    f"the optimizer had no state of {name} yet, before its first step, and a universal checkpoint "
                    f"cannot be without: export the weights (--to safetensors), {here(self._reader.folder)}"
                )
            if set(vectors) != set(VECTORS) or set(scalars) != set(SCALARS):
                raise ConfigError(
                    f"the optimizer keeps {[*vectors, *scalars]} of {name}; a universal checkpoint of ZeRO-3 holds "
                    f"{[*VECTORS, *SCALARS]}, the state of Adam and AdamW: export it with --to hdf5, or the weights "
                    f"with --to safetensors, {here(self._reader.folder)}"
                )

    def _having(self, keys: Sequence[str], values: Mapping[str, Any]) -> Mapping[str, Any]:
        missing = [key for key in keys if key not in values]
        if missing:
            raise ConfigError(
                f"the checkpoint lacks {missing}, which earlier versions of mlpo_hpc did not save: load it and save "
                f"it again, {here(self._reader.folder)}"
            )
        return values

    def _plain(self, value: Any) -> Any:
        """Plain values of the manifest, with the tensors of the first rank."""
        numbers = range(sum(key.startswith("client/") for key in self._first))
        return decode(value, [self._first[f"client/{number}"] for number in numbers], self._reader.folder / MANIFEST)

    # ---- the first rank's optimizer ---------------------------------------------------------

    def _optimizer_state(self) -> dict[str, Any]:
        """What `state_dict` of stock's optimizer gives there, and its parameter groups once more."""
        scaler, subgroups = self._optimizer["loss_scaler"], range(len(self._reader.shards[0].records))
        groups = [{**group, "params": []} for group in self._optimizer["param_groups"]]
        for subgroup, group in enumerate(self._optimizer["group_of_subgroup"]):
            groups[group]["params"].append(subgroup)
        return {
            "zero_stage": Foreign("ZeroStageEnum", (int,), STAGES)(3),
            "loss_scaler": self._loss_scaler(scaler),
            "dynamic_loss_scale": scaler["dynamic"],
            "overflow": self._optimizer["overflow"],
            "partition_count": self._reader.manifest.world_size,
            "optimizer_state_dict": {"state": {i: self._state(i) for i in subgroups}, "param_groups": groups},
            "fp32_flat_groups": [self._part(i, MASTER) for i in subgroups],
            "param_groups": groups,
        }

    def _loss_scaler(self, values: Mapping[str, Any]) -> Any:
        """One that adapts knows the type of the weights too."""
        import torch

        scaler = Foreign("DynamicLossScaler" if values["dynamic"] else "LossScaler", (), SCALERS)()
        more = {"dtype": getattr(torch, self._reader.manifest.weight_type)} if values["dynamic"] else {}
        vars(scaler).update(values, **more)
        return scaler

    def _state(self, subgroup: int) -> dict[str, Any]:
        scalars = self._reader.shards[0].records[subgroup].scalars or {}
        return {
            **{key: value if isinstance(value, int) else _scalar(value) for key, value in scalars.items()},
            **{vector: self._part(subgroup, vector) for vector in VECTORS},
        }

    def _part(self, subgroup: int, vector: str) -> Streamed:
        """What the first rank has of a subgroup."""
        numel = self._reader.shards[0].records[subgroup].numel
        return _flat(vector, numel, partial(self._part_values, subgroup, vector, numel))

    def _part_values(self, subgroup: int, vector: str, numel: int) -> Iterator[np.ndarray]:
        done = 0
        for piece in self._layout[subgroup]:
            yield np.zeros(piece.begin - done, np.float32)  # padding
            yield from self._values(piece.name, vector, piece.numel, piece.first)
            done = piece.begin + piece.numel
        yield np.zeros(numel - done, np.float32)

    def _values(self, name: str, vector: str, numel: int, first: int = 0) -> Iterator[np.ndarray]:
        for begin in range(0, numel, PIECE_ITEMS):
            yield self._reader.values(name, vector, first + begin, min(PIECE_ITEMS, numel - begin))

    @cached_property
    def _layout(self) -> list[list[PieceEntry]]:
        """The pieces of the first rank by subgroup, as they lie there."""
        found: list[list[PieceEntry]] = [[] for _ in self._reader.shards[0].records]
        for piece in sorted(self._reader.shards[0].pieces, key=lambda piece: piece.begin):
            found[piece.subgroup].append(piece)
        return found

    # ---- the engines ------------------------------------------------------------------------

    def _model_states(self, rank: int) -> dict[str, Any]:
        """What the engine of a rank saves; buffers are those of the first one."""
        frozen, mine = self._reader.manifest.frozen, _small_tensors(self._reader, rank)
        return {
            **self._common,
            **({"shared_params": self._training["shared_params"]} if rank == 0 else {}),  # stock looks there alone
            "frozen_param_shapes": OrderedDict((entry.name, _size(entry.shape)) for entry in frozen),
            "frozen_param_fragments": OrderedDict((entry.name, mine[f"frozen/{entry.name}"]) for entry in frozen),
            **(self._plain(self._reader.manifest.client) or {}),
        }

    @cached_property
    def _common(self) -> dict[str, Any]:
        manifest, training = self._reader.manifest, self._training
        buffers = {
            key.removeprefix("buffer/"): tensor for key, tensor in self._first.items() if key.startswith("buffer/")
        }
        return {
            "module": OrderedDict({**self._empty(), **buffers}),
            "buffer_names": list(buffers),
            "optimizer": None,
            "param_shapes": [OrderedDict((piece.name, _size(piece.shape)) for piece in some) for some in self._layout],
            "shared_params": {},
            "lr_scheduler": self._plain(training["lr_scheduler"]),
            "data_sampler": None,
            "random_ltd": None,
            **{key: training[key] for key in ("skipped_steps", "global_steps", "global_samples")},
            "dp_world_size": manifest.world_size,
            "mp_world_size": 1,  # our engine shards by data-parallel rank alone
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_config": manifest.config,
            "ds_version": manifest.versions.get("deepspeed"),
        }

    def _empty(self) -> dict[str, Streamed]:
        """The parameters as ZeRO-3 has them between steps."""
        types = dict.fromkeys(self._reader.parameters, NAMES[self._reader.manifest.weight_type])
        types |= {entry.name: self._first[f"frozen/{entry.name}"].dtype for entry in self._reader.manifest.frozen}
        types |= {name: types[same] for name, same in self._training["shared_params"].items()}
        return {name: Streamed(dtype, (0,), 0, tuple) for name, dtype in types.items()}


# ---- tensors --------------------------------------------------------------------------------


def _flat(vector: str, numel: int, pieces: partial[Iterator[np.ndarray]]) -> Streamed:
    """A vector of state; master weights are what the optimizer of DeepSpeed has as parameters."""
    return Streamed("F32", (numel,), numel * ITEM_BYTES, pieces, requires_grad=vector == MASTER)


def _scalar(value: float) -> Streamed:
    return Streamed("F32", (), ITEM_BYTES, lambda: [np.array([value], np.float32)])


def _size(shape: Sequence[int]) -> Any:
    import torch

    return torch.Size(shape)


def _small_tensors(reader: Reader, rank: int) -> dict[str, Streamed]:
    """Frozen partitions of a rank, and of the first one buffers and tensors in plain values.

    Raises
    ------
    CorruptState
        If a frozen partition is missing.
    ConfigError
        If one is of a type that is not known here.
    """
    path = reader.folder / reader.shards[rank].tensors.file
    header = read_header(path)
    missing = [entry.name for entry in reader.manifest.frozen if f"frozen/{entry.name}" not in header]
    if missing:
        raise CorruptState(f"the partitions of {missing} are missing: {here(path)}")
    strange = sorted(key for key, tensor in header.items() if tensor.dtype not in TYPES)
    if strange:
        raise ConfigError(f"the types of {strange} cannot be exported to a universal checkpoint: {here(path)}")
    return {
        key: Streamed(tensor.dtype, tensor.shape, tensor.nbytes, partial(_bytes, path, tensor))
        for key, tensor in header.items()
    }


def _bytes(path: Path, tensor: Tensor) -> Iterator[np.ndarray]:
    for begin in range(0, tensor.nbytes, PIECE_BYTES):
        nbytes = min(PIECE_BYTES, tensor.nbytes - begin)
        yield np.frombuffer(read_bytes(path, tensor.offset + begin, nbytes), np.uint8)
