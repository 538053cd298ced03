"""Multi-level, multi-path offload of optimizer state for DeepSpeed ZeRO-3.

Importing this package imports neither MPI nor torch nor deepspeed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from mlpo_hpc.config import OffloadConfig
from mlpo_hpc.errors import MlpoError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    from mlpo_hpc.cluster.signals import StopRequest

__version__ = "0.1.0"
__all__ = [
    "REQUEUE_EXIT_CODE",
    "MlpoError",
    "OffloadConfig",
    "StopRequest",
    "__version__",
    "init_distributed",
    "initialize",
    "offload",
]

REQUEUE_EXIT_CODE = 85
"""With it a job that was asked to stop and has saved asks its batch script to requeue it."""


def init_distributed() -> None:
    """Collective over all ranks. Start torch.distributed from whatever launched this process.

    Works under srun, mpirun (Open MPI, MPICH), torchrun and alone; values already set are
    respected. `initialize` does it too: call it earlier to build a model under
    ``deepspeed.zero.Init``.
    """
    from mlpo_hpc.engine.inject import init_distributed as engine_init_distributed

    engine_init_distributed()


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """Collective over all ranks. Like ``deepspeed.initialize``, with our offload engine inside.

    Takes and returns what `deepspeed.initialize` does. The DeepSpeed configuration may hold the
    section ``mlp_offload`` (see `OffloadConfig`); one without it works unchanged.

    Returns
    -------
    tuple
        ``engine, optimizer, training_dataloader, lr_scheduler``.

    Raises
    ------
    MlpoError
        Bad configuration, unusable tier, or a DeepSpeed feature that does not fit: the same
        error on every rank, before any training.
    """
    from mlpo_hpc.engine.inject import initialize as engine_initialize

    return engine_initialize(*args, **kwargs)


def offload(ds_config: Mapping[str, Any] | str | PathLike[str]) -> AbstractContextManager[None]:
    """Context in which any `deepspeed.initialize` builds our offload engine.

    Open it around whatever calls DeepSpeed for you: ``trainer.train()``,
    ``accelerator.prepare(...)``.

    Parameters
    ----------
    ds_config : dict or path of a JSON file
        The DeepSpeed configuration, with or without the section ``mlp_offload``.

    Raises
    ------
    MlpoError
        On leaving, if nothing was initialised under it: the training would have been stock.
    """
    from mlpo_hpc.engine.inject import offload as engine_offload

    return engine_offload(ds_config)


def __getattr__(name: str) -> Any:
    """`StopRequest`, imported when it is used."""
    if name == "StopRequest":
        from mlpo_hpc.cluster.signals import StopRequest

        return StopRequest
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
