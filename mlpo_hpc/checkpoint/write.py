"""Write the shard of one rank: its chunks, its small tensors, and what says which bytes are what."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from mlpo_hpc.checkpoint.copy_on_write import CopyOnWrite
from mlpo_hpc.checkpoint.documents import encode
from mlpo_hpc.checkpoint.files import file_checksum, replace_whole, sync_file
from mlpo_hpc.checkpoint.manifest import Chunk, FileEntry, PieceEntry, RecordEntry, Shard
from mlpo_hpc.errors import storage_error
from mlpo_hpc.state.cache import Buffer
from mlpo_hpc.storage.base import ALIGNMENT_BYTES, round_up
from mlpo_hpc.storage.pace import Pace
from mlpo_hpc.storage.posix import drop_pages, open_posix, write_out

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 2**22
"""What is checked as one: a reader that wants a part of it reads all of it."""
DIRTY_BYTES = 2**26
"""Written pages that may wait in host memory for the device."""


ENDINGS = {"shard": "json", "tensors": "safetensors", "state": "bin"}


class ShardWriter:
    """The files of one rank in the folder of a checkpoint.

    Parameters
    ----------
    folder : Path
        Of the checkpoint; it exists.
    rank : int
        Whose shard.
    unique : str
        A part of the files' names, of this attempt alone: what an earlier one left is not touched.
    pace : Pace, optional
        How it goes on beside other traffic.

    Raises
    ------
    StorageError
        Of this and all methods: if something cannot be written; `TierFull` if there is no room.
    """

    def __init__(self, folder: Path, rank: int, unique: str, pace: Pace | None = None) -> None:
        self._folder, self._rank = folder, rank
        self.pace = pace or Pace()
        self._names = {kind: f"{kind}-{rank:05d}-{unique}" for kind in ENDINGS}
        self.adopted: list[str] = []
        """Files of the checkpoint that others made, and that go with this shard."""
        self._path = folder / f"{self._names['state']}.bin"
        self._offset = self._synced = 0
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise storage_error("creating a file of the checkpoint", str(self._path), error) from error
        # Beside training each piece is moved as state is: nothing is left to be written at another's expense.
        self._past_cache = None if self.pace.is_free else open_posix(str(self._path))
        self._bounce: Buffer | None = None

    def add(self, data: CopyOnWrite) -> tuple[Chunk, ...]:
        """Append bytes; the chunks that they are now."""
        self._offset = round_up(self._offset)
        with data.reading() as view:
            nbytes = len(view)
        return tuple(self._append(data, slice(at, at + CHUNK_BYTES)) for at in range(0, nbytes, CHUNK_BYTES))

    def add_whole(self, data: memoryview, checksum: int) -> Chunk:
        """Append bytes whose checksum is known, as one chunk."""
        self._offset = begin = round_up(self._offset)
        for at in range(0, len(data), CHUNK_BYTES):
            with self.pace.moving():
                self._move(data[at : at + CHUNK_BYTES])
        return Chunk(file=self._path.name, offset=begin, nbytes=len(data), checksum=f"{checksum:016x}")

    def _append(self, data: CopyOnWrite, part: slice) -> Chunk:
        begin = self._offset
        with self.pace.moving(), ExitStack() as reading:
            piece = reading.enter_context(data.reading())[part]
            if self._past_cache is not None:
                self._bounce = self._bounce or Buffer(CHUNK_BYTES)  # aligned
                piece = self._bounce.fill(piece)
                reading.close()  # the device is not waited for by an update
            checksum = xxhash.xxh3_64_hexdigest(piece)  # while it is in the processor's cache
            self._move(piece)
        return Chunk(file=self._path.name, offset=begin, nbytes=len(piece), checksum=checksum)

    def _move(self, piece: memoryview) -> None:
        if self._past_cache is not None and _is_aligned(piece):
            self._past_cache.write(self._offset, piece)
            self._offset = self._synced = self._offset + len(piece)
            return
        self._write(piece)
        if self._offset - self._synced >= DIRTY_BYTES or self._past_cache is not None:
            self._drop()

    def _write(self, piece: memoryview) -> None:
        done = 0
        while done < len(piece):
            try:
                done += os.pwrite(self._fd, piece[done:], self._offset + done)
            except OSError as error:
                raise storage_error("writing the checkpoint", str(self._path), error) from error
        self._offset += len(piece)

    def _drop(self) -> None:
        """Pages of the page cache would be host memory outside the budget."""
        nbytes = self._offset - self._synced
        write_out(self._fd, self._synced, nbytes, str(self._path))
        drop_pages(self._fd, self._synced, nbytes)
        self._synced = self._offset

    def finish(
        self,
        records: Sequence[RecordEntry],
        pieces: Sequence[PieceEntry],
        tensors: Mapping[str, torch.Tensor],
        rng: Mapping[str, Any],
    ) -> FileEntry:
        """Write the rest; what the manifest says of this shard. All of it is on the device then.

        The shard itself appears last, by a rename: whoever sees it may rely on it.
        """
        from safetensors.torch import save_file

        path = self._folder / f"{self._names['tensors']}.safetensors"
        try:
            os.fsync(self._fd)
            drop_pages(self._fd, 0, self._offset)
            save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path)
            path.chmod(0o600)
        except OSError as error:
            raise storage_error("writing the checkpoint", str(path), error) from error
        sync_file(path)
        entry = FileEntry(file=path.name, nbytes=path.stat().st_size, checksum=file_checksum(path))
        shard = Shard(rank=self._rank, records=tuple(records), pieces=tuple(pieces), tensors=entry, rng=dict(rng))
        data = encode(shard)
        name = f"{self._names['shard']}.json"
        replace_whole(self._folder / name, data)
        return FileEntry(file=name, nbytes=len(data), checksum=xxhash.xxh3_64_hexdigest(data))

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)
        if self._past_cache is not None:
            self._past_cache.close()

    def remove(self) -> None:
        """Take away what was written: the checkpoint will not be."""
        self.close()
        own = [f"{self._names[kind]}.{ending}" for kind, ending in ENDINGS.items()]
        for name in (*own, *self.adopted):
            with suppress(FileNotFoundError):
                (self._folder / name).unlink()


def _is_aligned(piece: memoryview) -> bool:
    """Whether it can be moved without the page cache."""
    address, _ = np.frombuffer(piece, np.uint8).__array_interface__["data"]
    return not (len(piece) % ALIGNMENT_BYTES or address % ALIGNMENT_BYTES)
