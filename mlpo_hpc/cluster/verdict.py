"""One verdict for all ranks: what one finds wrong, every rank raises."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any, TypeVar

from mlpo_hpc import errors

T = TypeVar("T")


def gather(value: Any) -> list[Any]:
    """Collective over the training world. The values of all ranks, by world rank."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def any_rank(value: bool) -> bool:
    """Collective over the training world. Whether it is so on any rank; one reduction, far cheaper than `gather`."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    found = torch.tensor(int(value), device=_reducing_device())
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found.item())


def _reducing_device() -> Any:
    """Host memory where a backend reduces there (gloo, MPI); else (NCCL and its kin) the accelerator in use."""
    import torch
    import torch.distributed as dist

    return torch.device("cpu") if "cpu:" in dist.get_backend_config() else torch.accelerator.current_accelerator()


def world_rank() -> int:
    """This rank's number in the training world; 0 without one."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else 0


STARTING = "the offload engine cannot start"


def raise_together(error: BaseException | None, failed: str = STARTING) -> None:
    """Collective over the training world. If any rank has an error, all raise the same one.

    Parameters
    ----------
    error : BaseException or None
        This rank's.
    failed : str
        What cannot be done then: the message begins with it.

    Raises
    ------
    MlpoError
        Of the lowest failing rank's class, naming host, rank and message of each failing rank.
    """
    mine = None
    if error is not None:
        text = str(error) if isinstance(error, errors.MlpoError) else f"{type(error).__name__}: {error}"
        mine = (type(error).__name__, socket.gethostname(), os.environ.get("RANK", "0"), text)
    found = [entry for entry in gather(mine) if entry is not None]
    if not found:
        return
    kind = getattr(errors, found[0][0], errors.MlpoError)
    texts: dict[str, list[str]] = {}
    for _, host, rank, text in found:
        texts.setdefault(text, []).append(f"rank {rank} on {host}")
    lines = [f"{', '.join(ranks)}: {text}" for text, ranks in texts.items()]
    verdict = kind("\n".join([f"{failed}:", *lines]))
    verdict.on_all_ranks = True
    raise verdict from None  # the message says it all; the first error would be shown before it


def together(action: Callable[[], T], failed: str = STARTING) -> T:
    """Collective over the training world. Do something alone; if it fails on any rank, raise on all."""
    results: list[T] = []
    failure: Exception | None = None
    try:
        results.append(action())
    except Exception as error:  # whatever it is: the other ranks wait in the next collective
        failure = error
    raise_together(failure, failed)
    return results[0]
