"""`save_checkpoint` and `load_checkpoint` of a DeepSpeed engine, in a format of our own.

All ranks take part in both. The commit is one rename by rank 0 after everything of every rank is on the device:
what is not committed does not exist, and the checkpoint before it is intact.
"""

from __future__ import annotations

import json
import os
import platform
import random
import time
import uuid
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator

from mlpo_hpc.checkpoint import folder as folders
from mlpo_hpc.checkpoint.manifest import LATEST, MANIFEST, FileEntry, FrozenEntry, Manifest, WeightType
from mlpo_hpc.checkpoint.plain import decode, encode
from mlpo_hpc.checkpoint.read import Reader
from mlpo_hpc.checkpoint.write import ShardWriter
from mlpo_hpc.cluster.verdict import gather, together, world_rank
from mlpo_hpc.errors import ConfigError, here
from mlpo_hpc.telemetry.log import say, warn

SAVING = "the checkpoint was not saved"
LOADING = "the checkpoint was not loaded"

WEIGHT_TYPES: dict[torch.dtype, WeightType] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}

Load = Callable[..., tuple[str | None, Any]]


class Checkpointing:
    """What stands in for two methods of a DeepSpeed engine.

    Parameters
    ----------
    engine : deepspeed.DeepSpeedEngine
        With our optimizer.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._stock_load: Load = engine.load_checkpoint
        self._stock_save: Callable[..., bool] = engine.save_checkpoint
        engine.save_checkpoint = self.save
        engine.load_checkpoint = self.load

    # ---- saving -----------------------------------------------------------------------------

    def save(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Collective over all ranks. Save all that the run needs to go on, on any number of ranks.

        Parameters
        ----------
        save_dir : path
            Where checkpoints are; all ranks see it.
        tag : str, optional
            Name of this one, ``global_step<N>`` by default. One of that name is replaced when this one is committed.
        client_state : mapping, optional
            Plain values and tensors, returned by `load`.
        save_latest : bool
            Whether ``latest`` is to name it.
        exclude_frozen_parameters : bool
            Whether parameters that are not trained are left out.

        Raises
        ------
        ConfigError
            If `client_state` or the learning rate scheduler holds something else, naming the key.
        StorageError
            If it cannot be written. The same on all ranks; what was saved before is as it was.
        """
        engine, rank = self._engine, world_rank()
        if engine.optimizer._config.checkpoint.format == "deepspeed":
            return self._save_deepspeeds(
                Path(os.fspath(save_dir)), tag, client_state, save_latest, exclude_frozen_parameters
            )
        tag = _agree(f"global_step{engine.global_steps}" if tag is None else str(tag))
        directory = Path(os.fspath(save_dir))
        folder = directory / tag
        tensors: list[torch.Tensor] = []
        training, client = together(lambda: self._plain_values(dict(client_state or {}), tensors), SAVING)
        engine.optimizer.checkpoint_event_prologue()
        together(lambda: folders.make(folder) if rank == 0 else None, SAVING)
        unique = gather(uuid.uuid4().hex[:8])[0]
        writers: list[ShardWriter] = []
        try:
            entry = together(
                lambda: self._write_shard(folder, unique, tensors, not exclude_frozen_parameters, writers), SAVING
            )
            shards = gather(entry)
            manifest = self._manifest(tag, shards, training, client, not exclude_frozen_parameters)
            together(lambda: folders.commit(folder, manifest, save_latest) if rank == 0 else None, SAVING)
        except BaseException:
            for writer in writers:
                writer.remove()
            raise
        engine.optimizer.checkpoint_event_epilogue()
        say("checkpoint %s committed", folder)
        return True

    def _save_deepspeeds(self, directory: Path, tag: Any, client_state: Any, *how: bool) -> bool:
        """What stock ZeRO-3 reads; one of ours of the same tag does not count any more then."""
        tag = _agree(f"global_step{self._engine.global_steps}" if tag is None else str(tag))
        done = self._stock_save(str(directory), tag, dict(client_state or {}), *how)
        if world_rank() == 0:
            (directory / tag / MANIFEST).unlink(missing_ok=True)
        return done

    def _plain_values(self, client_state: dict[str, Any], tensors: list[torch.Tensor]) -> tuple[dict[str, Any], Any]:
        engine = self._engine
        scheduler = engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None
        training = {
            "global_steps": engine.global_steps,
            "global_samples": engine.global_samples,
            "skipped_steps": engine.skipped_steps,
            "micro_steps": engine.micro_steps,
            "shared_params": engine._get_shared_params(),  # names of tied weights on rank 0, for exports
            "optimizer": encode(engine.optimizer.describe_training(), tensors, "a parameter group of the optimizer"),
            "lr_scheduler": encode(scheduler, tensors, "the state of the learning rate scheduler"),
        }
        return training, encode(client_state, tensors, "client_state")

    def _write_shard(
        self, folder: Path, unique: str, tensors: list[torch.Tensor], with_frozen: bool, writers: list[ShardWriter]
    ) -> FileEntry:
        rank = world_rank()
        writer = ShardWriter(folder, rank, unique)
        writers.append(writer)
        records, pieces = self._engine.optimizer.save_records(writer)
        small, rng = _random_state()
        if with_frozen:
            small |= {f"frozen/{name}": param.ds_tensor.detach() for name, param in self._frozen()}
        if rank == 0:
            small |= {f"buffer/{name}": buffer.detach() for name, buffer in self._buffers()}
            small |= {f"client/{number}": tensor for number, tensor in enumerate(tensors)}
        entry = writer.finish(records, pieces, small, rng)
        writer.close()
        return entry

    def _manifest(
        self, tag: str, shards: list[FileEntry], training: dict[str, Any], client: Any, with_frozen: bool
    ) -> Manifest:
        engine, optimizer = self._engine, self._engine.optimizer
        frozen = [FrozenEntry(name=name, shape=tuple(param.ds_shape)) for name, param in self._frozen()]
        versions = {name: version(name) for name in ("mlpo_hpc", "torch", "deepspeed")}
        return Manifest(
            tag=tag,
            step=optimizer._steps,
            flipped=optimizer._flipped,
            world_size=len(shards),
            weight_type=WEIGHT_TYPES[optimizer.fp16_partitioned_groups_flat[0].dtype],
            frozen=tuple(frozen if with_frozen else ()),
            shards=tuple(shards),
            training=training,
            client=client,
            config=json.loads(json.dumps(engine.config, default=str)),
            versions={**versions, "python": platform.python_version()},
            created=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        )

    def _frozen(self) -> list[tuple[str, Any]]:
        named = self._engine.module.named_parameters()
        return [(name, param) for name, param in named if not param.requires_grad and hasattr(param, "ds_tensor")]

    def _buffers(self) -> list[tuple[str, torch.Tensor]]:
        names = set(self._engine._get_buffer_names())
        return [(name, buffer) for name, buffer in self._engine.module.named_buffers() if name in names]

    # ---- loading ----------------------------------------------------------------------------

    def load(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, Any]:
        """Collective over all ranks. Go on from a checkpoint, of any number of ranks; also from one of DeepSpeed's.

        Parameters
        ----------
        load_dir : path
            Where checkpoints are.
        tag : str, optional
            Which; by default what ``latest`` names, or the newest that is whole if it names none.
        load_module_strict : bool
            Whether frozen parameters and buffers of both sides must be the same.
        load_optimizer_states, load_lr_scheduler_states : bool
            Whether to load these.
        load_module_only : bool
            Whether to load the 16-bit weights alone.
        custom_load_fn : callable, optional
            For checkpoints of DeepSpeed's only.

        Returns
        -------
        tuple
            The checkpoint's path and its `client_state`; None and None if there is none.

        Raises
        ------
        ConfigError
            If it is of another model or optimizer, before anything is changed.
        CorruptState
            If a file is missing or not what was saved.
        """
        directory = Path(os.fspath(load_dir))
        found = gather(folders.find_tag(directory, None if tag is None else str(tag)) if world_rank() == 0 else None)[0]
        if found is None or (folders.is_deepspeeds(directory / found) and not folders.is_ours(directory / found)):
            return self._stock_load(
                str(directory), found, load_module_strict, load_optimizer_states, load_lr_scheduler_states,
                load_module_only, custom_load_fn,
            )  # fmt: skip
        with_state = load_optimizer_states and not load_module_only
        reader = together(lambda: self._open(directory, found, with_state, load_module_strict, custom_load_fn), LOADING)
        try:
            client = together(
                lambda: self._restore(reader, with_state, load_lr_scheduler_states, load_module_only), LOADING
            )
        finally:
            reader.close()
        self._engine.optimizer.share_persistent_parameters()
        say(
            "checkpoint %s loaded: step %d, saved on %d ranks",
            reader.folder,
            reader.manifest.step,
            reader.manifest.world_size,
        )
        return str(reader.folder), client

    def _open(self, directory: Path, tag: str, with_state: bool, strict: bool, custom_load_fn: Any) -> Reader:
        """Look whether it can be loaded, before anything is changed."""
        if custom_load_fn is not None:
            raise ConfigError("custom_load_fn is for checkpoints of DeepSpeed's: in this one weights are by name")
        try:
            reader = Reader(directory / tag)
            self._engine.optimizer.check_records(reader, with_state)
            for shard in reader.shards[world_rank() :: self._engine.world_size]:  # of those all ranks read parts
                folders.check_file(reader.folder, shard.tensors)
        except Exception as error:
            older = [name for name, _ in folders.committed(directory) if name != tag]
            if older and not isinstance(error, ConfigError):
                error.args = (f"{error}. There are also: {', '.join(older)}", *error.args[1:])
            raise
        mine, there = (
            sorted(set(names)) for names in ([n for n, _ in self._frozen()], [f.name for f in reader.manifest.frozen])
        )
        if strict and there and mine != there:
            raise ConfigError(f"{here(reader.folder)}: frozen parameters are {there[:5]} there and {mine[:5]} here")
        return reader

    def _restore(self, reader: Reader, with_state: bool, with_scheduler: bool, weights_only: bool) -> Any:
        engine, manifest = self._engine, reader.manifest
        engine.optimizer.checkpoint_event_prologue()
        tensors, manifest_file = _client_tensors(reader), reader.folder / MANIFEST
        training = manifest.training
        if not weights_only:
            engine.optimizer.load_training(decode(training["optimizer"], tensors, manifest_file), with_state)
        engine.optimizer.load_records(reader, with_state, weights_only)
        self._restore_frozen(reader)
        if weights_only:
            return decode(manifest.client, tensors, manifest_file)
        for name in ("global_steps", "global_samples", "skipped_steps", "micro_steps"):
            setattr(engine, name, training[name])
        if with_scheduler and engine.lr_scheduler is not None and training["lr_scheduler"] is not None:
            engine.lr_scheduler.load_state_dict(decode(training["lr_scheduler"], tensors, manifest_file))
        if manifest.world_size == engine.world_size:
            _set_random_state(reader, world_rank())
        else:
            warn("saved on %d ranks: the random generators stay as they are", manifest.world_size)
        return decode(manifest.client, tensors, manifest_file)

    def _restore_frozen(self, reader: Reader) -> None:
        saved = {entry.name: entry for entry in reader.manifest.frozen}
        for name, param in self._frozen():
            if name in saved:
                own = param.ds_tensor.data.view(-1)
                own.copy_(_frozen_items(reader, saved[name], world_rank() * own.numel(), own.numel()))
        with _tensors_of(reader, 0) as file:
            keys = set(file.keys())
            for name, buffer in self._buffers():
                if f"buffer/{name}" in keys:
                    buffer.copy_(file.get_tensor(f"buffer/{name}"))


