"""Plain values and tensors as JSON and a list of tensors, and back: what a checkpoint may hold without being code.

A tuple is ``{"tuple": [...]}``, a dict ``{"dict": [[key, value], ...]}``, a tensor ``{"tensor": NUMBER}``; other
values are what JSON has.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlpo_hpc.errors import ConfigError, CorruptState, here

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
                [_encode_key(key, where), encode(item, tensors, f"{where}[{key!r}]")] for key, item in value.items()
            ]
        }
    raise ConfigError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint does not hold: it is "
        "read without running code. Give numbers, strings, tensors, and lists, tuples and dicts of them"
    )


def _encode_key(key: Any, where: str) -> Any:
    tensors: list[torch.Tensor] = []
    encoded = encode(key, tensors, where)
    if tensors:
        raise ConfigError(f"{where} has a tensor as a key, which nothing but this very tensor would find again")
    return encoded


def decode(value: Any, tensors: Sequence[Any], path: Path) -> Any:
    """The value that `encode` was given.

    Parameters
    ----------
    value : Any
        What `encode` made of it.
    tensors : sequence
        The tensors in it, or what is to be in their places.
    path : Path
        The file that has it, for messages.

    Raises
    ------
    CorruptState
        If it is not what `encode` makes.
    """
    if isinstance(value, list):
        return [decode(item, tensors, path) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"tuple": list(items)} if len(value) == 1:
            return tuple(decode(items, tensors, path))
        case {"tensor": int(number)} if len(value) == 1 and 0 <= number < len(tensors):
            return tensors[number]
        case {"dict": list(items)} if len(value) == 1 and all(_is_pair(item) for item in items):
            keys = [decode(key, [], path) for key, _ in items]
            if all(_is_key(key) for key in keys):
                return {key: decode(item, tensors, path) for key, (_, item) in zip(keys, items, strict=True)}
    raise CorruptState(f"the manifest has a value that nobody wrote: {str(value)[:100]}, {here(path)}")


def _is_pair(item: Any) -> bool:
    return isinstance(item, list) and len(item) == 2


def _is_key(key: Any) -> bool:
    """A tuple is one if all that is in it is."""
    return all(map(_is_key, key)) if isinstance(key, tuple) else isinstance(key, Hashable)
