"""Files in the safetensors format, read and written in pieces: a header that says where the bytes of each tensor are.

The format: 8 bytes (length of the header), the header in JSON, padded by spaces, then the tensors without gaps
(https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlpo_hpc.checkpoint.files import open_file
from mlpo_hpc.errors import CorruptState, here, storage_error

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""More is refused by the safetensors library too."""


@dataclass(frozen=True)
class Tensor:
    """What a header says of a tensor.

    Parameters
    ----------
    dtype : str
        As the format calls it, such as ``BF16``.
    shape : tuple of int
        Its shape.
    nbytes : int
        Its size.
    offset : int
        Where it begins in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int = 0

    @property
    def numel(self) -> int:
        """Its items."""
        return math.prod(self.shape)


def make_header(tensors: Mapping[str, Tensor]) -> bytes:
    """The beginning of a file in which tensors follow in this order; their own offsets do not matter."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses files without it
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        described[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors in a file.

    Raises
    ------
    CorruptState
        If it is not in this format, or shorter than its header says.
    """
    fd = open_file(path)
    try:
        length = int.from_bytes(_read(fd, path, 0, LENGTH_BYTES), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {length} bytes")
        begin = LENGTH_BYTES + length
        described = json.loads(_read(fd, path, LENGTH_BYTES, length))
        described.pop("__metadata__", None)
        found = {name: _tensor(values, begin) for name, values in described.items()}
        longest = max((tensor.offset + tensor.nbytes for tensor in found.values()), default=begin)
        if longest > os.fstat(fd).st_size:
            raise ValueError(f"tensors up to byte {longest} of {os.fstat(fd).st_size}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptState(f"no safetensors file ({error}): {here(path)}") from error
    finally:
        os.close(fd)
    return found


def _tensor(values: Mapping[str, Any], begin: int) -> Tensor:
    first, last = values["data_offsets"]
    tensor = Tensor(str(values["dtype"]), tuple(int(size) for size in values["shape"]), last - first, begin + first)
    if not 0 <= first <= last or (tensor.nbytes % tensor.numel if tensor.numel else tensor.nbytes):
        raise ValueError(f"bytes {first} to {last} for {tensor.numel} items")
    return tensor


def read_bytes(path: Path, offset: int, nbytes: int) -> bytes:
    """A range of a file.

    Raises
    ------
    CorruptState
        If it ends before.
    StorageError
        If it cannot be read.
    """
    fd = open_file(path)
    try:
        return _read(fd, path, offset, nbytes)
    finally:
        os.close(fd)


def _read(fd: int, path: Path, offset: int, nbytes: int) -> bytes:
    pieces: list[bytes] = []
    while nbytes:
        try:
            piece = os.pread(fd, nbytes, offset)
        except OSError as error:
            raise storage_error("reading tensors", str(path), error) from error
        if not piece:
            raise CorruptState(f"the file ends at byte {offset}, {nbytes} more are wanted: {here(path)}")
        pieces.append(piece)
        offset, nbytes = offset + len(piece), nbytes - len(piece)
    return b"".join(pieces)