def _agree(tag: str) -> str:
    """Collective over all ranks. One tag, which is the name of a folder."""

    def check() -> str:
        if len(tags) > 1:
            raise ConfigError(f"the ranks gave different tags: {sorted(tags)}")
        if Path(tag).name != tag or tag in {"", ".", "..", LATEST}:
            raise ConfigError(f"{tag!r} cannot be the name of a checkpoint's folder")
        return tag

    tags = set(gather(tag))
    return together(check, SAVING)


def _random_state() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Of all generators of this process: tensors, and what is plain."""
    numpy_state: Any = np.random.get_state()
    kind, words, *rest = numpy_state
    plain = {"python": list(random.getstate()), "numpy": [kind, words.tolist(), *rest]}
    tensors = {"rng/torch": torch.get_rng_state()}
    if get_accelerator().device_name() != "cpu":
        tensors["rng/accelerator"] = get_accelerator().get_rng_state()
    return tensors, plain


def _set_random_state(reader: Reader, rank: int) -> None:
    shard = reader.shards[rank]
    version_number, words, gauss = shard.rng["python"]
    random.setstate((version_number, tuple(words), gauss))
    kind, numbers, *rest = shard.rng["numpy"]
    np.random.set_state((kind, np.array(numbers, np.uint32), *rest))
    with _tensors_of(reader, rank) as file:
        torch.set_rng_state(file.get_tensor("rng/torch"))
        if "rng/accelerator" in file.keys() and get_accelerator().device_name() != "cpu":  # noqa: SIM118
            get_accelerator().set_rng_state(file.get_tensor("rng/accelerator"))


def _tensors_of(reader: Reader, rank: int) -> Any:
    from safetensors import safe_open

    return safe_open(reader.folder / reader.shards[rank].tensors.file, "pt")


def _client_tensors(reader: Reader) -> list[torch.Tensor]:
    with _tensors_of(reader, 0) as file:
        names = [name for name in file.keys() if name.startswith("client/")]  # noqa: SIM118
        return [file.get_tensor(f"client/{number}") for number in range(len(names))]


def _frozen_items(reader: Reader, entry: FrozenEntry, first: int, numel: int) -> torch.Tensor:
    """Items of a frozen parameter, from the partitions of the ranks that saved it; padding is zero."""
    parts: list[torch.Tensor] = []
    position = first
    for rank in range(reader.manifest.world_size):
        with _tensors_of(reader, rank) as file:
            part = file.get_slice(f"frozen/{entry.name}")
            size = part.get_shape()[0]
            begin, end = max(first, rank * size), min(first + numel, (rank + 1) * size)
            if begin < end:
                parts.append(part[begin - rank * size : end - rank * size])
                position = end
    kind = parts[0].dtype if parts else None
    return torch.cat([*parts, torch.zeros(first + numel - position, dtype=kind)])
