"""The hdf5 container on one process: what is in the file, its index, its faults."""

from __future__ import annotations

import fcntl
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlpo_hpc.config import load
from mlpo_hpc.errors import ConfigError, CorruptState, StorageError, TierFull
from mlpo_hpc.state import node_file
from mlpo_hpc.state.node_file import Slots
from mlpo_hpc.storage.base import ALIGNMENT_BYTES, Transport
from mlpo_hpc.storage.contents import Contents, Piece, RecordForm
from mlpo_hpc.storage.hdf5 import Extent, Share, lay_out, open_for_reading
from mlpo_hpc.storage.index import Held, SlotIndex, index_type, newest
from mlpo_hpc.storage.place import find_places
from mlpo_hpc.storage.posix import open_posix
from tests.conformance import check_any_size_comes_back, pattern
from tests.containers import open_alone

FORM = RecordForm(100, 112, ("fp32", "exp_avg", "exp_avg_sq"))


def contents(rank: int = 0) -> Contents:
    pieces = (
        Piece("a.weight", (10, 10), 0, 50, 0, 0),
        Piece("a/b.bias", (7,), 0, 7, 0, 50),
        Piece("scalar", (), 0, 1, 0, 57),
    )
    return Contents("fp32", (FORM,), pieces if rank == 0 else pieces[:1])


def places(path: Path, **tier):
    return find_places(
        load({"mlp_offload": {"tiers": [{"name": "pfs", "dir": str(path), "container": "hdf5", **tier}]}})
    )


def places_of(tiers):
    return find_places(load({"mlp_offload": {"tiers": tiers}}))


def share(rank: int, num_slots: int, slot_bytes: int = 4 * ALIGNMENT_BYTES) -> Share:
    return Share(rank, slot_bytes, slot_bytes, num_slots, contents(rank))


def test_the_file_says_what_it_holds(tmp_path):
    path = str(tmp_path / "state.h5")
    extents = lay_out(path, [share(0, 3), share(5, 0), share(7, 2, 8192)], {"tier": "pfs", "job": "42"}, 2**20)
    assert extents[5] == Extent(0, 0)
    with open_for_reading(path) as file:
        assert (file.attrs["tier"], file.attrs["job"]) == ("pfs", "42")
        assert set(file["parameters"]) == {"a.weight", "a", "scalar"}
        assert file["parameters/a.weight"][:].tolist() == [(0, 0, 0, 0, 50), (5, 0, 0, 0, 50), (7, 0, 0, 0, 50)]
        assert file["parameters/a/b.bias"].attrs["shape"].tolist() == [7]
        assert file["parameters/scalar"].attrs["shape"].tolist() == []
        assert file["ranks/0/records"][0].tolist() == (100, 112, b"fp32 exp_avg exp_avg_sq")
        assert file["ranks/0/slots"].shape == (3, 4096)
        assert file["ranks/7/slots"].shape == (2, 2048)
        assert "slots" not in file["ranks/5"]
        for rank in (0, 7):
            assert file[f"ranks/{rank}/slots"].id.get_offset() == extents[rank].slots
            assert extents[rank].slots % 2**20 == extents[rank].index % 2**20 == 0


def test_layout_of_100_gib_writes_no_data(tmp_path):
    path = tmp_path / "large.h5"
    num_slots = 100 * 2**30 // (64 * 2**20) // 4
    shares = [share(rank, num_slots, 64 * 2**20) for rank in range(4)]
    before = time.perf_counter()
    lay_out(str(path), shares, {}, 2**20)
    print(f"laid out in {time.perf_counter() - before:.3f} s")
    status = path.stat()
    assert status.st_size >= 100 * 2**30
    assert status.st_blocks * 512 < 2**20


def test_slots_beyond_4_gib_are_where_hdf5_finds_them(tmp_path):
    """More than 2^31 items, and more bytes than 32 bits count."""
    with open_alone(places(tmp_path, keep=True), Slots(64 * 2**20, 160), contents()) as (container,):
        view = pattern(1, 8192)
        container.write(159, view)
        with open_for_reading(container.path) as file:
            slots = file["ranks/0/slots"]
            assert slots.size > 2**31
            assert slots[159, :2048].tobytes() == bytes(view)


