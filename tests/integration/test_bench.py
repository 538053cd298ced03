"""`mlpo bench` for real, with tiny models. What stock DeepSpeed compiles is not needed here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlpo_hpc.bench.crew import BenchError, Team, Worker
from tests import testbed

TINY = ["--blocks", "4", "--hidden", "64", "--sub-group-size", "1e4", "--iterations", "2"]
COMMAND = [sys.executable, "-m", "mlpo_hpc", "bench", *TINY]


def bench(folder, *args):
    """What a run says, and what it measured."""
    out = folder / "out.json"
    command = [*COMMAND, *args, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done, json.loads(out.read_text())


@pytest.fixture
def tiers(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    return [f"{name}={tmp_path / name}" for name in ("a", "b")]


@pytest.fixture
def disks(tmp_path):
    """The test bed, or why there is none; afterwards none of it is left in this test's folder for temporary files."""
    if reason := testbed.missing():
        pytest.skip(reason)
    yield
    devices = subprocess.run(["losetup", "-a"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in devices
    assert str(tmp_path) not in Path("/proc/mounts").read_text()


@pytest.mark.long
@pytest.mark.parametrize("case", ["node_local", pytest.param("shared", marks=pytest.mark.whole)])
def test_checkpoints_beside_training_are_measured_and_nothing_is_left(case, tiers, tmp_path):
    small = ["--blocks", "4", "--hidden", "64", "--sub-group-size", "1e4", "--host-memory", "1MB", "--saves", "2"]
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "mlpo_hpc", "bench", "checkpoint", *tiers, *small, "--ga", "1"]
    command += ["--case", case, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "in units of reading it once" in done.stdout
    found = json.loads(out.read_text())
    (figures,) = found["cases"].values()
    assert figures["committed_within_iterations"]["min"] >= 1
    assert 12 <= figures["bytes_per_parameter"] < 16, "small files have whole blocks"
    assert figures["load_s"] > 0
    samples = found["samples"][case]
    assert [len(samples[key]) for key in ("plain", "saves", "writers", "committed_s")] == [2] * 4
    assert all(samples["writers"]), "it took one iteration at least"
    assert [list((tmp_path / name).iterdir()) for name in ("a", "b")] == [[], []]


@pytest.mark.long
def test_two_systems_take_turns_on_two_tiers(tiers, tmp_path):
    args = ["--systems", "paper,ours", "--host-memory", "1MB", "--picture", str(tmp_path / "pictures")]
    done, found = bench(tmp_path, *tiers, *args)
    assert [(s["system"], s["accumulation"]) for s in found["samples"]] == [
        (system, accumulation) for accumulation in (1, 8) for system in ("paper", "ours") for _ in range(2)
    ]
    for sample in found["samples"]:
        assert sample["iteration_s"] >= sample["forward_s"] + sample["backward_s"] + sample["update_s"] > 0
        assert set(sample["read_bytes"]) == {"a", "b"}
    assert sum(sum(sample["written_bytes"].values()) for sample in found["samples"]) > 0
    assert all(tier["read_bps"] > 0 for tier in found["conditions"]["tiers"])
    assert found["conditions"]["facts"]["torch"]
    assert set(found["systems"]) == {"paper", "ours"}
    losses = [sample["loss"] for sample in found["samples"]]
    assert losses[:2] == losses[2:4], "both are exact"
    assert found["ratios"]["update_vs_paper_policies"]["median"] > 0
    assert found["timelines"]["ours"]["phases"]
    assert (tmp_path / "pictures" / "bench.png").exists()
    assert (tmp_path / "pictures" / "timeline.png").exists()
    assert "round 1/1: ours" in done.stderr
    assert not list((tmp_path / "a").iterdir())
    assert not list((tmp_path / "b").iterdir())


@pytest.mark.whole
@pytest.mark.usefixtures("disks")
def test_one_tier_of_a_test_bed(tmp_path):
    _, found = bench(tmp_path, "--testbed", "slow=50", "--systems", "ours", "--ga", "1", "--host-memory", "1MB")
    (tier,) = found["conditions"]["tiers"]
    assert tier["name"] == "slow"
    assert 40e6 < tier["read_bps"] < 70e6
    assert 40e6 < tier["write_bps"] < 70e6
    assert found["conditions"]["facts"]["caps_bps"] == {"slow": 50_000_000}
    assert "update_vs_nvme" not in found["ratios"]


@pytest.mark.whole
def test_host_memory_only_on_two_ranks(tmp_path):
    _, found = bench(tmp_path, "--no-tiers", "--systems", "ours", "--ga", "2", "--ranks", "2")
    assert [sample["accumulation"] for sample in found["samples"]] == [2, 2]
    assert found["rows"][0]["text_tokens"] == 4 * 2 * 2


@pytest.mark.long
@pytest.mark.usefixtures("disks")
def test_a_signal_undoes_everything(tmp_path):
    """The disks are looked at by the fixture, the processes here."""
    with (tmp_path / "log").open("w") as log:
        command = [*COMMAND, "--testbed", "a=100", "--systems", "ours", "--host-memory", "1MB", "--iterations", "9999"]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_for(tmp_path / "log", "round 2/", process)
        workers = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 1
    assert workers
    assert not any(os.path.exists(f"/proc/{pid}") for pid in workers)
    assert not list((tmp_path / "tmp").glob("mlpo-*"))


def wait_for(log, words, process):
    deadline = time.monotonic() + 150
    while words not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


def test_a_worker_that_dies_is_told_with_its_last_lines(tmp_path):
    worker = Worker("system 'x', rank 0,", {}, {"PATH": os.environ["PATH"]}, tmp_path / "log")
    try:
        with pytest.raises(BenchError, match=r"(?s)system 'x', rank 0, ended.*KeyError"):
            Team([worker]).hear(100)
    finally:
        worker.kill()
