"""DeepSpeed's ZeRO-3 optimizer with its state on our store.

Towards DeepSpeed the state is offloaded to the CPU and every subgroup is "swappable". `step`
stays DeepSpeed's own; the five methods that it calls for each subgroup get a *position*, which
is mapped to a subgroup here, so that the order may change from step to step. Nothing in that
loop is collective.
"""

from __future__ import annotations

import atexit
import itertools
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from mlpo_hpc.checkpoint.background import Background
from mlpo_hpc.cluster.cores import cores_of_rank, thread_advice
from mlpo_hpc.cluster.node import find_node
from mlpo_hpc.cluster.verdict import gather, together
from mlpo_hpc.engine.contents import describe_contents
from mlpo_hpc.engine.gradients import Gradients
from mlpo_hpc.engine.journaling import Journaling
from mlpo_hpc.engine.native_checkpoint import NativeCheckpoint
from mlpo_hpc.engine.own_checkpoint import OwnCheckpoint
from mlpo_hpc.engine.records import Opened, Part, Records, wants_split
from mlpo_hpc.engine.state_file import StateFile
from mlpo_hpc.engine.translate import Translation
from mlpo_hpc.engine.update import BoundState, StateSpec, probe_optimizer, updates_in_parts
from mlpo_hpc.errors import MlpoError, UnsupportedError
from mlpo_hpc.state.cache import step_order
from mlpo_hpc.state.codec.fp32 import ITEM_BYTES
from mlpo_hpc.state.layout import choose_subgroup_size
from mlpo_hpc.state.store import Needs, Store, open_store, share_bytes
from mlpo_hpc.state.table import Record
from mlpo_hpc.storage.base import round_up
from mlpo_hpc.telemetry.log import say, warn
from mlpo_hpc.telemetry.report import PhaseClock, StepReport
from mlpo_hpc.telemetry.trace import Tell

HOLES_BYTES = 16
"""For each local parameter: what a heap grew by beyond what was used, at most, in trials."""

STOCK_CLASS = DeepSpeedZeroOptimizer_Stage3
"""DeepSpeed's own, whatever stands in its place later."""