def test_large_slots_begin_on_a_stripe_and_what_is_between_takes_no_space(tmp_path, monkeypatch):
    monkeypatch.setattr(node_file, "file_alignment_bytes", lambda *_: 2**20)
    with open_alone(places(tmp_path, keep=True), Slots(2**20 + 8192, 4)) as (container,):
        assert (container.slot_bytes, container.base_bytes % 2**20) == (2 * 2**20, 0)
        for slot in range(4):
            container.write(slot, pattern(slot, 2**20 + 8192))
        assert os.stat(container.path).st_blocks * 512 < 4 * (2**20 + 8192) + 2**18


def test_an_unkept_file_has_no_name_while_it_is_used(tmp_path):
    with open_alone(places(tmp_path), Slots(16384, 4)) as (container,):
        assert list(tmp_path.glob("*.h5")) == list(tmp_path.glob(".mlpo*")) == []
        check_any_size_comes_back(container, seed=3)
        assert container.index is None, "nobody could read it"


def test_names_tell_job_restart_and_host(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    with (
        open_alone(places(tmp_path, keep=True), Slots(16384, 4)),
        open_alone(places(tmp_path, keep=True), Slots(16384, 4)),
    ):
        names = sorted(path.name for path in tmp_path.glob("*.h5"))
    assert len(names) == 2, "two engines of one process"
    assert all(name.startswith("pfs-job4711.2-here-") for name in names)


# ---- the index ------------------------------------------------------------------------------


class Memory(Transport):
    """A file in memory; a write may be cut short as by a kill."""

    name, path = "memory", "memory"

    def __init__(self, nbytes: int) -> None:
        self.bytes = bytearray(nbytes)
        self.cut = nbytes

    def read(self, offset: int, view: memoryview) -> None:
        view[:] = self.bytes[offset : offset + view.nbytes]

    def write(self, offset: int, view: memoryview) -> None:
        self.bytes[offset : offset + min(self.cut, view.nbytes)] = view[: self.cut]

    def close(self) -> None:
        pass


def copies(memory: Memory, num_slots: int) -> np.ndarray:
    return np.frombuffer(bytes(memory.bytes), index_type(num_slots))


@given(
    before=st.integers(1, 5),
    cut=st.integers(0, 2 * ALIGNMENT_BYTES),
    held=st.dictionaries(
        st.integers(0, 299), st.builds(Held, *[st.integers(0, 2**31 - 1)] * 3, st.integers(0, 2**64 - 1))
    ),
)
def test_a_torn_copy_leaves_the_one_before(before, cut, held):
    """Whatever part of a copy reached the disk: either the new one counts, or the old one does, whole."""
    memory = Memory(2 * index_type(300).itemsize)
    index = SlotIndex(memory, 0, 300)
    for step in range(1, before + 1):
        index.write(step, {0: Held(step, step, step, step)})
    memory.cut = cut
    index.write(99, held)
    found = newest(copies(memory, 300), "here")
    used = {int(slot): Held(*found["slots"][slot].tolist()) for slot in np.flatnonzero(found["slots"]["subgroup"] >= 0)}
    if found["step"] == 99:
        assert used == held
    else:
        assert (found["step"], used) == (before, {0: Held(before, before, before, before)})


def test_an_index_that_was_never_written_or_is_damaged_is_said():
    memory = Memory(2 * index_type(8).itemsize)
    with pytest.raises(CorruptState, match="no copy of the index"):
        newest(copies(memory, 8), "here")
    index = SlotIndex(memory, 0, 8)
    index.write(1, {3: Held(1, 2, 4096, 5)})
    index.write(2, {3: Held(1, 2, 4096, 6)})
    assert newest(copies(memory, 8), "here")["step"] == 2
    memory.bytes[40] ^= 1  # in the second copy, which is the first in the file
    assert newest(copies(memory, 8), "here")["step"] == 1


WRITER = """
import sys
from mlpo_hpc.storage.index import Held, SlotIndex
from mlpo_hpc.storage.posix import open_posix
path, offset = sys.argv[1], int(sys.argv[2])
index = SlotIndex(open_posix(path), offset, 2000)
for step in range(1, 10**9):
    index.write(step, {slot: Held(step, slot, 4096, step) for slot in range(2000)})
    print(step, flush=True)
"""


def test_kill_9_while_the_index_is_written(tmp_path):
    """The file stays readable, and the copy that counts is whole and no older than the last one reported."""
    path = str(tmp_path / "state.h5")
    extent = lay_out(path, [share(0, 2000)], {}, 2**20)[0]
    for kill in range(4):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, path, str(extent.index)], stdout=subprocess.PIPE, text=True
        )
        lines = [writer.stdout.readline() for _ in range(5 + 7 * kill)]
        writer.send_signal(signal.SIGKILL)
        lines += writer.stdout.readlines()
        writer.wait()
        with open_for_reading(path) as file:
            found = newest(file["ranks/0/index"][:], path)
        assert found["step"] >= int(lines[-1])
        assert set(found["slots"]["subgroup"]) == {found["step"]}


