"""Makes checkpoints of our format as ZeRO-3 would have cut them, without an engine, and knows what is in them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from hypothesis import strategies as st

from mlpo_hpc.checkpoint import folder as folders
from mlpo_hpc.checkpoint.copy_on_write import CopyOnWrite
from mlpo_hpc.checkpoint.manifest import FrozenEntry, Manifest, PieceEntry, RecordEntry, WeightType
from mlpo_hpc.checkpoint.plain import encode
from mlpo_hpc.checkpoint.write import CHUNK_BYTES, ShardWriter
from mlpo_hpc.state.codec.fp32 import record_bytes
from mlpo_hpc.state.codec.fp32 import vectors as fp32_vectors
from mlpo_hpc.state.codec.split import SplitForm, plain_master, shorten, state_vectors

VECTORS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Run:
    """What is saved, and how it is cut.

    Parameters
    ----------
    shapes : mapping
        Of the trained parameters.
    world_size : int
        Ranks that save.
    subgroup_items : int
        A subgroup is closed when a rank has that many items in it.
    weight_type : str
        Of the model.
    codec : str
        ``split`` or ``fp32``.
    strange : float
        Part of the master weights that are not what the 16-bit weights tell: they become exceptions.
    changed : sequence of str
        Parameters whose 16-bit weights others changed after the records were made: they are the master weights where
        a record is short.
    frozen, buffers : mapping
        Tensors that are not trained.
    chunk_bytes : int
        Of one chunk: small ones make many.
    """

    shapes: Mapping[str, tuple[int, ...]]
    world_size: int = 2
    subgroup_items: int = 3000
    weight_type: WeightType = "bfloat16"
    codec: str = "split"
    strange: float = 0.0002
    changed: Sequence[str] = ()
    frozen: Mapping[str, torch.Tensor] = field(default_factory=dict)
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    chunk_bytes: int = CHUNK_BYTES
    step: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Saved:
    """A checkpoint and the truth about it."""

    folder: Path
    run: Run
    vectors: Mapping[str, Mapping[str, np.ndarray]]
    """Parameter -> vector -> its items, fp32 of shape ``(numel,)``."""
    weights: Mapping[str, torch.Tensor]
    """Parameter -> its 16-bit weights, of its shape."""


def save(directory: Path, run: Run, tag: str = "one", attempt: str = "0000000a") -> Saved:
    """Save a checkpoint and commit it."""
    rng = np.random.default_rng(run.seed)
    folder = directory / tag
    folders.make(folder)
    numels = {name: math.prod(shape) for name, shape in run.shapes.items()}
    vectors = {name: {vector: _items(rng, numel) for vector in ("fp32", *VECTORS)} for name, numel in numels.items()}
    kind = getattr(torch, run.weight_type)
    flat = {name: _weights(rng, vectors[name]["fp32"], kind, run.strange) for name in run.shapes}
    groups = _groups(numels, run)
    with patch("mlpo_hpc.checkpoint.write.CHUNK_BYTES", run.chunk_bytes):
        shards = [_save_rank(folder, rank, attempt, run, groups, vectors, flat) for rank in range(run.world_size)]
    manifest = Manifest(
        tag=tag,
        step=run.step,
        flipped=False,
        world_size=run.world_size,
        weight_type=run.weight_type,
        frozen=tuple(FrozenEntry(name=name, shape=tuple(tensor.shape)) for name, tensor in run.frozen.items()),
        shards=tuple(shards),
        training=_training(run, len(groups)),
        client={"dict": []},
        config={},
        versions={},
        created=f"2026-01-01T00:00:{run.step % 60:02d}+0000",
    )
    folders.prepare(folder, manifest, save_latest=True)
    folders.commit(folder, manifest, save_latest=True)
    after = {name: _after(run, name, weights) for name, weights in flat.items()}
    return Saved(folder, run, vectors, {name: after[name].reshape(shape) for name, shape in run.shapes.items()})


def _after(run: Run, name: str, weights: torch.Tensor) -> torch.Tensor:
    """What others made of some weights."""
    return (weights * 2 + 1).to(weights.dtype) if name in run.changed else weights


def _training(run: Run, num_subgroups: int) -> dict:
    """What an engine notes, with two parameter groups."""
    scaler = {"cur_scale": 2.0**run.step, "dynamic": run.weight_type == "float16"}
    optimizer = {
        "loss_scaler": scaler,
        "overflow": False,
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95)}, {"lr": 0.2, "betas": (0.9, 0.95)}],
        "group_of_subgroup": [0] * (num_subgroups - 1) + [1],
    }
    counters = {"global_steps": run.step, "global_samples": 8 * run.step, "skipped_steps": 0}
    plain = {"optimizer": encode(optimizer, [], "optimizer"), "lr_scheduler": None, "shared_params": {}}
    return {**counters, **plain}


def _items(rng: np.random.Generator, numel: int) -> np.ndarray:
    """Mostly as in training; some of any bits at all, infinities and NaNs among them."""
    values = rng.standard_normal(numel).astype(np.float32) * np.float32(0.02)
    odd = rng.random(numel) < 0.0005
    values[odd] = rng.integers(0, 2**32, int(odd.sum()), np.uint32).view(np.float32)
    return values


def _weights(rng: np.random.Generator, master: np.ndarray, kind: torch.dtype, strange: float) -> torch.Tensor:
    weights = torch.from_numpy(master).to(kind)
    odd = torch.from_numpy(rng.random(len(master)) < (strange if kind != torch.float32 else 0))
    weights[odd] = 3.0
    return weights


def _groups(numels: Mapping[str, int], run: Run) -> list[list[str]]:
    """Parameters of each subgroup, none of which is empty."""
    groups: list[list[str]] = [[]]
    items = 0
    for name, numel in numels.items():
        if items >= run.subgroup_items and numel:
            groups.append([])
            items = 0
        groups[-1].append(name)
        items += _part(numel, run.world_size)
    return groups


def _part(numel: int, world_size: int) -> int:
    """Items of each rank, the last of which may have padding."""
    return -(-numel // world_size)


def _save_rank(folder, rank, attempt, run, groups, vectors, weights):
    writer = ShardWriter(folder, rank, attempt)
    records, pieces = [], []
    for subgroup, names in enumerate(groups):
        parts = [_part(weights[name].numel(), run.world_size) for name in names]
        records.append(_save_record(writer, rank, run, names, parts, vectors, weights))
        for name, part, begin in zip(names, parts, itertools.accumulate(parts, initial=0), strict=False):
            first = min(rank * part, weights[name].numel())
            numel = min(part, weights[name].numel() - first)
            shape = tuple(run.shapes[name])
            pieces.append(PieceEntry(name=name, shape=shape, first=first, numel=numel, subgroup=subgroup, begin=begin))
    tensors = {f"frozen/{name}": cut(tensor, rank, run.world_size) for name, tensor in run.frozen.items()}
    tensors |= {f"buffer/{name}": tensor for name, tensor in run.buffers.items()} if rank == 0 else {}
    entry = writer.finish(records, pieces, {**tensors, "rng/torch": torch.arange(4)}, {})
    writer.close()
    return entry


def cut(tensor: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """A rank's part of a flattened tensor, padded at the end."""
    part = _part(tensor.numel(), world_size)
    mine = tensor.reshape(-1)[rank * part : (rank + 1) * part]
    return torch.cat([mine, torch.zeros(part - mine.numel(), dtype=tensor.dtype)])


