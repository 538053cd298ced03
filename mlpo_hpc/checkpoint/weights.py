"""The tensors of the model in a checkpoint, as bytes, in pieces of bounded size: without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from mlpo_hpc.checkpoint.files import check_file
from mlpo_hpc.checkpoint.read import MASTER, WEIGHT_BYTES, Reader
from mlpo_hpc.checkpoint.tensors_file import Tensor, read_bytes, read_header
from mlpo_hpc.errors import ConfigError, CorruptState, here
from mlpo_hpc.state.codec.fp32 import ITEM_BYTES

NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""Types of weights, as safetensors calls them."""
PIECE_ITEMS = 2**22


class Weights:
    """Trained and frozen parameters and buffers.

    Parameters
    ----------
    reader : Reader
        Of the checkpoint.
    kind : str, optional
        ``F32``: the master weights, frozen 16-bit parameters converted, which is exact. Else the type of the model's
        weights: all as it was saved. None: the latter.

    Raises
    ------
    ConfigError
        If the model has weights of another type.
    CorruptState
        If a file is missing or damaged; `check` tells the rest.
    """

    def __init__(self, reader: Reader, kind: str | None = None) -> None:
        self._reader = reader
        self.saved = NAMES[reader.manifest.weight_type]
        self.kind = kind or self.saved
        if self.kind not in ("F32", self.saved):
            raise ConfigError(
                f"the model's weights are {reader.manifest.weight_type}: they are exported as such, or as fp32, and "
                f"not in another type: {here(reader.folder)}"
            )
        self._header = lru_cache(4)(self._read_header)  # partitions of a tensor are read rank by rank
        self._small = {**self._frozen(), **self._buffers()}

    def check(self, first: int, step: int) -> None:
        """Compare the files of frozen parameters and buffers with their checksums, those of every so many shards.

        Raises
        ------
        CorruptState
            If one is not what was saved.
        """
        for shard in self._reader.shards[first::step]:
            check_file(self._reader.folder, shard.tensors)

    def _read_header(self, rank: int) -> dict[str, Tensor]:
        return read_header(self._reader.folder / self._reader.shards[rank].tensors.file)

    def _frozen(self) -> dict[str, tuple[Tensor, str]]:
        header = self._header(0)
        found = {}
        for entry in self._reader.manifest.frozen:
            part = self._part(header, 0, f"frozen/{entry.name}")
            found[entry.name] = (_of_shape(part, entry.shape), f"frozen/{entry.name}")
        return found

    def _buffers(self) -> dict[str, tuple[Tensor, str]]:
        buffers = {key: tensor for key, tensor in self._header(0).items() if key.startswith("buffer/")}
        return {key.removeprefix("buffer/"): (tensor, key) for key, tensor in buffers.items()}

    def tensors(self) -> dict[str, Tensor]:
        """What there is by name: trained parameters, frozen ones, buffers."""
        item_bytes = ITEM_BYTES if self.kind == "F32" else WEIGHT_BYTES[self._reader.manifest.weight_type]
        found = {}
        for name in self._reader.parameters:
            shape = self._reader.shape(name)
            found[name] = Tensor(self.kind, shape, math.prod(shape) * item_bytes)
        for name, (tensor, key) in self._small.items():
            converts = self._converts(tensor, key)
            found[name] = Tensor("F32", tensor.shape, ITEM_BYTES * tensor.numel) if converts else tensor
        return found

    def _converts(self, tensor: Tensor, key: str) -> bool:
        return key.startswith("frozen/") and self.kind == "F32" and tensor.dtype in ("BF16", "F16")

    def pieces(self, name: str) -> Iterator[np.ndarray]:
        """The bytes of a tensor in order.

        Raises
        ------
        CorruptState
            If what is read is not what was saved, naming file and parameter.
        """
        if name in self._small:
            tensor, key = self._small[name]
            for piece in self._small_pieces(tensor, key):
                yield _as_fp32(piece, tensor.dtype) if self._converts(tensor, key) else piece
            return
        numel = math.prod(self._reader.shape(name))
        for first in range(0, numel, PIECE_ITEMS):
            yield self._trained(name, first, min(PIECE_ITEMS, numel - first)).reshape(-1).view(np.uint8)

    def _trained(self, name: str, first: int, numel: int) -> np.ndarray:
        if self.kind == self.saved:
            return self._reader.weights(name, first, numel)
        return self._reader.values(name, MASTER, first, numel)

    def _small_pieces(self, tensor: Tensor, key: str) -> Iterator[np.ndarray]:
        """Of what is partitioned the last partitions are padded."""
        size, left = tensor.nbytes // max(1, tensor.numel), tensor.numel
        for rank in range(self._reader.manifest.world_size if key.startswith("frozen/") else 1):
            part = self._part(self._header(rank), rank, key)
            path = self._reader.folder / self._reader.shards[rank].tensors.file
            mine = min(left, part.numel)
            for first in range(0, mine, PIECE_ITEMS):
                count = min(PIECE_ITEMS, mine - first)
                yield np.frombuffer(read_bytes(path, part.offset + first * size, count * size), np.uint8)
            left -= mine
        if left:
            raise CorruptState(f"the checkpoint lacks {left} items of {key}: {here(self._reader.folder)}")

    def _part(self, header: dict[str, Tensor], rank: int, key: str) -> Tensor:
        if key not in header:
            raise CorruptState(f"the shard of rank {rank} lacks {key}: {here(self._reader.folder)}")
        return header[key]


def _of_shape(part: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A whole parameter, of which a rank has a part."""
    return Tensor(part.dtype, shape, math.prod(shape) * (part.nbytes // max(1, part.numel)))


def _as_fp32(data: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        wide: np.ndarray = data.view(np.uint16).astype(np.uint32) << 16
        return wide.view(np.uint8)
    return data.view(np.float16).astype(np.float32).view(np.uint8)
