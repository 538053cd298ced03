"""`save_checkpoint` of a DeepSpeed engine, in a format of our own: committed when it returns, or in the background.

All ranks take part. The commit is one rename by rank 0 after everything of every rank is on the device:
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
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator

from mlpo_hpc.checkpoint import folder as folders
from mlpo_hpc.checkpoint.background import Attempt, Background
from mlpo_hpc.checkpoint.files import partial
from mlpo_hpc.checkpoint.find import is_deepspeeds, is_ours, offering
from mlpo_hpc.checkpoint.manifest import LATEST, MANIFEST, FileEntry, FrozenEntry, Manifest, WeightType
from mlpo_hpc.checkpoint.plain import encode
from mlpo_hpc.checkpoint.rotation import make_room, rotate
from mlpo_hpc.checkpoint.save import Save
from mlpo_hpc.cluster.verdict import gather, together, world_rank
from mlpo_hpc.errors import ConfigError
from mlpo_hpc.telemetry.log import say, warn

STATE_BYTES = 12
"""Of a parameter that AdamW trains."""
SAVING = "the checkpoint was not saved"
COMMITTING = "it is not certain that the checkpoint was saved"
EARLIER = "Checkpoints that were saved before and are as they were, the newest first"

WEIGHT_TYPES: dict[torch.dtype, WeightType] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}


Describe = Callable[[list[FileEntry]], Manifest]
"""The manifest for the shards of all ranks."""


class Saving:
    """What stands in for `save_checkpoint` of a DeepSpeed engine.

    Parameters
    ----------
    engine : deepspeed.DeepSpeedEngine
        With our optimizer.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._stock_save: Callable[..., bool] = engine.save_checkpoint
        self._background: Background | None = None
        self._folders: dict[str, Path] = {}
        """Of what was saved, by tag."""

    def save(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Collective over all ranks. Save all that the run needs to go on, on any number of ranks.

        With ``checkpoint.commit: "background"`` it returns when the state is sealed, and training goes on; the
        16-bit weights must not be changed by others than the optimizer before the next step that updates them.

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
            If it cannot be written. The same on all ranks; what was saved before is as it was. In the background:
            raised by `committed`, and when the engine is destroyed; training goes on.
        """
        self.settle()
        optimizer = self._engine.optimizer
        settings = optimizer._config.checkpoint
        tag = _agree(f"global_step{self._engine.global_steps}" if tag is None else str(tag))
        directory = Path(os.fspath(save_dir))
        self._folders.pop(tag, None)  # the last one is asked for by default
        folder = self._folders[tag] = directory / tag
        if settings.format == "deepspeed":
            return self._save_deepspeeds(folder, client_state, save_latest, exclude_frozen_parameters)
        tensors: list[torch.Tensor] = []
        training, client = together(lambda: self._plain_values(dict(client_state or {}), tensors), SAVING)
        optimizer.checkpoint_event_prologue()
        together(lambda: self._make_folder(folder) if world_rank() == 0 else None, SAVING)
        unique = gather(uuid.uuid4().hex[:8])[0]
        values = self._describe(tag, training, client, not exclude_frozen_parameters)

        def describe(shards: list[FileEntry]) -> Manifest:
            return Manifest(shards=tuple(shards), **values)

        small = self._small(tensors, not exclude_frozen_parameters)
        with offering(directory, EARLIER):
            if settings.commit == "background":
                self._begin(tag, folder, unique, small, describe, save_latest)
            else:
                self._save_at_once(folder, unique, small, describe, save_latest)
        optimizer.checkpoint_event_epilogue()
        return True

    def _make_folder(self, folder: Path) -> None:
        """And room for what will be in it."""
        folders.make(folder)
        params = list(self._engine.module.parameters())
        trained = sum(param.ds_numel for param in params if param.requires_grad)
        frozen = sum(param.ds_numel * param.element_size() for _, param in frozen_parameters(self._engine))
        settings = self._engine.optimizer._config.checkpoint
        make_room(folder.parent, STATE_BYTES * trained + frozen, settings.keep_last, settings.keep_every)

    def _save_at_once(
        self, folder: Path, unique: str, small: Mapping[str, Any], describe: Describe, save_latest: bool
    ) -> None:
        """Collective over all ranks. If it fails before the commit, nothing is left of it."""
        save, rank = self._seal(folder, unique, small, background=False), world_rank()
        try:
            manifest = describe(gather(together(save.run, SAVING)))
            together(lambda: folders.prepare(folder, manifest, save_latest) if rank == 0 else None, SAVING)
        except BaseException:
            save.remove()
            if rank == 0:
                folders.abandon(folder)
            raise
        together(lambda: self._commit(folder, manifest, save_latest) if rank == 0 else None, COMMITTING)

    def _commit(self, folder: Path, manifest: Manifest, save_latest: bool) -> None:
        settings = self._engine.optimizer._config.checkpoint
        folders.commit(folder, manifest, save_latest)
        say("checkpoint %s committed", folder)
        rotate(folder.parent, settings.keep_last, settings.keep_every)

    def _begin(
        self,
        tag: str,
        folder: Path,
        unique: str,
        small: Mapping[str, Any],
        describe: Describe,
        save_latest: bool,
    ) -> None:
        """Collective over all ranks. Seal, and let a thread do the rest."""

        def commit(shards: list[FileEntry]) -> None:
            manifest = describe(shards)
            try:
                folders.prepare(folder, manifest, save_latest)
            except BaseException:
                folders.abandon(folder)
                raise
            self._commit(folder, manifest, save_latest)

        optimizer = self._engine.optimizer
        save = self._seal(folder, unique, small, background=True)
        attempt = Attempt(folder, unique, self._engine.world_size, optimizer._config.tokens.timeout_s)
        self._background = optimizer.saving = Background(tag, save, attempt, world_rank(), commit)
        self._background.start()

    def _seal(self, folder: Path, unique: str, small: Mapping[str, Any], background: bool) -> Save:
        """Collective over all ranks. The state as it is now."""
        optimizer, saves = self._engine.optimizer, list[Save]()
        files = optimizer.link_files(folder, unique, SAVING)

        def begin() -> None:
            saves.append(optimizer.begin_save(folder, world_rank(), unique, small, files, background))

        try:
            together(begin, SAVING)
        except BaseException:
            for save in saves:
                save.abandon()
            raise
        return saves[0]

    def settle(self) -> None:
        """Collective over all ranks. Wait for the one that is saved in the background; if it failed, only warn."""
        background, self._background = self._background, None
        if background is None:
            return
        # A rank that is gone is found by the first exchange; rank 0 alone would wait for its files.
        failed = [theirs for theirs in gather(_text(background.wait_written())) if theirs]
        failed += [theirs for theirs in gather(_text(background.wait_ended())) if theirs]
        self._engine.optimizer.saving = None
        if failed:
            warn("checkpoint %s was not saved: %s", background.tag, failed[0])
            if world_rank() == 0:
                background.remove()

    def committed(self, tag: str | int | None = None, wait: bool = False) -> bool:
        """Whether a checkpoint that this engine saved is committed. Not collective.

        Parameters
        ----------
        tag : str, optional
            Which; by default the last one.
        wait : bool
            Wait for it.

        Raises
        ------
        StorageError
            If it never will be.
        ConfigError
            If this engine has saved none of that name.
        """
        name = next(reversed(self._folders), None) if tag is None else str(tag)
        if name not in self._folders:
            raise ConfigError(f"this engine has not saved a checkpoint {name!r}, only {list(self._folders)}")
        if self._background is None or self._background.tag != name:
            folder = self._folders[name]
            return is_ours(folder) or is_deepspeeds(folder)
        if wait:
            self._background.wait()
        return self._background.is_committed()

    def _save_deepspeeds(self, folder: Path, client_state: Any, *how: bool) -> bool:
        """What stock ZeRO-3 reads; one of ours of the same tag does not count any more then."""
        done = self._stock_save(str(folder.parent), folder.name, dict(client_state or {}), *how)
        if world_rank() == 0:
            (folder / MANIFEST).unlink(missing_ok=True)
            partial(folder.parent / LATEST).unlink(missing_ok=True)
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

    def _small(self, tensors: list[torch.Tensor], with_frozen: bool) -> dict[str, Any]:
        """What is small, as it is now."""
        small, rng = _random_state()
        if with_frozen:
            small |= {f"frozen/{name}": param.ds_tensor.detach() for name, param in frozen_parameters(self._engine)}
        if world_rank() == 0:
            small |= {f"buffer/{name}": buffer.detach().clone() for name, buffer in kept_buffers(self._engine)}
            small |= {f"client/{number}": tensor.detach().clone() for number, tensor in enumerate(tensors)}
        return {"tensors": small, "rng": rng}

    def _describe(self, tag: str, training: dict[str, Any], client: Any, with_frozen: bool) -> dict[str, Any]:
        """What the manifest says beside the shards."""
        engine, optimizer = self._engine, self._engine.optimizer
        frozen = [FrozenEntry(name=name, shape=tuple(param.ds_shape)) for name, param in frozen_parameters(engine)]
        return {
            "tag": tag,
            "step": optimizer._steps,
            "flipped": optimizer._flipped,
            "world_size": engine.world_size,
            "weight_type": WEIGHT_TYPES[optimizer.fp16_partitioned_groups_flat[0].dtype],
            "frozen": tuple(frozen if with_frozen else ()),
            "training": training,
            "client": client,
            "config": json.loads(json.dumps(engine.config, default=str)),
            "versions": _versions(),
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }


def frozen_parameters(engine: Any) -> list[tuple[str, Any]]:
    """Parameters that are not trained, by name."""
    named = engine.module.named_parameters()
    return [(name, param) for name, param in named if not param.requires_grad and hasattr(param, "ds_tensor")]


def kept_buffers(engine: Any) -> list[tuple[str, torch.Tensor]]:
    """Buffers that a checkpoint holds, by name."""
    names = set(engine._get_buffer_names())
    return [(name, buffer) for name, buffer in engine.module.named_buffers() if name in names]


@cache
def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in ("mlpo_hpc", "torch", "deepspeed")}}


def _text(error: BaseException | None) -> str:
    return "" if error is None else str(error) or type(error).__name__


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
