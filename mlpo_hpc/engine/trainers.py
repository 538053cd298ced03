"""What trainers do wrong in silence: train copies side by side, or train without DeepSpeed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mlpo_hpc.cluster.launch import started_with
from mlpo_hpc.cluster.verdict import together
from mlpo_hpc.errors import ConfigError, MlpoError

USE_CPU = "ACCELERATE_USE_CPU"

TRAINERS = ("accelerate", "lightning", "pytorch_lightning")
"""Modules that start torch.distributed themselves, from variables of only some launchers."""

initialising = False
"""While the engine is made its optimizer takes steps on trial."""


def refuse_copies() -> None:
    """Collective over the training world. See that a trainer splits the data among all ranks.

    accelerate counts processes when it is set up and never again
    (https://huggingface.co/docs/accelerate/package_reference/state): on CPUs, and where no launcher set LOCAL_RANK,
    each takes itself for the only one, and all ranks train on the same data. A trainer that does not know the launcher
    starts a world of one for each process, where each trains a model of its own.

    Raises
    ------
    ConfigError
        If it does not. The same on all ranks.
    """
    import torch.distributed as dist

    together(lambda: _refuse_copies(dist.get_world_size(), os.environ, sys.modules))


def _refuse_copies(world_size: int, environ: Mapping[str, str], modules: Mapping[str, Any]) -> None:
    state = modules.get("accelerate.state")
    counted = state.PartialState._shared_state.get("num_processes", world_size) if state else world_size
    if counted != world_size:
        raise ConfigError(
            f"the training world has {world_size} ranks, but accelerate counted {counted}: all ranks would train on "
            "the same data. Call mlpo_hpc.init_distributed() before TrainingArguments(...) or Accelerator(...); on "
            "CPUs also give TrainingArguments(use_cpu=True), or "
            "Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend='gloo')])"
        )
    launcher, started = started_with(environ)
    if world_size == 1 < started and any(name in modules for name in TRAINERS):
        raise ConfigError(
            f"{launcher} started {started} processes, but this one trains alone: {started} copies would be trained. "
            "Call mlpo_hpc.init_distributed() before the trainer is made, and give Lightning devices= and num_nodes= "
            "as they were started"
        )


@contextmanager
def refuse_plain_steps(engines: Sequence[Any]) -> Iterator[None]:
    """Let no torch optimizer step before there is an engine: a trainer has dropped DeepSpeed then.

    Parameters
    ----------
    engines : sequence
        Those made so far.

    Raises
    ------
    MlpoError
        At the first such step.
    """
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def look(optimizer: Any, *_: Any) -> None:
        if not engines and not initialising:
            raise MlpoError(
                f"{type(optimizer).__name__} steps under mlpo_hpc.offload(), but deepspeed.initialize was not called: "
                f"this training is without DeepSpeed{_reason(os.environ, sys.modules)}"
            )

    hook = register_optimizer_step_pre_hook(look)
    try:
        yield
    finally:
        hook.remove()


def _reason(environ: Mapping[str, str], modules: Mapping[str, Any]) -> str:
    """What accelerate tells, if it trains."""
    state = modules.get("accelerate.state")
    kind = state.AcceleratorState._shared_state.get("distributed_type") if state else None
    if kind is None:
        return ". Give the trainer the DeepSpeed configuration"
    if USE_CPU in environ:
        return f", for {USE_CPU} is set: unset it, and give TrainingArguments(use_cpu=True) on CPUs"
    return (
        f", for accelerate is set up as {getattr(kind, 'value', kind)}: give TrainingArguments(deepspeed=...), or "
        "Accelerator(deepspeed_plugin=...) without cpu=True"
    )
