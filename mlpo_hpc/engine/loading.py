"""`load_checkpoint` of a DeepSpeed engine: from our own format, on any number of ranks, or from DeepSpeed's."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator

from mlpo_hpc.checkpoint.files import check_file
from mlpo_hpc.checkpoint.find import find_tag, is_deepspeeds, is_ours, offering
from mlpo_hpc.checkpoint.manifest import MANIFEST, FrozenEntry
from mlpo_hpc.checkpoint.plain import decode
from mlpo_hpc.checkpoint.read import Reader
from mlpo_hpc.cluster.verdict import gather, together, world_rank
from mlpo_hpc.engine.saving import Saving, frozen_parameters, kept_buffers
from mlpo_hpc.errors import ConfigError, here
from mlpo_hpc.telemetry.log import say, warn

LOADING = "the checkpoint was not loaded"
OTHERS = "Other checkpoints that are there, the newest first"

Load = Callable[..., tuple[str | None, Any]]


class Loading:
    """What stands in for `load_checkpoint` of a DeepSpeed engine.

    Parameters
    ----------
    engine : deepspeed.DeepSpeedEngine
        With our optimizer.
    saving : Saving
        What it saves with: loading waits for a checkpoint in the background.
    """

    def __init__(self, engine: Any, saving: Saving) -> None:
        self._saving = saving
        self._engine = engine
        self._stock_load: Load = engine.load_checkpoint

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
        self._saving.settle()
        directory = Path(os.fspath(load_dir))
        found = gather(find_tag(directory, None if tag is None else str(tag)) if world_rank() == 0 else None)[0]
        if found is None:
            say("there is no checkpoint in %s: nothing is loaded", directory)
            return None, None
        if is_deepspeeds(directory / found) and not is_ours(directory / found):
            return self._stock_load(
                str(directory), found, load_module_strict, load_optimizer_states, load_lr_scheduler_states,
                load_module_only, custom_load_fn,
            )  # fmt: skip
        with_state = load_optimizer_states and not load_module_only
        reader = together(lambda: self._open(directory, found, with_state, load_module_strict, custom_load_fn), LOADING)
        try:
            with offering(directory, OTHERS, but=found):
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
        with offering(directory, OTHERS, but=tag):
            reader = Reader(directory / tag)
            for shard in reader.shards[world_rank() :: self._engine.world_size]:  # of those all ranks read parts
                check_file(reader.folder, shard.tensors)
        self._engine.optimizer.check_records(reader, with_state)
        mine = sorted({name for name, _ in frozen_parameters(self._engine)})
        there = sorted({frozen.name for frozen in reader.manifest.frozen})
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
        for name, param in frozen_parameters(self._engine):
            if name in saved:
                own = param.ds_tensor.data.view(-1)
                own.copy_(_frozen_items(reader, saved[name], world_rank() * own.numel(), own.numel()))
        with _tensors_of(reader, 0) as file:
            keys = set(file.keys())
            for name, buffer in kept_buffers(self._engine):
                if f"buffer/{name}" in keys:
                    buffer.copy_(file.get_tensor(f"buffer/{name}"))


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
