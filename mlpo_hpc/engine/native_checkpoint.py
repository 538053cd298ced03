"""DeepSpeed's own checkpoint files, subgroup by subgroup.

State is copied to one unnamed file and handed to DeepSpeed as tensors mapped from it: what
`torch.save` then reads is page cache, which the kernel takes back, never anonymous memory.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, LOSS_SCALER, OPTIMIZER_STATE_DICT

from mlpo_hpc.engine.update import set_group
from mlpo_hpc.errors import ConfigError, UnsupportedError
from mlpo_hpc.storage.filesystem import describe
from mlpo_hpc.storage.posix import open_unnamed

if TYPE_CHECKING:
    from mlpo_hpc.engine.update import BoundState
    from mlpo_hpc.state.store import Store


SUB_GROUP_SIZE = "sub_group_size"  # a key of ours beside DeepSpeed's
PARTITION_GROUPS = "ds_zero_partition_groups"


class NativeCheckpoint:
    """The part of `OffloadStage3` that saves and loads DeepSpeed's files."""

    _store: Store
    _state: BoundState
    optimizer: torch.optim.Optimizer
    fp32_partitioned_groups_flat: list[torch.Tensor]
    fp16_partitioned_groups_flat: list[torch.Tensor]

    def _rigid_state_dict(self) -> dict[str, Any]:
        copies = self._copy_all()
        masters = self.fp32_partitioned_groups_flat
        for subgroup, master in enumerate(masters):
            vectors = self._state.records.plain_vectors(subgroup, copies[subgroup])
            self._state.bind(subgroup, vectors, self.optimizer, master)
        try:
            state_dict: dict[str, Any] = super()._rigid_state_dict()  # type: ignore[misc]
            state_dict[FP32_FLAT_GROUPS] = [master.detach() for master in masters]
            state_dict[SUB_GROUP_SIZE] = self.sub_group_size  # type: ignore[attr-defined]
        finally:
            for master in masters:
                self._state.forget(self.optimizer, master)
        return state_dict

    def _copy_all(self) -> list[memoryview]:
        """A copy of every record that stays valid while it is referred to, outside the budget and outside RAM."""
        pipeline, records = self._store.pipeline, self._state.records
        num_subgroups = len(self._state.numels)
        if not pipeline.tiers and records.codec == "fp32":
            return [self._look(subgroup) for subgroup in range(num_subgroups)]
        on_disk = [place for place in self._store.places if not place.filesystem.is_memory] or self._store.places
        roomiest = max(on_disk, key=lambda place: describe(place.path).free_bytes)
        slot_bytes = max(records.most_bytes(i) for i in range(num_subgroups))
        file = open_unnamed(roomiest.path, slot_bytes * num_subgroups)
        try:
            for subgroup in range(num_subgroups):
                opened = records.open(subgroup, pipeline.get(subgroup), pipeline.resize, whole=True)
                try:
                    file.write(subgroup * slot_bytes, opened.record)
                finally:
                    opened.close(changed=False)
                    pipeline.put(subgroup, opened.altered)
            mapped = memoryview(mmap.mmap(file.fd, 0))
        finally:
            file.close()
        return [mapped[i * slot_bytes : i * slot_bytes + records.most_bytes(i)] for i in range(num_subgroups)]

    def _look(self, subgroup: int) -> memoryview:
        record = self._store.pipeline.get(subgroup)
        self._store.pipeline.put(subgroup, dirty=False)
        return record

    def _rigid_load_state_dict(self, state_dict: dict[str, Any], load_optimizer_states: bool = True) -> None:
        self.loss_scaler = state_dict[LOSS_SCALER]
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.overflow = state_dict["overflow"]
        placement = state_dict.get(PARTITION_GROUPS)
        if placement is not None and placement != self._zero3_partition_group_metadata():  # type: ignore[attr-defined]
            raise ConfigError("the checkpoint was saved with another placement of experts; load it with the same one")
        weights = state_dict[FP32_FLAT_GROUPS]
        self._check_sizes([int(saved.numel()) for saved in weights], state_dict.get(SUB_GROUP_SIZE))
        states: dict[int, Any] = {}
        if load_optimizer_states:
            states = self._load_groups(state_dict[OPTIMIZER_STATE_DICT])
        for subgroup, saved in enumerate(weights):
            self._overwrite(subgroup, saved, states.get(subgroup))

    def _check_sizes(self, saved: list[int], size: int | None) -> None:
        if saved != self._state.numels:
            raise ConfigError(
                f"the checkpoint was cut into {len(saved)} subgroups of up to {max(saved)} parameters a rank, this run "
                f"into {len(self._state.numels)} of up to {max(self._state.numels)}. Set zero_optimization."
                f"sub_group_size to {size or 'what it was when the checkpoint was saved'}"
            )

    def _load_groups(self, saved: dict[str, Any]) -> dict[int, Any]:
        """Restore hyper-parameters by group; return the saved state by subgroup."""
        order: list[int] = []
        for index in range(len(self.optimizer.param_groups)):
            order += [s for s in range(len(self._state.numels)) if self.sub_group_to_group_id[s] == index]  # type: ignore[attr-defined]
        for group, kept in zip(self.optimizer.param_groups, saved["param_groups"], strict=True):
            set_group(group, kept)
        return {subgroup: saved["state"].get(packed, {}) for packed, subgroup in enumerate(order)}

    def _overwrite(self, subgroup: int, weights: torch.Tensor, state: dict[str, Any] | None) -> None:
        """Set master weights and state, and the 16-bit weights from them."""
        pipeline = self._store.pipeline
        opened = self._state.records.open(subgroup, pipeline.get(subgroup), pipeline.resize)
        try:
            self._state.restore(subgroup, opened, weights, state)
        finally:
            opened.close()
            pipeline.put(subgroup)
        self._unflatten_partitioned_parameters(subgroup)  # type: ignore[attr-defined]

    def _restore_from_bit16_weights(self) -> None:
        for subgroup, weights in enumerate(self.fp16_partitioned_groups_flat):
            self._overwrite(subgroup, weights, None)

    def load_hp_checkpoint_state_from_checkpoint_dir_stage3(self, checkpoint_dir: str) -> None:
        """Universal checkpoints cannot be loaded yet."""
        raise UnsupportedError("universal checkpoints cannot be loaded by the offload engine; load a ZeRO checkpoint")

    def load_module_checkpoint_state_from_checkpoint_dir_stage3(self, checkpoint_dir: str, *_: Any) -> None:
        """Universal checkpoints cannot be loaded yet."""
        raise UnsupportedError("universal checkpoints cannot be loaded by the offload engine; load a ZeRO checkpoint")
