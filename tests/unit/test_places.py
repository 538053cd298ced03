"""Tier directories: what is refused before any training, and the lock of one job."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mlpo_hpc.config import load
from mlpo_hpc.errors import ConfigError, StorageError
from mlpo_hpc.state.node_file import Slots
from mlpo_hpc.storage import filesystem, place
from mlpo_hpc.storage.contention import Crew, _load, measure
from mlpo_hpc.storage.filesystem import describe
from mlpo_hpc.storage.lock import DirectoryLock
from mlpo_hpc.storage.place import find_places
from mlpo_hpc.storage.probe import open_probe
from tests.containers import open_alone


def with_tiers(*dirs, **extra):
    tiers = [{"name": f"t{i}", "dir": str(path), **extra} for i, path in enumerate(dirs)]
    return load({"mlp_offload": {"tiers": tiers}})


def test_faults_of_all_tiers_come_together(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        find_places(with_tiers(tmp_path / "missing", tmp_path / "file", "${NOT_SET_HERE}/x"))
    text = str(caught.value)
    for part in ("'t0'", "create the directory", "'t1'", "is not a directory", "'t2'", "NOT_SET_HERE", "rank 0"):
        assert part in text


def test_memory_is_refused_unless_it_is_meant(monkeypatch, tmp_path):
    monkeypatch.setattr(filesystem, "_mount_of", lambda real: ("/dev/shm", "tmpfs"))
    monkeypatch.setattr(filesystem, "_magic", lambda real: 0)
    with pytest.raises(ConfigError, match=r"tmpfs.*allow_memory"):
        find_places(with_tiers(tmp_path))
    assert find_places(with_tiers(tmp_path, allow_memory=True))[0].filesystem.is_memory


def test_dev_shm_is_seen_as_memory():
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no /dev/shm on this machine")
    assert describe("/dev/shm").is_memory


def test_two_tiers_on_one_device_are_warned_of(tmp_path, caplog):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert len(find_places(with_tiers(tmp_path / "a", tmp_path / "b"))) == 2
    assert "on one device" in caplog.text
    caplog.clear()
    find_places(with_tiers(tmp_path / "a"))
    assert "on one device" not in caplog.text
    with pytest.raises(ConfigError, match="given to two tiers"):
        find_places(with_tiers(tmp_path / "a", tmp_path / "a"))


@pytest.mark.parametrize("variable", place.BATCH_JOB_VARIABLES)
def test_a_batch_job_must_say_its_tiers(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ConfigError, match='"tiers"'):
        find_places(load({}))


def test_default_tiers_are_two_directories_that_leave_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(place.tempfile, "tempdir", str(tmp_path))
    places = find_places(load({}))
    assert [p.tier.name for p in places] == ["nvme", "pfs"]
    assert all(p.ours and p.path == str(tmp_path) for p in places)
    with open_alone(places, Slots(4096, 2)) as containers:
        assert [str(container) for container in containers] == [
            f"raw over posix in {tmp_path}",
            f"hdf5 over posix in {tmp_path}",
        ]
        assert [path for path in tmp_path.iterdir() if "mlpo" in path.name] == [], "even if we were killed now"
        for container in containers:
            container.write(1, memoryview(mmap.mmap(-1, 4096)))


def test_default_tiers_avoid_memory(monkeypatch):
    monkeypatch.setattr(place.tempfile, "tempdir", "/dev/shm")
    if describe("/dev/shm").is_memory:
        assert find_places(load({}))[0].path.startswith("/var/tmp")


def test_auto_takes_the_first_usual_place_that_is_no_memory(monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path / "missing"))
    monkeypatch.setenv("LOCALSCRATCH", "/dev/shm")
    monkeypatch.setenv("LOCAL_SCRATCH", str(tmp_path))
    found = find_places(load({"mlp_offload": {"tiers": [{"name": "nvme", "dir": "auto"}]}}))
    assert found[0].path == str(tmp_path)
    assert found[0].ours, "others use it too: it is not locked"
    for name in ("SCRATCH", "PSCRATCH", "WORK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="'dir'"):
        place.auto_base("shared")


def locked_by_us(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def test_a_directory_belongs_to_one_job_until_it_ends(tmp_path):
    code = f"""
import sys
from mlpo_hpc.storage.lock import DirectoryLock
lock = DirectoryLock({str(tmp_path)!r})
print("locked", flush=True)
sys.stdin.read()
"""
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "locked\n"
    with pytest.raises(StorageError, match=rf"another job uses .*process {other.pid}.*{tmp_path}"):
        DirectoryLock(str(tmp_path))
    other.kill()  # kill -9: the kernel frees the lock, and no file is left
    other.wait()
    lock, second = DirectoryLock(str(tmp_path)), DirectoryLock(str(tmp_path))  # two engines of one process
    lock.close()
    lock.close()
    assert locked_by_us(tmp_path)
    second.close()
    assert not locked_by_us(tmp_path)
    assert list(tmp_path.glob("*lock*")) == []


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, caplog):
    import errno

    def refuse(fd, how):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    DirectoryLock(str(tmp_path)).close()
    assert "cannot be locked" in caplog.text


def test_a_quick_look_finds_bandwidth_and_leaves_nothing(tmp_path):
    with open_probe(str(tmp_path), 2**40) as probe:
        assert probe.chunk_bytes == 8 * 2**20
        probe.fill()
        found = measure(probe, Crew(0, 1, 1, lambda value: [value]))
    assert list(found.rates_bps) == ["off"], "alone there is nothing to compare"
    assert found.typical_bps(found.best_scope()) > 0
    assert [path for path in tmp_path.iterdir() if path.is_file()] == []


def test_a_nearly_full_tier_is_looked_at_with_what_is_there(tmp_path):
    with open_probe(str(tmp_path), 100_000) as probe:
        assert probe.chunk_bytes == 3 * 4096
        probe.fill()
        assert measure(probe, Crew(0, 1, 1, lambda value: [value])).typical_bps("off") > 0


@pytest.mark.parametrize("bps", [20e6, 100e6, 1e9, 20e9])
@pytest.mark.parametrize("step", [1, 2, 8, 12])
def test_a_phase_is_at_most_about_a_second_in_even_shares(bps, step):
    probe = SimpleNamespace(chunk_bytes=8 * 2**20)
    load = _load(probe, step, bps)
    assert load.num_pieces % step == 0
    assert load.piece_bytes % 4096 == 0
    assert load.piece_bytes <= probe.chunk_bytes
    least, wanted = 2**20 * step, min(bps, 256 * 2**20)
    assert load.num_pieces * load.piece_bytes <= max(1.5 * wanted, least)
    assert load.num_pieces * load.piece_bytes >= min(0.5 * wanted, least)