def _save_record(writer, rank, run, names, parts, vectors, weights):
    numel, size = sum(parts), run.world_size

    def joined(tensors):
        return torch.cat([cut(tensor, rank, size) for tensor in tensors])

    form = SplitForm(numel, len(VECTORS), tuple(parts))
    split = run.codec == "split" and run.weight_type == "bfloat16" and form.pays
    record = bytearray(form.plain_bytes if split else record_bytes(numel, 1 + len(VECTORS)))
    view = memoryview(record)
    places = (
        [plain_master(form, view), *state_vectors(form, view)] if split else fp32_vectors(view, numel, 1 + len(VECTORS))
    )
    for place, vector in zip(places, ("fp32", *VECTORS), strict=True):
        place.copy_(joined(torch.from_numpy(vectors[name][vector]) for name in names))
    mine = joined(weights[name] for name in names)
    short = split and shorten(form, view, mine)
    nbytes = form.nbytes if short else len(record)
    after = joined(_after(run, name, weights[name]) for name in names)
    changed = [index for index, name in enumerate(names) if short and name in run.changed]
    for index in changed:
        master = vectors[names[index]]["fp32"][rank * parts[index] : (rank + 1) * parts[index]]
        master[:] = cut(_after(run, names[index], weights[names[index]]), rank, size)[: len(master)].float().numpy()
    return RecordEntry(
        numel=numel,
        vectors=VECTORS,
        pieces=tuple(parts) if split else (),
        split=split,
        nbytes=nbytes,
        chunks=writer.add(CopyOnWrite(lambda: view[:nbytes])),
        weights=writer.add(CopyOnWrite(lambda: after.view(torch.uint8).numpy().data)),
        changed=tuple(changed),
        scalars={"step": float(run.step)},
    )


# ---- for property tests ---------------------------------------------------------------------

SHAPES = st.one_of(
    st.just(()),
    st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    st.tuples(st.integers(1, 2000)),
    st.tuples(st.integers(1, 90), st.integers(1, 90)),
    st.just((0, 3)),
)
RUNS = st.builds(
    Run,
    shapes=st.lists(SHAPES, max_size=5).map(lambda some: {f"layer.{i}.w": s for i, s in enumerate([*some, (7,)])}),
    world_size=st.integers(1, 5),
    subgroup_items=st.sampled_from([1, 500, 3000, 10**6]),
    weight_type=st.sampled_from(["bfloat16", "bfloat16", "float16", "float32"]),
    codec=st.sampled_from(["split", "fp32"]),
    strange=st.sampled_from([0.0, 0.0002, 0.5]),
    changed=st.sampled_from([(), ("layer.0.w",), ("layer.0.w", "layer.2.w")]),
    chunk_bytes=st.sampled_from([64, 1000, 4096, CHUNK_BYTES]),
    seed=st.integers(0, 2**32 - 1),
)


def usual(**changes) -> Run:
    """All kinds of records, parameters and tensors in one: short, plain and fp32, scalars, frozen ones, buffers."""
    generator = torch.Generator().manual_seed(5)
    frozen = {
        "frozen.w": torch.randn(7, 11, generator=generator).bfloat16(),
        "frozen.scale": torch.randn((), generator=generator),
        "frozen.half": torch.randn(3, generator=generator).half(),
    }
    buffers = {
        "rope.inv_freq": torch.randn(16, generator=generator),
        "steps": torch.tensor(12345678901),
        "mask": torch.tensor([True, False, True]),
        "halves": torch.randn(5, generator=generator).bfloat16(),
    }
    shapes = {"embed.w": (100, 64), "block.0.w": (33, 77), "norm": (64,), "scale": (), "head.w": (5, 1000)}
    return Run(**{"shapes": shapes, "frozen": frozen, "buffers": buffers, "chunk_bytes": 4096} | changes)
