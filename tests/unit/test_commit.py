"""Saving is broken off at every single operation: what is found then is the old checkpoint or the new one, whole."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from mlpo_hpc.checkpoint import folder as folders
from mlpo_hpc.checkpoint.copy_on_write import CopyOnWrite
from mlpo_hpc.checkpoint.find import find_tag
from mlpo_hpc.checkpoint.manifest import Manifest, PieceEntry, RecordEntry
from mlpo_hpc.checkpoint.read import Reader
from mlpo_hpc.checkpoint.write import ShardWriter

NUM_RANKS = 2
NUMEL = 1000
COUNTED = ("open", "pwrite", "fsync", "rename")


class PowerLoss(BaseException):
    """The end, between two operations."""


class Recorder:
    """Stands in for `os`: counts what changes storage, and knows what would survive a loss of power."""

    def __init__(self, last=None):
        self.last = last
        self.count = 0
        self.names = {}
        """Folder -> its names and their inodes when it was last synced."""
        self.contents = {}
        """Inode -> what the file had when it was last synced, and when that was written."""

    def __getattr__(self, name):
        real = getattr(os, name)
        if name not in COUNTED:
            return real

        def call(*args, **kwargs):
            if self.count == self.last:
                raise PowerLoss
            self.count += 1
            result = real(*args, **kwargs)
            if name == "fsync":
                self.synced(Path(os.readlink(f"/proc/self/fd/{args[0]}")))
            return result

        return call

    def synced(self, path):
        if path.is_dir():
            self.names[path] = {entry.name: entry.stat().st_ino for entry in path.iterdir()}
        else:
            self.contents[path.stat().st_ino] = (path.read_bytes(), path.stat().st_mtime_ns)

    def survivors(self, folder, copy):
        """What a loss of power leaves of a folder."""
        copy.mkdir(exist_ok=True)
        for name, inode in self.names.get(folder, {}).items():
            if folder / name in self.names or (folder / name).is_dir():
                self.survivors(folder / name, copy / name)
            else:
                data, written_ns = self.contents.get(inode, (b"", 0))
                (copy / name).write_bytes(data)
                os.utime(copy / name, ns=(written_ns, written_ns))


def save(directory, tag, value, save_latest=True):
    """As the engine does it, all ranks one after the other; every item is the value."""
    folder = directory / tag
    folders.make(folder)
    shards = []
    for rank in range(NUM_RANKS):
        writer = ShardWriter(folder, rank, f"{value:08x}")
        vectors = np.full(2 * 1008, value, np.float32)  # master weights and one moment, each on a cache line
        chunks = writer.add(CopyOnWrite(partial(memoryview, np.resize(vectors.view(np.uint8), 8192))))
        weights = writer.add(CopyOnWrite(partial(memoryview, np.full(NUMEL, value, np.float32).view(np.uint8))))
        record = RecordEntry(
            numel=NUMEL,
            vectors=("exp_avg",),
            pieces=(),
            split=False,
            nbytes=8192,
            chunks=chunks,
            weights=weights,
            scalars={"step": float(value)},
        )
        piece = PieceEntry(name="w", shape=(2, NUMEL), first=rank * NUMEL, numel=NUMEL, subgroup=0, begin=0)
        shards.append(writer.finish([record], [piece], {"rng/torch": torch.zeros(1)}, {}))
        writer.close()
    manifest = Manifest(
        tag=tag,
        step=value,
        flipped=False,
        world_size=NUM_RANKS,
        weight_type="float32",
        frozen=(),
        shards=tuple(shards),
        training={},
        client=None,
        config={},
        versions={},
        created="2026-01-01T00:00:00",
    )
    folders.prepare(folder, manifest, save_latest)
    folders.commit(folder, manifest, save_latest)


def found(directory):
    """The step of what would be loaded, of which every byte is looked at."""
    reader = Reader(directory / find_tag(directory, None))
    values = {float(v) for name in ("fp32", "exp_avg") for v in reader.values("w", name, 0, NUM_RANKS * NUMEL)}
    assert values == {float(reader.manifest.step)}
    assert set(reader.weights("w", 0, NUM_RANKS * NUMEL).reshape(-1).view(np.float32)) == values
    reader.close()
    return reader.manifest.step


def broken_off(directory, tag, recorder):
    """Save, until the recorder ends it; whether it came to the end."""
    with (
        patch("mlpo_hpc.checkpoint.files.os", recorder),
        patch("mlpo_hpc.checkpoint.write.os", recorder),
    ):
        try:
            save(directory, tag, 2)
        except PowerLoss:
            return False
    return True


@pytest.mark.parametrize("tag", ["one", "two"])
def test_every_crash_leaves_a_whole_checkpoint(tag, tmp_path):
    """Both where the process alone ends, and where what was not synced is lost."""
    seen, number, ended = [], 0, False
    while not ended:
        directory = tmp_path / f"at-{number}"
        recorder = Recorder()
        directory.mkdir()
        with patch("mlpo_hpc.checkpoint.files.os", recorder), patch("mlpo_hpc.checkpoint.write.os", recorder):
            save(directory, "one", 1)
        recorder.last = recorder.count + number
        recorder.synced(directory)  # it was there before
        ended = broken_off(directory, tag, recorder)
        recorder.survivors(directory, tmp_path / "survived")
        seen.append((found(directory), found(tmp_path / "survived")))
        if tag == "two":
            places = (directory, tmp_path / "survived")
            committed = tuple(2 if (place / "two/manifest.json").exists() else 1 for place in places)
            assert seen[-1] == committed, "it counts from its commit on, whatever `latest` names"
        shutil.rmtree(tmp_path / "survived")
        save(directory, "three", 3)
        assert found(directory) == 3, "and the next one is saved as if nothing had been"
        number += 1
    assert number > 20
    assert {"latest.partial", "manifest.json.partial"}.isdisjoint(path.name for path in directory.rglob("*"))
    for kind in zip(*seen, strict=True):
        assert list(kind) == sorted(kind), "once it is committed it stays so"
    assert all(lost <= kept for kept, lost in seen)
    assert seen[0] == (1, 1)
    assert seen[-1] == (2, 2)


def test_nothing_of_a_broken_off_save_is_left_by_the_next(tmp_path):
    save(tmp_path, "one", 1)
    assert not broken_off(tmp_path, "one", Recorder(last=9))
    assert len(list((tmp_path / "one").iterdir())) > 7
    save(tmp_path, "one", 3)
    assert len(list((tmp_path / "one").iterdir())) == 7
    assert found(tmp_path) == 3


def test_nothing_of_a_broken_off_save_is_left_by_one_that_is_killed_right_after_its_commit(tmp_path):
    save(tmp_path, "one", 1)
    assert not broken_off(tmp_path, "two", Recorder(last=12))
    real = folders.put_in_place

    def put(path):
        real(path)
        if path.name == "manifest.json":
            raise PowerLoss

    with patch.object(folders, "put_in_place", put), pytest.raises(PowerLoss):
        save(tmp_path, "two", 3)
    assert found(tmp_path) == 3
    assert len(list((tmp_path / "two").iterdir())) == 7


@pytest.mark.parametrize("hint", [b"", b"nowhere", b"../one", b"one\n", b"\xff\xfe", b"x" * 10_000, b"a\0b"])
def test_latest_is_only_a_hint(hint, tmp_path):
    save(tmp_path, "one", 1)
    save(tmp_path, "two", 2)
    (tmp_path / "latest").write_bytes(hint)
    assert found(tmp_path) == (1 if hint == b"one\n" else 2)


def test_a_save_that_is_broken_off_after_another_one_was_loses_none(tmp_path):
    """The first is killed between its commit and `latest`, the second anywhere."""
    real, number, ended = folders.put_in_place, 0, False
    while not ended:
        directory = tmp_path / f"at-{number}"
        save(directory, "one", 0)
        with patch.object(folders, "put_in_place", lambda path: real(path) if path.name != "latest" else None):
            save(directory, "two", 1)
        ended = broken_off(directory, "three", Recorder(last=number))
        committed = (directory / "three/manifest.json").exists()
        assert found(directory) == (2 if committed else 1)
        if (directory / "latest").read_text() == "two" and not committed:
            folders.abandon(directory / "three")  # as the engine does where its rank lives
            assert found(directory) == 1
        number += 1
    assert number > 20


def test_who_names_another_one_after_a_crash_is_heard(tmp_path):
    save(tmp_path, "one", 1)
    real = folders.put_in_place
    with patch.object(folders, "put_in_place", lambda path: real(path) if path.name != "latest" else None):
        save(tmp_path, "two", 2)
    assert ((tmp_path / "latest").read_text(), found(tmp_path)) == ("one", 2)
    later_ns = (tmp_path / "latest.partial").stat().st_mtime_ns + 1
    os.utime(tmp_path / "latest", ns=(later_ns, later_ns))
    assert found(tmp_path) == 1
    save(tmp_path, "three", 3)
    assert found(tmp_path) == 3
    assert not (tmp_path / "latest.partial").exists()


def test_what_latest_is_not_to_name_is_not_loaded_though_an_earlier_try_was_broken_off(tmp_path):
    save(tmp_path, "one", 1)
    with patch.object(folders, "commit", lambda *_: None):
        save(tmp_path, "two", 2)  # broken off right before its commit
    assert found(tmp_path) == 1
    save(tmp_path, "two", 3, save_latest=False)
    assert found(tmp_path) == 1