class OffloadStage3(Gradients, Journaling, StateFile, OwnCheckpoint, NativeCheckpoint, DeepSpeedZeroOptimizer_Stage3):
    """ZeRO-3 whose fp32 weights and optimizer state live on several tiers at once.

    Built by `deepspeed.initialize` under `mlpo_hpc.offload`; takes what its base takes.
    """

    translation: Translation
    """Set on a subclass for each `offload` context."""
    after_step: Callable[[dict[str, Any]], None] | None = None
    """Given the report of each step."""
    saving: Background | None = None
    """The checkpoint that is saved while training goes on."""

    def __init__(
        self, module: torch.nn.Module, init_optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> None:
        self._node = find_node()
        self._config = self.translation.offload
        self._in_step = False
        self._flipped = False
        self._steps = 0
        self._order: list[int] = []
        self._updated = 0
        self._active: set[int] = set()
        self._had_gradient: set[int] = set()
        self._opened: dict[int, Opened] = {}
        self._bound: dict[int, list[torch.Tensor]] = {}
        self._norm: Any = None
        self._clock = PhaseClock()
        self._reporter = StepReport()
        self._report: dict[str, Any] | None = None
        self._tell: Tell | None = None
        if self.translation.sub_group_size is None:
            kwargs["sub_group_size"] = self._choose_subgroup_size(init_optimizer)
        super().__init__(module, init_optimizer, *args, **kwargs)
        self._watch_forward(module)

    # ---- construction ---------------------------------------------------------------------

    def _choose_subgroup_size(self, optimizer: torch.optim.Optimizer) -> int:
        """Collective over the training world. Equal on all ranks, for norms are reduced by subgroup."""
        world_size = self._node.world_size
        groups = [[p for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]
        numels = [[-(-getattr(p, "ds_numel", p.numel()) // world_size) for p in group] for group in groups]
        share = share_bytes(self._config, self._node, 2 * ITEM_BYTES * sum(map(sum, numels)))
        size = min(gather(choose_subgroup_size(numels, share)))
        say("sub_group_size %d chosen for %.0f MB of host memory a rank", size, share / 1e6)
        return int(size)

    def _create_fp32_partitions(self) -> None:
        specs = together(self._probe)
        numels = [int(numel) for numel in self.fp16_partitioned_groups_flat_numel]
        of_subgroups = [specs[self.sub_group_to_group_id[i]] for i in range(len(numels))]
        self._state = BoundState(of_subgroups, self._make_records(numels, of_subgroups))
        self._state.records.before_change = self._wait_safe
        self._store = self._open_store(numels)
        self.optimizer_swapper = self  # the base hands the new partitions to `initialize_parameters`
        try:
            super()._create_fp32_partitions()
        except BaseException:
            self._store.close()
            raise

    def _make_records(self, numels: list[int], specs: list[StateSpec]) -> Records:
        types = {flat.dtype for flat in self.fp16_partitioned_groups_flat}
        num_vectors = [spec.num_vectors for spec in specs]
        parts = [
            [Part(self.param_names.get(param, "?"), int(param.partition_numel())) for param in params]
            for params in (self.fp16_groups if together(lambda: wants_split(self._config, types)) else ())
        ]
        # A scaler of torch's counts each call as a step.
        in_parts = updates_in_parts(self.optimizer) and not self.torch_autocast_gradscaler
        return Records(numels, num_vectors, self.fp16_partitioned_groups_flat.__getitem__, parts, in_parts)

    def _probe(self) -> list[StateSpec]:
        """What the optimizer keeps, by parameter group; refuses what `translate` cannot see in a configuration."""
        if getattr(self, "use_muon", False) or getattr(self, "zenflow", False):
            raise UnsupportedError(
                "Muon and ZenFlow update outside the subgroup loop: use AdamW or another torch optimizer"
            )
        return [probe_optimizer(self.optimizer, group) for group in self.optimizer.param_groups]

    def _open_store(self, numels: list[int]) -> Store:
        held = self._state.records
        records = [Record(self._label(i), held.nbytes(i), most_bytes=held.most_bytes(i)) for i in range(len(numels))]
        self._contents = describe_contents(self._state, self.fp16_groups, self.param_names)
        gradient_bytes = round_up(held.part_items * ITEM_BYTES)
        needs = Needs(records, gradient_bytes + held.master_bytes, self._later_bytes(sum(numels)), self._contents)
        store = open_store(self._config, self._node, needs)
        if advice := next(filter(None, gather(thread_advice(torch.get_num_threads(), cores_of_rank(self._node)))), ""):
            # Not done for the user: how a subgroup is divided among threads shows in the last bit of some items.
            warn(advice)
        closing = weakref.finalize(self, store.close)
        atexit.register(closing)  # before what was registered earlier ends MPI, unlike `finalize` alone
        if store.trace is not None:
            self._clock.record = store.trace.track("phases")
            self._tell = store.trace.track("compute")
        self._begin_journal(store, numels)
        self._gradient = torch.frombuffer(store.scratch, dtype=torch.float32, count=held.part_items)
        held.lend(store.scratch[gradient_bytes:])
        self._offsets = list(itertools.accumulate(numels, initial=0))
        return store

    def _later_bytes(self, numel: int) -> int:
        """Host memory that DeepSpeed takes after us: the flat gradient, and what it makes of it."""
        nbytes = numel * torch.empty(0, dtype=self.gradient_accumulation_dtype).element_size()
        if self.offload_optimizer_pin_memory and get_accelerator().device_name() != "cpu":
            nbytes += 1 << (nbytes - 1).bit_length()  # a pinned copy; torch rounds it up to a power of two
        overflow_check = 3 * numel if self.dtype == torch.float16 else 0
        return nbytes + overflow_check

    def _label(self, subgroup: int) -> str:
        names = [self.param_names.get(p, "?") for p in self.fp16_groups[subgroup]]
        span = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
        return f"state of subgroup {subgroup} ({span})"

    def initialize_parameters(self, parameters: list[torch.Tensor], src_tensors: list[torch.Tensor]) -> None:
        """Make the first state of every subgroup, one at a time: never a full fp32 copy in memory."""
        assert len(parameters) == len(self._state.numels)
        together(lambda: self._fill(src_tensors))

    def _fill(self, src_tensors: list[torch.Tensor]) -> None:
        fill = list(reversed(self._next_order()))  # so that the first step finds its head in host memory
        pipeline = self._store.pipeline
        pipeline.plan(fill)
        for subgroup in fill:
            opened = self._state.records.open(subgroup, pipeline.create(subgroup), pipeline.resize, new=True)
            self._state.create(opened, src_tensors[subgroup])
            opened.close()
            pipeline.put(subgroup)

    def initialize_optimizer_states(self) -> None:
        """Nothing to do: the records hold it already."""

    def _swappable_optimizer_subgroup(self, sub_group_id: int) -> bool:
        return True

    def _watch_forward(self, module: torch.nn.Module) -> None:
        clock = self._clock
        self._forward_hooks = [
            module.register_forward_pre_hook(lambda *_: clock.start("forward")),
            module.register_forward_hook(lambda *_: clock.stop("forward")),
        ]

    # ---- backward -------------------------------------------------------------------------

    def backward_prologue(self, *args: Any, **kwargs: Any) -> Any:
        self._store.pipeline.check()  # a write that failed since the last step ends the job here
        self._store.pipeline.rhythm.backward()
        self._clock.start("backward")
        return super().backward_prologue(*args, **kwargs)

    def backward_epilogue(self, *args: Any, **kwargs: Any) -> Any:
        result = super().backward_epilogue(*args, **kwargs)
        self._clock.stop("backward")
        return result

    # ---- the step -------------------------------------------------------------------------

    def step(self, closure: Any = None) -> None:
        """Collective over the data-parallel group. Update all subgroups in this step's order."""
        self._order = self._next_order()
        self._updated = 0
        self._in_step = True
        begin = time.perf_counter()
        found_bytes = self._store.pipeline.resident_bytes()
        try:
            self._store.write_index(self._steps)
            super().step(closure)
        finally:
            self._in_step = False
            self._store.pipeline.rhythm.end()
        if self._updated:  # an overflow skips the step: the same head is in host memory still
            self._flipped = not self._flipped
            self._steps += 1
        end = time.perf_counter()
        update_s = end - begin
        if self._store.trace is not None:
            self._store.trace.track("phases")("update", begin, end, 0)
            self._store.trace.flush()
        self._report = self._reporter.build(self._steps, self._clock.take(), update_s, self._store.figures(found_bytes))
        if self.after_step is not None:
            self.after_step(self._report)

    def _next_order(self) -> list[int]:
        return step_order(len(self.fp16_groups), self._config.order, self._flipped)

    def _subgroup_at(self, position: int) -> int:
        return self._order[position] if self._in_step else position

    def _prepare_sub_group(self, position: int, *args: Any) -> Any:
        if self._in_step and position == 0:
            following = step_order(len(self._order), self._config.order, not self._flipped)
            self._store.pipeline.begin(self._order, following)
        return super()._prepare_sub_group(self._subgroup_at(position), *args)

    def unscale_and_clip_grads(self, position: int, total_norm: Any) -> None:
        """Done for each part, when its gradient is there."""
        self._norm = total_norm

    def _optimizer_step(self, position: int) -> None:
        """Gradient, update, 16-bit weights and codec for one part after the other, while it is in the caches."""
        subgroup, begin = self._subgroup_at(position), time.perf_counter()
        opened, scalars = self._opened[subgroup], None
        for part in opened.parts:
            scalars = self._update(subgroup, opened, part)
            self._store.pipeline.put_parts(subgroup, opened.done(part))
        self._state.take_scalars(subgroup, scalars)
        if self._tell is not None:
            self._tell(f"subgroup {subgroup}", begin, time.perf_counter(), 0)

    def _update(self, subgroup: int, opened: Opened, part: slice) -> dict[str, Any] | None:
        master, vectors = self.fp32_partitioned_groups_flat[subgroup], opened.vectors(part)
        self._state.bind(subgroup, vectors, self.optimizer, master)
        master.grad = self._gradient[: part.stop - part.start].copy_(self._slice(subgroup)[part])
        super().unscale_and_clip_grads(subgroup, self._norm)
        super()._optimizer_step(subgroup)
        opened.weights[part].copy_(master.data)
        scalars = self._state.unbind(subgroup, vectors, self.optimizer, master)
        opened.encode(part)
        return scalars

    def _reassign_or_swap_out_partitioned_parameters(self, position: int) -> None:
        """The 16-bit weights are in their flat tensor when the record is closed."""
        subgroup = self._subgroup_at(position)
        self._give_back(subgroup, dirty=True)
        self._unflatten_partitioned_parameters(subgroup)

    def _release_sub_group(self, position: int, *args: Any) -> Any:
        self._updated += self._in_step
        return super()._release_sub_group(self._subgroup_at(position), *args)

    # ---- state in and out of host memory --------------------------------------------------

    def _wait_safe(self, subgroup: int) -> None:
        """A checkpoint that is saved beside training does not need a subgroup as it is any more."""
        if self.saving is not None:
            self.saving.save.wait_safe(subgroup, self._config.tokens.timeout_s)

    def _optimizer_states_and_gradient_swap_in(self, sub_group_id: int, timer_names: Any = None) -> None:
        """Bring a subgroup's state into host memory; outside of a step all of it is wanted, and the 32-bit gradient."""
        for left in list(self._opened):  # by a debug call that raised half way
            self._give_back(left, dirty=True)
        pipeline, master = self._store.pipeline, self.fp32_partitioned_groups_flat[sub_group_id]
        record = pipeline.get(sub_group_id)
        opened = self._state.records.open(sub_group_id, record, pipeline.resize, whole=not self._in_step)
        self._opened[sub_group_id] = opened
        if self._in_step:
            master.grad = torch.empty_like(master)  # DeepSpeed asks for one; there is none before the first part
            return
        self._bound[sub_group_id] = opened.vectors()
        self._state.bind(sub_group_id, self._bound[sub_group_id], self.optimizer, master)
        if getattr(self, "grad_partitions_flat_buffer", None) is not None:
            master.grad = self._slice(sub_group_id).to(torch.float32)

    def _optimizer_states_and_gradient_swap_out(self, sub_group_id: int, timer_names: Any = None) -> None:
        if not self._in_step:  # where it was done when the weights were
            self._give_back(sub_group_id, dirty=True)

    def _release_swap_buffers(self, sub_group_id: int) -> None:
        self._give_back(sub_group_id, dirty=False)

    def _writeback_swap_state(self, sub_group_id: int, write_opt_state: bool, write_gradients: bool) -> None:
        """Keep what `safe_set_*` changed; a gradient is rounded to the type of DeepSpeed's buffer."""
        if write_gradients:
            gradient = self.fp32_partitioned_groups_flat[sub_group_id].grad
            assert gradient is not None
            before = self._slice(sub_group_id).clone()
            self._slice(sub_group_id).copy_(gradient)
            changed = before != self._slice(sub_group_id)
            for param in self.fp16_groups[sub_group_id]:
                _, offset, numel = self.grad_position[self.get_param_id(param)]
                if changed.narrow(0, offset, numel).any():
                    self._offload_boundary_param_ids.add(param.ds_id)
        self._give_back(sub_group_id, dirty=write_opt_state)

    def _give_back(self, subgroup: int, dirty: bool) -> None:
        """Close a record and hand it back, changed or not."""
        opened, vectors = self._opened.pop(subgroup), self._bound.pop(subgroup, None)
        if vectors is not None:
            master = self.fp32_partitioned_groups_flat[subgroup]
            self._state.take_scalars(subgroup, self._state.unbind(subgroup, vectors, self.optimizer, master))
        try:
            opened.close(changed=dirty)
        finally:
            self._store.pipeline.put(subgroup, dirty or opened.altered)

    def _get_fp32_opt_state_partition(self, param: Any, release_swap_buffers: bool, optim_state_key: Any = None) -> Any:
        return self._own_copy(super()._get_fp32_opt_state_partition, param, release_swap_buffers, optim_state_key)

    def _get_fp32_grad_state_partition(self, param: Any, release_swap_buffers: bool) -> Any:
        return self._own_copy(super()._get_fp32_grad_state_partition, param, release_swap_buffers)

    def _own_copy(self, get: Any, param: Any, release_swap_buffers: bool, *args: Any) -> Any:
        """What is handed out when its buffer is released must not change with the buffer."""
        partition, subgroup = get(param, False, *args)
        if release_swap_buffers:
            partition = partition.clone()
            self._release_swap_buffers(subgroup)
        return partition, subgroup

    # ---- figures and the end --------------------------------------------------------------

    def keep_heap(self, reuse: Callable[[int, int], bool]) -> None:
        """Ask for freed memory to be reused, if what this model may leave in holes can be spared."""
        reuse(HOLES_BYTES * sum(self._state.numels), self._node.node_size)

    def offload_flush(self) -> None:
        """Wait until nothing of this rank is on its way to or from a tier."""
        self._store.pipeline.flush()

    def offload_report(self) -> dict[str, Any]:
        """Figures of the last step; see `StepReport.build` for the keys.

        Raises
        ------
        MlpoError
            Before the first step.
        """
        if self._report is None:
            raise MlpoError("there is no report before the first optimizer step")
        return self._report

    def destroy(self) -> None:
        """Wait for a checkpoint in the background, end the I/O threads, drop files and memory; then DeepSpeed's own.

        Raises
        ------
        StorageError
            If that checkpoint was not saved.
        """
        for hook in self._forward_hooks:
            hook.remove()
        with ExitStack() as endings:
            endings.callback(super().destroy)
            endings.callback(self._store.close)
            if self.journal is not None:
                endings.callback(self.journal.close)
            endings.callback(lambda: self._store.leave_behind(self._steps))
            if self.saving is not None:
                self.saving.wait()
