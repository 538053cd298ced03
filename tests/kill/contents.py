"""What a checkpoint holds, as checksums that two runs can be compared by, and whether anything else is there."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import xxhash

from mlpo_hpc.checkpoint.manifest import MANIFEST
from mlpo_hpc.checkpoint.read import Reader

TAG = re.compile(r"global_step(\d+)")


def checksums(folder: Path) -> dict[str, str]:
    """Of all state, weights and scalars by parameter, and of all else that a run goes on with."""
    reader = Reader(folder)
    found = {}
    for name in sorted(reader.parameters):
        numel = math.prod(reader.shape(name))
        for vector in ("fp32", *reader.vectors(name)):
            found[f"{name}/{vector}"] = xxhash.xxh3_64_hexdigest(reader.values(name, vector, 0, numel))
        found[f"{name}/weights"] = xxhash.xxh3_64_hexdigest(reader.weights(name, 0, numel))
        found[f"{name}/scalars"] = repr(reader.scalars(name))
    manifest = reader.manifest
    found |= {key: json.dumps(value) for key, value in manifest.training.items()}  # loss scaler, lr, counters
    found |= {"client": repr(manifest.client), "step": repr((manifest.step, manifest.flipped))}
    for shard in reader.shards:
        found[f"rank {shard.rank}"] = json.dumps([shard.rng, shard.tensors.checksum])
    reader.close()
    return found


def committed_steps(directory: Path) -> list[int]:
    """Steps after which a checkpoint was committed, ascending; found without the library."""
    names = [TAG.fullmatch(path.parent.name) for path in directory.glob(f"*/{MANIFEST}")]
    return sorted(int(name[1]) for name in names if name)


def surplus(directory: Path) -> list[str]:
    """What is in a directory of checkpoints beside whole ones, ``latest``, and what the example notes."""
    wanted, found = (
        {"latest", "save_times.json"},
        {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()},
    )
    for step in committed_steps(directory):
        folder = f"global_step{step}"
        reader = Reader(directory / folder)
        files = {MANIFEST, *(entry.file for entry in reader.manifest.shards)}
        for shard in reader.shards:
            files |= {shard.tensors.file}
            files |= {chunk.file for record in shard.records for chunk in (*record.chunks, *record.weights)}
        wanted |= {f"{folder}/{name}" for name in files}
    return sorted(found - wanted)