# ---- faults ----------------------------------------------------------------------------------


def test_other_files_and_other_versions_are_refused(tmp_path):
    import h5py

    other = str(tmp_path / "other.h5")
    h5py.File(other, "w").close()
    with pytest.raises(ConfigError, match=r"other\.h5 is no state file"), open_for_reading(other):
        pass
    path = str(tmp_path / "state.h5")
    lay_out(path, [share(0, 1)], {"library_version": "9.9"}, 2**20)
    with h5py.File(path, "r+") as file:
        file.attrs["format_version"] = 2
    with pytest.raises(ConfigError, match=r"format 2, this library reads 1: use mlpo_hpc 9\.9"), open_for_reading(path):
        pass
    (tmp_path / "text").write_text("no HDF5")
    with (
        pytest.raises(StorageError, match="opening a state file failed.*text"),
        open_for_reading(str(tmp_path / "text")),
    ):
        pass


def test_a_file_that_another_process_has_locked(tmp_path, monkeypatch):
    monkeypatch.delenv("HDF5_USE_FILE_LOCKING", raising=False)
    path = str(tmp_path / "state.h5")
    lay_out(path, [share(0, 1)], {}, 2**20)
    with open(path, "r+b") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match="HDF5_USE_FILE_LOCKING"), open_for_reading(path):
            pass
        open_posix(path).close()  # our own way does not need the lock
    with open_for_reading(path):
        pass


def test_a_full_file_system_is_found_before_anything_is_made(tmp_path, monkeypatch):
    space = os.statvfs(tmp_path)
    full = os.statvfs_result((space.f_bsize, space.f_frsize, space.f_blocks, 3, 3, *space[5:10]))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    tier = places(tmp_path)
    with pytest.raises(TierFull, match="no room for a state file"), open_alone(tier, Slots(16384, 4)):
        pass
    assert [path.name for path in tmp_path.iterdir() if "mlpo" in path.name] == []


@pytest.mark.parametrize("fails", ["lay_out", "open_posix", "_settle"])
def test_what_fails_on_the_way_leaves_nothing(tmp_path, monkeypatch, fails):
    def fail(*_, **__):
        raise OSError("no luck")

    where = "mlpo_hpc.storage.hdf5.lay_out" if fails == "lay_out" else f"mlpo_hpc.state.node_file.{fails}"
    monkeypatch.setattr(where, fail)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Exception, match="no luck"), open_alone(places(tmp_path), Slots(16384, 4)):
        pass
    assert [path.name for path in tmp_path.iterdir() if "mlpo" in path.name] == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_fails_after_a_file_was_named_takes_it_away(tmp_path, monkeypatch):
    """The second of two kept tiers cannot be laid out."""
    real, calls = node_file._prepare, []

    def fail(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise StorageError("no luck")
        return real(*arguments)

    monkeypatch.setattr(node_file, "_prepare", fail)
    dirs = [tmp_path / "a", tmp_path / "b"]
    tiers = [{"name": path.name, "dir": str(path), "keep": True} for path in dirs]
    for path in dirs:
        path.mkdir()
    with pytest.raises(StorageError, match="no luck"), open_alone(places_of(tiers), Slots(16384, 4)):
        pass
    assert [*dirs[0].iterdir(), *dirs[1].iterdir()] == []


def test_no_file_of_that_name_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setattr(node_file, "_numbers", itertools.repeat(7))
    with open_alone(places(tmp_path, keep=True), Slots(16384, 4)):
        with pytest.raises(StorageError, match="already"), open_alone(places(tmp_path, keep=True), Slots(16384, 4)):
            pass
        assert len(list(tmp_path.glob("*.h5"))) == 1


def test_a_stale_container_of_another_job_is_left_alone(tmp_path):
    """What was kept has a name of its own; a new job neither reads nor changes it."""
    with open_alone(places(tmp_path, keep=True), Slots(16384, 4)) as (container,):
        container.write(0, pattern(1, 16384))
        old = Path(container.path)
    bytes_before = old.read_bytes()
    with open_alone(places(tmp_path, keep=True), Slots(16384, 4)) as (container,):
        assert container.path != str(old)
        container.write(0, pattern(2, 16384))
    assert old.read_bytes() == bytes_before
