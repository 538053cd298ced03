"""The reader of checkpoints: any range of any vector is the truth, bit for bit, however it was cut."""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlpo_hpc.checkpoint import read
from mlpo_hpc.checkpoint.documents import read_manifest
from mlpo_hpc.checkpoint.files import open_file
from mlpo_hpc.checkpoint.read import Reader
from mlpo_hpc.checkpoint.verify import verify
from mlpo_hpc.errors import ConfigError, CorruptState
from tests.checkpoints import RUNS, save, usual


def same(found: np.ndarray, truth: np.ndarray) -> bool:
    """Bit for bit: NaNs too."""
    return found.tobytes() == truth.tobytes()


@settings(deadline=None, max_examples=60)
@given(run=RUNS, data=st.data(), cache_bytes=st.sampled_from([0, 5000, 2**28]))
def test_any_range_is_the_truth(run, data, cache_bytes):
    with tempfile.TemporaryDirectory() as directory:
        saved = save(Path(directory), run)
        reader = Reader(saved.folder, cache_bytes)
        assert set(reader.parameters) == set(run.shapes)
        for _ in range(8):
            name = data.draw(st.sampled_from(sorted(run.shapes)))
            numel = math.prod(run.shapes[name])
            first = data.draw(st.integers(0, numel))
            count = data.draw(st.integers(0, numel - first))
            assert reader.shape(name) == run.shapes[name]
            for vector in ("fp32", *reader.vectors(name)):
                truth = saved.vectors[name][vector][first : first + count]
                assert same(reader.values(name, vector, first, count), truth), (name, vector)
            weights = saved.weights[name].reshape(-1)[first : first + count].view(torch.uint8).numpy()
            assert same(reader.weights(name, first, count), weights)
        reader.close()
        assert verify(saved.folder, lambda *_: None).faults == []


def test_the_generator_makes_all_kinds_of_records(tmp_path):
    """Or the tests above would prove little."""
    short = save(tmp_path, usual(subgroup_items=1), "short")
    records = [record for shard in Reader(short.folder).shards for record in shard.records]
    kinds = {
        (record.split, record.nbytes == read.form_of(record).nbytes if record.split else None) for record in records
    }
    assert kinds == {(True, True), (False, None)}, "very small ones are fp32"
    plain = save(tmp_path, usual(strange=0.5), "plain")
    records = [record for shard in Reader(plain.folder).shards for record in shard.records]
    assert any(record.split and record.nbytes != read.form_of(record).nbytes for record in records)
    changed = save(tmp_path, usual(changed=("block.0.w",)), "changed")
    records = [record for shard in Reader(changed.folder).shards for record in shard.records]
    assert any(record.changed for record in records)


def test_few_files_stay_open(tmp_path, monkeypatch):
    monkeypatch.setattr(read, "MAX_OPEN_FILES", 2)
    saved = save(tmp_path, usual(world_size=7))
    before = len(os.listdir("/proc/self/fd"))
    reader = Reader(saved.folder, cache_bytes=0)
    for name, shape in saved.run.shapes.items():
        assert same(reader.values(name, "fp32", 0, math.prod(shape)), saved.vectors[name]["fp32"])
        assert len(os.listdir("/proc/self/fd")) <= before + 2
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == before


# ---- what is no file of a checkpoint ---------------------------------------------------------


def test_links_pipes_and_folders_are_refused_at_once(tmp_path):
    (tmp_path / "real").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe")
    before = len(os.listdir("/proc/self/fd"))
    for name, text in (("link", "symbolic link"), ("pipe", "no regular file"), (".", "no regular file")):
        with pytest.raises(CorruptState, match=text):
            open_file(tmp_path / name)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("name", ["../one/state.bin", "/etc/passwd", "..", "a/b"])
def test_ways_out_of_the_folder_are_refused(tmp_path, name):
    saved = save(tmp_path, usual())
    rewrite(saved.folder, lambda text: text.replace(read_manifest(saved.folder).shards[0].file, name))
    with pytest.raises(CorruptState, match=r"is not the name of a file.*manifest\.json"):
        Reader(saved.folder)


def test_other_versions_say_what_to_install_and_other_counts_are_damage(tmp_path):
    saved = save(tmp_path, usual())
    rewrite(saved.folder, lambda text: text.replace('"world_size": 2', '"world_size": 3'))
    with pytest.raises(CorruptState, match="2 shards of 3 ranks"):
        Reader(saved.folder)
    rewrite(saved.folder, lambda text: text.replace('"version": 1', '"version": 2'))
    with pytest.raises(ConfigError, match="version 2 of the checkpoint format.*install a newer"):
        Reader(saved.folder)


def rewrite(folder: Path, change) -> None:
    """Another manifest, whose checksum is right: made by somebody, not by chance."""
    import xxhash

    path = folder / "manifest.json"
    body = change(path.read_text()).partition(", ")[2].encode()
    path.write_bytes(f'{{"checksum": "{xxhash.xxh3_64_hexdigest(body)}", '.encode() + body)


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_any_flipped_bit_of_the_manifest_is_found(data):
    with tempfile.TemporaryDirectory() as directory:
        path = save(Path(directory), usual()).folder / "manifest.json"
        good = bytearray(path.read_bytes())
        good[data.draw(st.integers(0, len(good) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(good)
        with pytest.raises(CorruptState, match=r"manifest\.json"):
            read_manifest(path.parent)
