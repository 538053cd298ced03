"""What a checkpoint consists of: one manifest, whose appearance is the commit, and the shard of each rank.

::

    DIR/latest                   the newest tag, a hint only
    DIR/TAG/manifest.json        `Manifest`: it appears by one rename when all else is on the device
    DIR/TAG/shard-00003-5f0c21aa.json   `Shard` of rank 3: which bytes are what
    DIR/TAG/state-00003-5f0c21aa.bin    its chunks
    DIR/TAG/tensors-00003-5f0c21aa.safetensors   what is small: frozen partitions, random generators, ...

The second number is one of the attempt: saving under the same tag again leaves the old files alone until its commit.
The manifest begins with ``{"checksum": "...", ``, of all bytes after that. All numbers are decimal, sizes in bytes,
checksums 64-bit xxh3 in hexadecimal. Nothing in it is code: it is read without unpickling anything.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

FORMAT: Literal["mlpo_hpc checkpoint"] = "mlpo_hpc checkpoint"
VERSION: Literal[1] = 1
MANIFEST = "manifest.json"
LATEST = "latest"


def _plain_name(name: str) -> str:
    """A file of this very folder: no way out of it."""
    if "/" in name or name in {"", ".", ".."}:
        raise ValueError(f"{name!r} is not the name of a file in the checkpoint")
    return name


def _checksum(text: str) -> str:
    if not re.fullmatch("[0-9a-f]{16}", text):
        raise ValueError(f"{text!r} is no checksum")
    return text


FileName = Annotated[str, AfterValidator(_plain_name)]
Checksum = Annotated[str, AfterValidator(_checksum)]
Count = Annotated[int, Field(ge=0)]


WeightType = Literal["bfloat16", "float16", "float32"]


class Entry(BaseModel):
    """A part of a manifest; unknown keys are an error: they would mean something that we do not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Chunk(Entry):
    """Bytes in a file of the checkpoint."""

    file: FileName
    offset: Count
    nbytes: Count
    checksum: Checksum


class RecordEntry(Entry):
    """The state of one subgroup of a rank, and its 16-bit weights."""

    numel: Count
    vectors: tuple[str, ...]
    """Its state vectors in their order; the master weights come after them with codec ``split``, else before."""
    pieces: tuple[int, ...]
    """Items of each parameter in it, padding included."""
    split: bool
    """Whether the record is made up for codec ``split``, short or plain; else it is ``fp32``."""
    nbytes: Count
    """By which a short record is told from a plain one."""
    chunks: tuple[Chunk, ...]
    """Its bytes, in order."""
    weights: tuple[Chunk, ...]
    """The 16-bit weights, in order."""
    changed: tuple[Count, ...] = ()
    """Parameters, by their index in `pieces`, whose 16-bit weights others changed since the record was made: these are
    their master weights."""
    scalars: dict[str, int | float] | None
    """State that is not a vector, tensors as floats; None: the optimizer has not made its state yet."""


class PieceEntry(Entry):
    """The part of a parameter that a rank keeps; see `storage.contents.Piece`."""

    name: str
    shape: tuple[Count, ...]
    first: Count
    numel: Count
    subgroup: Count
    begin: Count


class FileEntry(Entry):
    """A whole file."""

    file: FileName
    nbytes: Count
    checksum: Checksum


class Shard(Entry):
    """What one rank saved."""

    rank: Count
    records: tuple[RecordEntry, ...]
    pieces: tuple[PieceEntry, ...]
    tensors: FileEntry
    """Its small tensors: ``frozen/NAME`` partitions, ``rng/...``, on rank 0 ``buffer/NAME`` and ``client/NUMBER``."""
    rng: dict[str, Any]
    """State of random generators that is no tensor."""


class FrozenEntry(Entry):
    """A parameter that is not trained: each rank has a partition of it, of equal size."""

    name: str
    shape: tuple[Count, ...]


class Manifest(Entry):
    """The whole."""

    format: Literal["mlpo_hpc checkpoint"] = FORMAT
    version: Literal[1] = VERSION
    tag: str
    step: Count
    """Optimizer steps that were applied."""
    flipped: bool
    """Whether the next step goes through the subgroups backwards."""
    world_size: Count
    weight_type: WeightType
    frozen: tuple[FrozenEntry, ...]
    shards: tuple[FileEntry, ...]
    """By rank."""
    training: dict[str, Any]
    """Counters, loss scaler, parameter groups, learning rate scheduler: plain values."""
    client: Any
    """``client_state``; a tensor in it is ``{"tensor": NUMBER}``."""
    config: dict[str, Any]
    """DeepSpeed's configuration of the run that saved it, for people."""
    versions: dict[str, str]
    created: str
    """ISO 8601."""

    @model_validator(mode="after")
    def _has_all_shards(self) -> Manifest:
        if len(self.shards) != self.world_size:
            raise ValueError(f"{len(self.shards)} shards of {self.world_size} ranks")
        return self
