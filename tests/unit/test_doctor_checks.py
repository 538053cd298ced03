"""The doctor's checks one by one, with bad situations made for real where that can be done."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from mlpo_hpc.config import OffloadConfig, Tier, load
from mlpo_hpc.doctor import gpu, hdf5, memory, mpi, own, software, storage
from mlpo_hpc.doctor.plan import read_plan
from mlpo_hpc.doctor.room import judge_devices, judge_space, room_bytes
from mlpo_hpc.doctor.start import Start, find_start, judge_start
from mlpo_hpc.doctor.storage import Room
from mlpo_hpc.storage import filesystem
from mlpo_hpc.storage.filesystem import describe
from mlpo_hpc.storage.striping import Component, StripeLayout
from tests.ranks import ROOT

SRUN = {
    "SLURM_JOB_ID": "7", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip


def answer_of(look, *arguments, **environ):
    """Of a look in a process of its own, as the command has it."""
    env = {**os.environ, **environ}
    command = [sys.executable, "-m", "mlpo_hpc.doctor.looks", look, *arguments]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.partition("answers: ")[2])


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {"launcher": ("skipped", "no launcher")}),
        ({"SLURM_JOB_ID": "7"}, {"launcher": ("skipped", "a batch job (SLURM_JOB_ID is set)")}),
        (SRUN, {"launcher": ("ok", "srun started 4 ranks, 2 on this node"), "pmi": ("fail", "--mpi=none")}),
        ({**SRUN, "PMIX_RANK": "2"}, {"launcher": ("ok", "4 ranks"), "pmi": ("ok", "PMIX_RANK")}),
    ],
)
def test_the_launcher_and_its_pmi(environ, expected):
    start = find_start(environ)
    found = {finding.check: finding for finding in judge_start(start, environ, needs_mpi=True)}
    assert {name: finding.verdict for name, finding in found.items()} == {name: v for name, (v, _) in expected.items()}
    assert all(words in found[name].seen for name, (_, words) in expected.items())


def test_without_tokens_by_mpi_a_lack_of_pmi_is_a_warning():
    assert judge_start(find_start(SRUN), SRUN, needs_mpi=False)[1].verdict == "warn"
    assert find_start(SRUN).num_nodes == 2


def test_a_host_that_submits_jobs_is_a_login_node(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not find_start({}).is_login
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    assert find_start({}).is_login
    assert not find_start({"SLURM_JOB_ID": "7"}).is_login
    assert not find_start(SRUN).is_login


def test_n_worlds_of_one_are_found_for_real():
    """Variables as of a launcher whose MPI is another one: MPI_Init makes a world of one."""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    started = dict(zip((f"OMPI_COMM_WORLD_{name}" for name in names), "0202", strict=True))
    facts = mpi.MpiFacts.model_validate(answer_of("mpi", "2", "0", **started))
    (finding,) = mpi.judge(facts, "", find_start(started), needs_mpi=True)
    assert (finding.check, finding.verdict) == ("mpi", "fail")
    assert "Open MPI started 2 processes, but MPI (" in finding.seen
    assert "sees a world of 1" in finding.seen
    assert "mpirun of the MPI library that mpi4py loads" in finding.advice
    assert mpi.judge(facts, "", find_start(started), needs_mpi=False)[0].verdict == "warn"


def test_on_a_login_node_mpi_is_loaded_and_not_started():
    facts = mpi.MpiFacts.model_validate(answer_of("mpi", "0", "0"))
    assert facts.library
    assert not facts.thread_level
    assert mpi.judge(facts, "", Start(), needs_mpi=True)[0].verdict == "skipped"


def test_a_missing_mpi_library_is_said():
    facts = mpi.MpiFacts.model_validate(answer_of("mpi", "0", "0", MPI4PY_LIBMPI="/nowhere/libmpi.so"))
    assert "/nowhere/libmpi.so" in facts.missing
    verdicts = {
        launcher: mpi.judge(facts, "", Start(launcher, size=2, by_mpi=bool(launcher)), needs_mpi=True)[0].verdict
        for launcher in ("", "srun", "Open MPI")
    }
    assert verdicts == {"": "skipped", "srun": "warn", "Open MPI": "fail"}, "srun's ranks meet without it"


@pytest.mark.parametrize("level", mpi.LEVELS)
def test_threads_need_the_highest_level(level):
    facts = mpi.MpiFacts(library="MPI 1", thread_level=level, hosts=["n1", "n1"])
    world, threads = mpi.judge(facts, "", Start("srun", size=2), needs_mpi=True)
    assert (world.verdict, world.seen) == ("ok", "MPI 1: one world of 2 ranks")
    assert threads.verdict == ("ok" if level == "MPI_THREAD_MULTIPLE" else "warn")


def test_an_mpi_that_ends_the_process_is_a_finding():
    (finding,) = mpi.judge(None, "ended without an answer (exit code 16)", Start("srun", size=2), needs_mpi=True)
    assert finding.verdict == "fail"
    assert "srun --mpi=pmix for Open MPI" in finding.advice


def test_h5py_that_cannot_be_imported_is_said(tmp_path):
    (tmp_path / "h5py.py").write_text("raise ImportError('undefined symbol: MPI_Foo')")
    facts = hdf5.Hdf5Facts.model_validate(answer_of("h5py", PYTHONPATH=str(tmp_path)))
    finding = hdf5.judge(facts, "")
    assert finding.verdict == "fail"
    assert "ImportError: undefined symbol: MPI_Foo" in finding.seen
    good = hdf5.judge(hdf5.Hdf5Facts.model_validate(answer_of("h5py")), "")
    assert (good.verdict, "over HDF5" in good.seen) == ("ok", True)
    assert "gave no answer" in hdf5.judge(None, "gave no answer in time").seen


def test_a_gpu_that_torch_does_not_see(monkeypatch):
    facts = gpu.GpuFacts.model_validate(answer_of("gpu", CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES=""))
    assert (facts.count, facts.error) == (0, "")
    environ = {"CUDA_VISIBLE_DEVICES": ""}
    finding = gpu.judge(facts, "", ["/dev/nvidia0"], environ, Start("srun"))
    assert finding.verdict == "fail"
    assert "though there is /dev/nvidia0" in finding.seen
    assert "CUDA_VISIBLE_DEVICES=''" in finding.advice


@pytest.mark.parametrize(
    ("facts", "trouble", "verdict"),
    [
        (gpu.GpuFacts(torch="2", kind="cuda", count=4), "", "ok"),
        (gpu.GpuFacts(torch="2", kind="cuda", count=1), "", "ok"),  # each rank may see one of its own
        (gpu.GpuFacts(torch="2", kind="cuda", count=2), "", "fail"),
        (gpu.GpuFacts(torch="2", kind="cuda", count=4, error="ECC"), "", "fail"),
        (None, "gave no answer in time", "fail"),
    ],
)
def test_gpus_are_as_many_as_ranks_and_work(facts, trouble, verdict):
    assert gpu.judge(facts, trouble, ["/dev/nvidia0"], {}, Start("srun", size=8, local_size=4)).verdict == verdict


def test_signs_of_gpus(tmp_path):
    (tmp_path / "nvidia0").touch()
    assert gpu.signs_of_gpus({}, (str(tmp_path / "nvidia[0-9]*"),)) == [str(tmp_path / "nvidia0")]
    assert gpu.signs_of_gpus({"SLURM_GPUS_ON_NODE": "4"}, ()) == ["SLURM_GPUS_ON_NODE=4"]
    assert gpu.signs_of_gpus({"SLURM_GPUS_ON_NODE": "0"}, ()) == []
    verdicts = [gpu.without_gpu({}, start).verdict for start in (Start(), Start("srun"))]
    assert verdicts == ["skipped", "warn"]
    assert gpu.without_gpu({"DS_ACCELERATOR": "cpu"}, Start("srun")).verdict == "ok"


def test_versions_are_those_that_were_tested(tmp_path, monkeypatch):
    wanted = ["torch<1", "no-such-package>=2", "click>=8", "mpi4py>=4; extra == 'mpi'"]
    folder = tmp_path / "pretend-1.0.dist-info"
    folder.mkdir()
    lines = ["Metadata-Version: 2.1", "Name: pretend", "Version: 1.0", *(f"Requires-Dist: {text}" for text in wanted)]
    (folder / "METADATA").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    found = {finding.subject: finding for finding in software.judge_versions("pretend")}
    assert {name: finding.verdict for name, finding in found.items()} == {"torch": "warn", "no-such-package": "fail"}
    assert found["no-such-package"].advice == "pip install 'no-such-package>=2'"
    assert software.judge_versions("not-installed")[0].verdict == "skipped"


def test_a_stale_compile_lock_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert software.judge_locks().verdict == "ok"
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    assert software.judge_locks().verdict == "ok", "somebody compiles"
    os.utime(lock, (time.time() - 3600,) * 2)
    finding = software.judge_locks()
    assert finding.verdict == "warn"
    assert str(lock) in finding.seen


def test_host_memory_must_be_there(monkeypatch):
    assert memory.judge_memory(OffloadConfig()).verdict == "ok"
    greedy = load({"mlp_offload": {"host_memory": "900TB"}})
    finding = memory.judge_memory(greedy)
    assert finding.verdict == "fail"
    assert "'host_memory' is 900,000 GB" in finding.seen
    monkeypatch.setattr(memory, "available_bytes", lambda: 2**20)
    finding = memory.judge_memory(OffloadConfig())
    assert finding.verdict == "warn"
    assert "limited by the job's control group" in finding.seen


def test_a_small_limit_of_locked_memory_is_a_warning():
    """In a process of its own: what was lowered may not be raised again."""
    code = (
        "import resource; from mlpo_hpc.doctor.memory import judge_memlock\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536)); print(judge_memlock().model_dump_json())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["verdict"] == "warn"
    assert "may lock 64 KiB" in found["seen"]
    assert "ulimit -l unlimited" in found["advice"]


def test_locked_memory_without_a_limit_is_good(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert memory.judge_memlock().seen == "unlimited"


def test_shared_memory(tmp_path, monkeypatch):
    assert memory.judge_shm(1, tmp_path).verdict == "ok"
    assert memory.judge_shm(1, tmp_path / "none").verdict == "fail"
    space = SimpleNamespace(total=64 * 2**20, free=2**20)
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda path: space)
    finding = memory.judge_shm(1, tmp_path)
    assert finding.verdict == "warn"
    assert "--shm-size" in finding.advice


@pytest.mark.parametrize(
    ("count", "text"), [(1234567890, "1.2 GB"), (2**37, "140 GB"), (0, "0 GB"), (5e5, "0.0005 GB")]
)
def test_sizes_have_two_digits(count, text):
    assert memory.gigabytes(count) == text


def test_a_usable_tier_is_described_and_nothing_is_left(tmp_path):
    facts = storage.look(Tier(name="nvme", dir=str(tmp_path), capacity="3GB").model_dump_json(), "1")
    assert [(finding.check, finding.subject) for finding in facts.findings][:2] == [
        ("tier", "nvme"),
        ("direct I/O", "nvme"),
    ]
    assert facts.findings[0].verdict == "ok"
    assert str(tmp_path) in facts.findings[0].seen
    assert facts.room.capacity_bytes == 3 * 10**9
    assert [path for path in tmp_path.iterdir() if path.is_file()] == []


@pytest.mark.parametrize(
    ("directory", "seen", "advice"),
    [
        ("${NOT_SET}/x", "needs the environment variable NOT_SET, which is not set", "set the variable"),
        ("{tmp}/missing", "ENOENT", "create the directory"),
        ("{tmp}/file", "is not a directory that this user may write", "correct"),
    ],
)
def test_a_tier_that_cannot_be_used(directory, seen, advice, tmp_path):
    (tmp_path / "file").touch()
    tier = Tier(name="nvme", dir=directory.replace("{tmp}", str(tmp_path)))
    facts = storage.look(tier.model_dump_json(), "1")
    (finding,) = facts.findings
    assert finding.verdict == "fail"
    assert seen in finding.seen
    assert advice in finding.advice
    assert "host " not in finding.seen, "which differs between nodes that see the same"
    assert facts.room is None


def test_a_tier_in_memory_is_a_trap():
    if not os.access("/dev/shm", os.W_OK) or not describe("/dev/shm").is_memory:
        pytest.skip("no tmpfs to be tried")
    (finding,) = storage.look(Tier(name="nvme", dir="/dev/shm").model_dump_json(), "1").findings
    assert finding.verdict == "fail"
    assert "tmpfs: its files are host memory" in finding.seen
    meant = storage.look(Tier(name="nvme", dir="/dev/shm", allow_memory=True).model_dump_json(), "1")
    assert meant.findings[0].verdict == "ok"


def test_without_direct_io_a_tier_is_slower(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "open_unnamed", lambda path, size: SimpleNamespace(direct=False, close=lambda: None))
    found = storage.look(Tier(name="nvme", dir=str(tmp_path)).model_dump_json(), "1").findings
    assert (found[1].check, found[1].verdict) == ("direct I/O", "warn")


@pytest.mark.parametrize(
    ("policy", "layout", "verdict", "words"),
    [
        ("inherit", "-c 1", "warn", "'-c 4 -S 4194304' is usual"),
        ("inherit", "-c 4 -S 4194304", "ok", "-c 4"),
        ("auto", "-c 1", "ok", "'-c 4 -S 4194304' will be set"),
        ("inherit", None, "warn", "there is no 'lfs' on PATH on this node"),
    ],
)
def test_striping_on_lustre(policy, layout, verdict, words, tmp_path, monkeypatch):
    monkeypatch.setattr(filesystem, "_magic", lambda real: 0x0BD00BD0)
    monkeypatch.setenv("PATH", "/nowhere")
    count, _, size = (layout or "").removeprefix("-c ").partition(" -S ")
    if layout:
        there = StripeLayout((Component(int(count), int(size) if size else None),))
        monkeypatch.setattr(storage, "get_layout", lambda directory: there)
    tier = Tier(name="pfs", dir=str(tmp_path), striping={"policy": policy})
    finding = storage.look(tier.model_dump_json(), "2").findings[2]
    assert (finding.check, finding.verdict) == ("striping", verdict)
    assert words in finding.seen


def test_usual_places_are_told_where_no_tier_is_configured(tmp_path, monkeypatch):
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    (finding,) = storage.look_at_places().findings
    assert finding.verdict == "skipped"
    assert f"{tmp_path} (" in finding.seen


def write(tmp_path, section=None, **rest):
    path = tmp_path / "ds_config.json"
    offload = {"mlp_offload": section} if section is not None else {}
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}, **offload, **rest}))
    return str(path)


@pytest.mark.parametrize(
    ("section", "rest", "expected"),
    [
        ({"tiers": []}, {"bf16": {"enabled": True}}, 10),
        ({"tiers": []}, {}, 12),
        ({"tiers": [], "state_format": "fp32"}, {"bf16": {"enabled": True}}, 12),
        ({"tiers": [{"name": "a", "dir": "/x", "keep": True}]}, {"bf16": {"enabled": True}}, 12),
    ],
)
def test_state_takes_10_or_12_bytes_a_parameter(section, rest, expected, tmp_path):
    plan = read_plan(write(tmp_path, section, **rest))
    assert plan.item_bytes == expected
    assert plan.findings[0].verdict == "ok"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda tmp_path: str(tmp_path / "none.json"), "cannot read the DeepSpeed configuration"),
        (lambda tmp_path: write(tmp_path, {"tires": []}), "unknown key 'tires'"),
        (lambda tmp_path: write(tmp_path, {}, zero_optimization={"stage": 2}), "works with ZeRO stage 3"),
    ],
)
def test_a_faulty_configuration_is_a_finding(make, words, tmp_path):
    (finding,) = read_plan(make(tmp_path)).findings
    assert (finding.check, finding.verdict) == ("configuration", "fail")
    assert words in finding.seen


def test_a_batch_job_needs_tiers(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    found = read_plan(write(tmp_path, {})).findings
    assert [(finding.check, finding.verdict) for finding in found] == [("configuration", "ok"), ("tier", "fail")]
    assert "Say which storage to use" in found[1].advice
    assert len(read_plan(None).findings) == 1, "without a file nobody knows"


def room(device="a", free=100e9, capacity=None, shared=False):
    return Room(
        path="/x", filesystem="ext4", device=device, free_bytes=int(free), capacity_bytes=capacity, shared=shared
    )


@pytest.mark.parametrize(
    ("rooms", "expected"),
    [
        ([], 0),
        ([room()], 100e9),
        ([room(), room()], 100e9),
        ([room(), room("b", 50e9)], 150e9),
        ([room(), room("b", 80e9, shared=True)], 120e9),
        ([room(capacity=10**9)], 1e9),
        ([room(capacity=10**9), room(capacity=2 * 10**9)], 3e9),
    ],
)
def test_free_space_counts_once_and_is_divided_by_the_nodes_that_fill_it(rooms, expected):
    assert room_bytes(rooms, num_nodes=4) == expected


@pytest.mark.parametrize(("state", "verdict"), [(5e9, "ok"), (40e9, "ok"), (60e9, "warn"), (101e9, "fail")])
def test_state_must_fit(state, verdict):
    assert judge_space(int(state), [room()], budget_bytes=10**10, num_nodes=1).verdict == verdict


def test_two_tiers_on_one_device_are_told():
    (finding,) = judge_devices({"nvme": room("a"), "pfs": room("b"), "more": room("a")})
    assert (finding.subject, finding.verdict) == ("more", "warn")
    assert "with tier nvme" in finding.seen


def test_a_named_interface_must_exist(monkeypatch):
    assert own._network() == []
    monkeypatch.setenv("MLPO_HPC_INTERFACE", "lo")
    assert own._network()[0].verdict == "ok"
    monkeypatch.setenv("MLPO_HPC_INTERFACE", "hsn9")
    (finding,) = own._network()
    assert finding.verdict == "fail"
    assert finding.seen.startswith("this node has no address on a network interface 'hsn9'")
