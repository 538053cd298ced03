"""Gradients stay 16-bit until the update.

DeepSpeed keeps those of all local partitions in one flat host buffer in subgroup order; a part of it
becomes the 32-bit gradient only when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from deepspeed.accelerator import get_accelerator

if TYPE_CHECKING:
    from mlpo_hpc.engine.update import BoundState


class Gradients:
    """The part of `OffloadStage3` that keeps and finds gradients."""

    _state: BoundState
    _active: set[int]
    _had_gradient: set[int]
    _offsets: list[int]
    fp16_groups: list[list[Any]]
    grad_partitions_flat_buffer: torch.Tensor
    grad_position: dict[int, tuple[int, int, int]]
    norm_for_param_grads: dict[int, Any]
    micro_step_id: int
    _offload_boundary_param_ids: set[int]
    get_param_id: Any
    _constant_buffered_norm2: Any

    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[torch.Tensor]) -> Any:
        """A parameter first used after micro-step 0 begins from zero, not from the last window's gradient."""
        if self.micro_step_id > 0:
            for param in params_to_release:
                if param.ds_id not in self._offload_boundary_param_ids:
                    self._slice_of(param).zero_()
        return super().partition_grads(params_to_release, grad_partitions)  # type: ignore[misc]

    def _offload_grad_partition_at_boundary(self, param: Any, grad_buffer: torch.Tensor, *_: Any) -> None:
        """Only the norm: the gradient stays 16-bit until the update."""
        self.norm_for_param_grads[self.get_param_id(param)] = self._constant_buffered_norm2(grad_buffer)

    def complete_grad_norm_calculation_for_cpu_offload(self, params: list[Any]) -> Any:
        """Parameters that the last micro-step did not use count too."""
        for param in params:
            key = self.get_param_id(param)
            if param.ds_id in self._active and key not in self.norm_for_param_grads:
                gradient = self._slice_of(param).to(get_accelerator().current_device_name())
                self.norm_for_param_grads[key] = self._constant_buffered_norm2(gradient)
        return super().complete_grad_norm_calculation_for_cpu_offload(params)  # type: ignore[misc]

    def _pre_step(self) -> None:
        """Parameters that no micro-step of this window used have no gradient."""
        self._active = set(self._offload_boundary_param_ids)
        for params in self.fp16_groups if self._had_gradient - self._active else ():
            for param in params:
                if param.ds_id in self._had_gradient and param.ds_id not in self._active:
                    self._slice_of(param).zero_()
        self._had_gradient = set(self._active)
        super()._pre_step()  # type: ignore[misc]

    def _slice_of(self, param: Any) -> torch.Tensor:
        subgroup, offset, numel = self.grad_position[self.get_param_id(param)]
        return self.grad_partitions_flat_buffer.narrow(0, self._offsets[subgroup] + offset, numel)

    def _slice(self, subgroup: int) -> torch.Tensor:
        return self.grad_partitions_flat_buffer.narrow(0, self._offsets[subgroup], self._state.numels[subgroup])

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, torch.Tensor]]:
        """Gradients of this rank: subgroup -> parameter index -> fp32 partition."""
        return {
            subgroup: {index: self._slice_of(param).to(torch.float32) for index, param in enumerate(params)}
            for subgroup, params in enumerate(self.fp16_groups)
        }
