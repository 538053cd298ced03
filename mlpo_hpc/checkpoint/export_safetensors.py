"""A checkpoint to safetensors files, as transformers loads them: names as in the model, files of bounded size."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from mlpo_hpc.checkpoint.files import write_whole
from mlpo_hpc.checkpoint.read import Reader
from mlpo_hpc.checkpoint.target import Told, share, whole
from mlpo_hpc.checkpoint.tensors_file import Tensor, make_header
from mlpo_hpc.checkpoint.weights import Weights
from mlpo_hpc.cluster.crowd import Ranks, each
from mlpo_hpc.errors import storage_error

INDEX = "model.safetensors.index.json"


def export_safetensors(
    reader: Reader, target: Path, ranks: Ranks, told: Told, kind: str | None, max_file_bytes: int
) -> int:
    """Collective over `ranks`. Write a folder of files, each of them by one rank.

    Parameters
    ----------
    reader : Reader
        Of the checkpoint.
    target : Path
        The folder, which does not exist.
    ranks : Ranks
        That share the work.
    told : callable
        Hears how far this rank is.
    kind : str, optional
        ``BF16``, ``F16`` or ``F32``, see `Weights`.
    max_file_bytes : int
        Of the tensors in one file; a larger tensor has a file of its own.

    Returns
    -------
    int
        Bytes of all tensors.

    Raises
    ------
    ConfigError
        If the target exists, or the weights have another type.
    StorageError
        If something cannot be read or written, or is not what was saved. Nothing is left then.
    """
    with whole(target, ranks) as folder:
        weights = each(ranks, lambda: Weights(reader, kind))
        each(ranks, lambda: weights.check(ranks.rank, ranks.size))
        files = cut(weights.tensors(), max_file_bytes)
        sizes = [_nbytes(tensors) for tensors in files.values()]
        mine = [list(files.items())[number] for number in share(sizes, ranks)]
        each(ranks, lambda: _write_all(folder, mine, weights, told))
        writes = ranks.rank == 0 and len(files) > 1  # transformers looks for the one file, else for the index
        each(ranks, lambda: write_whole(folder / INDEX, _index(files)) if writes else None)
    return sum(sizes)


def cut(tensors: Mapping[str, Tensor], max_file_bytes: int) -> dict[str, dict[str, Tensor]]:
    """Which tensors are in which file, in their order; large items first in each, so that all are aligned."""
    files: list[dict[str, Tensor]] = [{}]
    filled_bytes = 0
    for name, tensor in tensors.items():
        if files[-1] and filled_bytes + tensor.nbytes > max_file_bytes:
            files.append({})
            filled_bytes = 0
        files[-1][name] = tensor
        filled_bytes += tensor.nbytes
    count = len(files)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    return {
        name: dict(sorted(some.items(), key=lambda item: -_item_bytes(item[1])))
        for name, some in zip(names if count > 1 else ["model.safetensors"], files, strict=True)
    }


def _nbytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _item_bytes(tensor: Tensor) -> int:
    return tensor.nbytes // max(1, tensor.numel)


def _write_all(folder: Path, files: list[tuple[str, dict[str, Tensor]]], weights: Weights, told: Told) -> None:
    all_bytes = sum(_nbytes(tensors) for _, tensors in files)
    told(0, all_bytes)
    for name, tensors in files:
        _write(folder / name, tensors, weights, lambda done: told(done, all_bytes))


def _write(path: Path, tensors: Mapping[str, Tensor], weights: Weights, told: Callable[[int], None]) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(make_header(tensors))
            for name in tensors:
                for piece in weights.pieces(name):
                    file.write(piece.data)
                    told(len(piece))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise storage_error("writing the export", str(path), error) from error


def _index(files: Mapping[str, Mapping[str, Tensor]]) -> bytes:
    """Which file has which tensor."""
    places = {name: file for file, tensors in files.items() for name in tensors}
    total_bytes = sum(map(_nbytes, files.values()))
    return json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": places}, indent=2).encode()
