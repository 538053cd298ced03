"""Write the shard of one rank: its chunks, its small tensors, and what says which bytes are what."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from mlpo_hpc.checkpoint.folder import encode, file_checksum, replace_whole, sync_file
from mlpo_hpc.checkpoint.manifest import Chunk, FileEntry, PieceEntry, RecordEntry, Shard
from mlpo_hpc.errors import storage_error
from mlpo_hpc.storage.pace import Pace
from mlpo_hpc.storage.posix import drop_pages, write_out

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 2**22
"""What is checked as one: a reader that wants a part of it reads all of it."""
DIRTY_BYTES = 2**26
"""Written pages that may wait in host memory for the device."""


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
        self._names = {kind: f"{kind}-{rank:05d}-{unique}" for kind in ("state", "tensors", "shard")}
        self._path = folder / f"{self._names['state']}.bin"
        self._offset = self._synced = 0
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise storage_error("creating a file of the checkpoint", str(self._path), error) from error

    def add(self, data: memoryview) -> tuple[Chunk, ...]:
        """Append bytes; the chunks that they are now."""
        pieces = [data[begin : begin + CHUNK_BYTES] for begin in range(0, len(data), CHUNK_BYTES)]
        return tuple(self._append(piece) for piece in pieces)

    def _append(self, piece: memoryview) -> Chunk:
        offset = self._offset
        with self.pace.moving():
            self._write(piece)
            if self._offset - self._synced >= DIRTY_BYTES or not self.pace.is_free:
                self._drop()
        return Chunk(file=self._path.name, offset=offset, nbytes=len(piece), checksum=xxhash.xxh3_64_hexdigest(piece))

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

    def remove(self) -> None:
        """Take away what was written: the checkpoint will not be."""
        self.close()
        for kind, ending in (("shard", "json"), ("tensors", "safetensors"), ("state", "bin")):
            with suppress(FileNotFoundError):
                (self._folder / f"{self._names[kind]}.{ending}").unlink()
