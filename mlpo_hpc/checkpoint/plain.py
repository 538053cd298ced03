"""Plain values and tensors as JSON and a list of tensors, and back: what a checkpoint may hold without being code.

A tuple is ``{"tuple": [...]}``, a dict ``{"dict": [[key, value], ...]}``, a tensor ``{"tensor": NUMBER}``; other
values are what JSON has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mlpo_hpc.errors import ConfigError, CorruptState

if TYPE_CHECKING:
    import torch


def encode(value: Any, tensors: list[torch.Tensor], where: str) -> Any:
    """A value for JSON.

    Parameters
    ----------
    value : Any
        Numbers, strings, booleans, None, tensors, and lists, tuples and dicts of them.
    tensors : list of torch.Tensor
        Gets the tensors in it.
    where : str
        What it is, for messages.

    Raises
    ------
    ConfigError
        If there is something else in it, naming the key.
    """
    import numpy as np
    import torch

    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return encode(value.item(), tensors, where)
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach().clone())  # the same one may be there twice, which safetensors refuses
        return {"tensor": len(tensors) - 1}
    if isinstance(value, list):
        return [encode(item, tensors, f"{where}[{number}]") for number, item in enumerate(value)]
    if type(value) is tuple:
        return {"tuple": encode(list(value), tensors, where)}
    if isinstance(value, dict):
        return {
            "dict": [
                [encode(key, [], where), encode(item, tensors, f"{where}[{key!r}]")] for key, item in value.items()
            ]
        }
    raise ConfigError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint does not hold: it is "
        "read without running code. Give numbers, strings, tensors, and lists, tuples and dicts of them"
    )


def decode(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The value that `encode` was given.

    Raises
    ------
    CorruptState
        If it is not what `encode` makes.
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"tuple": list(items)} if len(value) == 1:
            return tuple(decode(items, tensors))
        case {"tensor": int(number)} if len(value) == 1 and 0 <= number < len(tensors):
            return tensors[number]
        case {"dict": list(items)} if len(value) == 1:
            return {key: decode(item, tensors) for key, item in items}
    raise CorruptState(f"the manifest has a value that nobody wrote: {str(value)[:100]}")
