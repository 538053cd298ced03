"""Whole state in one file: blocks of flattened arrays, hyperslabs, the way by offsets, faults."""

from __future__ import annotations

import errno
import itertools
import math
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlpo_hpc.errors import ConfigError, StorageError, TierFull
from mlpo_hpc.storage.bulk import OffsetFile, Parameter, SlabFile, boxes, create

ADAM = ("fp32", "exp_avg", "exp_avg_sq")

shapes = st.lists(st.integers(1, 7), max_size=4).map(tuple)


@given(shape=shapes, ends=st.tuples(st.integers(0, 3000), st.integers(0, 3000)), most=st.integers(1, 60))
def test_blocks_are_the_range_once_and_in_order(shape, ends, most):
    size = math.prod(shape)
    first, end = sorted(min(size, at) for at in ends)
    array = np.arange(size).reshape(shape)
    found = []
    for box in boxes(shape, first, end - first, most):
        block = array[tuple(slice(a, a + n) for a, n in zip(box.start, box.count, strict=True))]
        assert 1 <= box.numel == block.size <= most
        assert block.reshape(-1)[0] == box.first
        found += block.reshape(-1).tolist()
    assert found == list(range(first, end))


def test_a_whole_array_is_one_block_and_a_range_few():
    assert len(list(boxes((10, 20, 30), 0, 6000))) == 1
    assert len(list(boxes((10, 20, 30), 31, 5000))) <= 7
    assert len(list(boxes((2**20, 2**12), 5, 2**32 - 5))) == 17, "none above 1 GiB"


@settings(deadline=None)
@given(shape=shapes, cuts=st.lists(st.integers(0, 2401), max_size=3))
def test_what_ranks_write_piece_by_piece_is_read_whole(tmp_path_factory, shape, cuts):
    """By hyperslabs and by offsets, read back with another cut."""
    size = math.prod(shape)
    whole = np.arange(size, dtype=np.float32) + 1
    path = str(tmp_path_factory.mktemp("bulk") / "whole.h5")
    for open_to_write in (lambda: SlabFile(path, writes=True), lambda: OffsetFile(path)):
        create(path, {"a/b.weight": Parameter(shape, ADAM, {"step": 3.0}), "x": Parameter((2,), ("fp32",), {})})
        edges = [0, *sorted(min(size, cut) for cut in cuts), size]
        file = open_to_write()
        for first, end in itertools.pairwise(edges):
            for box in boxes(shape, first, end - first):
                file.write("a/b.weight", "exp_avg", box, whole[box.first : box.first + box.numel])
        file.write("a/b.weight", "exp_avg", None, None)
        file.close()
        file = SlabFile(path)
        assert file.parameters()["a/b.weight"] == Parameter(shape, tuple(sorted(ADAM)), {"step": 3.0})
        back = np.zeros(size, np.float32)
        for box in boxes(shape, 0, size, most=13):
            file.read("a/b.weight", "exp_avg", box, back[box.first : box.first + box.numel])
        file.read("a/b.weight", "exp_avg", None, None)
        assert (back == whole).all()
        file.close()
        os.unlink(path)


def test_it_is_plain_hdf5(tmp_path):
    import h5py

    path = str(tmp_path / "whole.h5")
    create(path, {"a": Parameter((2, 3), ("fp32",), {"step": 3.0})})
    file = OffsetFile(path)
    (box,) = boxes((2, 3), 0, 6)
    file.write("a", "fp32", box, np.arange(6, dtype=np.float32))
    file.close()
    with h5py.File(path) as plain:
        assert plain["state/a/fp32"][...].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert plain["state/a"].attrs["step"] == 3


def test_faults_say_what_and_where(tmp_path, monkeypatch):
    import h5py

    with pytest.raises(StorageError, match="ENOENT.*missing"):
        SlabFile(str(tmp_path / "missing.h5"))
    with pytest.raises(StorageError, match="creating a state file failed"):
        create(str(tmp_path / "no" / "folder.h5"), {})
    other = str(tmp_path / "other.h5")
    h5py.File(other, "w").close()
    with pytest.raises(ConfigError, match=r"other\.h5 is no file of whole state"):
        SlabFile(other)
    path = str(tmp_path / "whole.h5")
    create(path, {"a": Parameter((2, 3), ("fp32",), {})})
    file = OffsetFile(path)
    (box,) = boxes((2, 3), 0, 6)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, pytest.raises(TierFull, match=r"ENOSPC.*whole\.h5"):
        patched.setattr(os, "pwrite", full)
        file.write("a", "fp32", box, np.zeros(6, np.float32))
    with monkeypatch.context() as patched, pytest.raises(TierFull, match="syncing"):
        patched.setattr(os, "fdatasync", full)
        file.close()
    os.truncate(path, os.path.getsize(path) // 2)
    with pytest.raises(StorageError):
        SlabFile(path).read("a", "fp32", box, np.zeros(6, np.float32))


def test_short_writes_go_on(tmp_path, monkeypatch):
    path = str(tmp_path / "whole.h5")
    create(path, {"a": Parameter((100,), ("fp32",), {})})
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, view, offset: real(fd, view[:52], offset))
    file, values = OffsetFile(path), np.arange(100, dtype=np.float32)
    (box,) = boxes((100,), 0, 100)
    file.write("a", "fp32", box, values)
    file.close()
    back = np.zeros(100, np.float32)
    SlabFile(path).read("a", "fp32", box, back)
    assert (back == values).all()
