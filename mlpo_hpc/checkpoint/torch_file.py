"""Files as ``torch.save`` writes them, with tensors whose bytes come in pieces: of any size, in little memory.

Such a file is a zip archive without compression: ``data.pkl`` is the pickled object, in which each tensor refers to
one of the entries ``data/0``, ``data/1``, ..., its bytes
(https://docs.pytorch.org/docs/stable/notes/serialization.html#torch-save-format).
"""

from __future__ import annotations

import io
import math
import os
import pickle
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlpo_hpc.errors import storage_error

PROTOCOL = 2
VERSION = b"3\n"
ALIGNMENT_BYTES = 64
"""Of the bytes of a tensor, so that a file can be mapped."""
HEADER_BYTES = 30 + 20
"""Of an entry, without its name and padding: the fixed part, and sizes of 64 bits."""
PADDING = b"FB"
"""The kind of extra field that torch pads with too."""

STORAGES = {
    "F64": "DoubleStorage",
    "F32": "FloatStorage",
    "F16": "HalfStorage",
    "BF16": "BFloat16Storage",
    "I64": "LongStorage",
    "I32": "IntStorage",
    "I16": "ShortStorage",
    "I8": "CharStorage",
    "U8": "ByteStorage",
    "BOOL": "BoolStorage",
    "C64": "ComplexFloatStorage",
}
"""What safetensors calls a type, and torch the bytes of a tensor of it."""
NEWER = {"U64": "uint64", "U32": "uint32", "U16": "uint16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
"""Types whose bytes have no name of their own, and what torch calls them."""
TYPES = STORAGES.keys() | NEWER.keys()


@dataclass(frozen=True)
class Streamed:
    """A tensor in an object that is saved.

    Parameters
    ----------
    dtype : str
        As safetensors calls it, one of `TYPES`.
    shape : tuple of int
        Its shape; items are in row-major order.
    nbytes : int
        Its size.
    pieces : callable
        Gives its bytes in order, as arrays.
    requires_grad : bool
        What the tensor says of itself.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    pieces: Callable[[], Iterable[np.ndarray]]
    requires_grad: bool = False


class Foreign(type):
    """A stand-in for a class that is not imported here: it is pickled by the name of its module and its own."""


def tensors_in(value: Any) -> Iterator[Streamed]:
    """The tensors in dicts, lists and tuples."""
    if isinstance(value, Streamed):
        yield value
    elif isinstance(value, Mapping):
        yield from (tensor for each in value.values() for tensor in tensors_in(each))
    elif isinstance(value, list | tuple):
        yield from (tensor for each in value for tensor in tensors_in(each))


def write(path: Path, value: Any, told: Callable[[int], None]) -> None:
    """Write a file of this user alone, and wait until it is on the device.

    Parameters
    ----------
    path : Path
        The file, which does not exist.
    value : Any
        What ``torch.load`` will give, with tensors for each `Streamed`.
    told : callable
        Hears how many bytes were written.

    Raises
    ------
    StorageError
        If it cannot be written, or a piece cannot be read.
    """
    pickled, tensors = _pickle(value)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            with zipfile.ZipFile(file, "w") as archive:
                archive.writestr(_entry(f"{path.stem}/data.pkl"), pickled)
                archive.writestr(_entry(f"{path.stem}/byteorder"), sys.byteorder)
                for number, tensor in enumerate(tensors):
                    entry = _entry(f"{path.stem}/data/{number}", file.tell())
                    with archive.open(entry, "w", force_zip64=True) as place:
                        for piece in filter(len, tensor.pieces()):  # none done would mean that something begins
                            place.write(piece.data)
                            told(piece.nbytes)
                archive.writestr(_entry(f"{path.stem}/version"), VERSION)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise storage_error("writing the export", str(path), error) from error


def _entry(name: str, begin: int | None = None) -> zipfile.ZipInfo:
    """What comes before the bytes of an entry; if it begins there its bytes are aligned."""
    entry = zipfile.ZipInfo(name)
    if begin is not None:
        field = len(PADDING) + 2
        padding = -(begin + HEADER_BYTES + len(name.encode()) + field) % ALIGNMENT_BYTES
        entry.extra = PADDING + padding.to_bytes(2, "little") + bytes(padding)
    return entry


def _pickle(value: Any) -> tuple[bytes, list[Streamed]]:
    """An object, and the tensors that it refers to, in the order of their numbers."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return file.getvalue(), pickler.tensors


@dataclass(frozen=True)
class _Bytes:
    """Those of a tensor: what is not in the pickle itself."""

    number: int
    storage: str
    items: int


class _Pickler(pickle._Pickler):  # the one in C looks whether a class can be imported
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, PROTOCOL)
        self.tensors: list[Streamed] = []

    def persistent_id(self, value: Any) -> Any:
        """As `torch.load` wants it: ``("storage", type, key, location, items)``."""
        import torch

        if isinstance(value, _Bytes):
            return "storage", getattr(torch, value.storage), str(value.number), "cpu", value.items
        return None

    def reducer_override(self, value: Any) -> Any:
        """How a tensor is made of its bytes."""
        if not isinstance(value, Streamed):
            return NotImplemented
        from torch import _utils

        self.tensors.append(value)
        numel, sizes = math.prod(value.shape), [max(1, size) for size in value.shape]
        strides = tuple(math.prod(sizes[axis:]) for axis in range(1, len(sizes) + 1))
        form: tuple[Any, ...] = (0, value.shape, strides, value.requires_grad, OrderedDict())
        if value.dtype in STORAGES:
            return _utils._rebuild_tensor_v2, (self._bytes(STORAGES[value.dtype], numel), *form)
        import torch

        kind = getattr(torch, NEWER[value.dtype])
        return _utils._rebuild_tensor_v3, (self._bytes("UntypedStorage", value.nbytes), *form, kind)

    def _bytes(self, storage: str, items: int) -> _Bytes:
        return _Bytes(len(self.tensors) - 1, storage, items)

    def save_global(self, value: Any, name: str | None = None) -> None:
        if not isinstance(value, Foreign):
            super().save_global(value, name)  # type: ignore[misc]
            return
        names = f"{value.__module__}\n{value.__name__}\n"
        self.write(pickle.GLOBAL + names.encode())  # type: ignore[attr-defined]
        self.memoize(value)  # type: ignore[attr-defined]
