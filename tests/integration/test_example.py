"""The example as a user runs it: help, alone, mpirun, torchrun, stop and resume; and `offload()`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mlpo_hpc.cli import main
from mlpo_hpc.cluster.network import first_free_port
from tests.ranks import ROOT

EXAMPLE = [sys.executable, "examples/pretrain_gpt.py"]
TINY = ["--size", "tiny", "--steps", "4", "--context", "64"]


def example(tmp_path, *arguments, launcher=(), env=None, config=None, leaves=0, exit_code=0):
    """Run it; return what it printed and the figures of its steps."""
    tiers = []
    for name in ("nvme", "pfs"):
        (tmp_path / name).mkdir(exist_ok=True)
        tiers += ["--tier", f"{name}={tmp_path / name}"]
    out = ["--out", str(tmp_path / "out")]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    full = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PATH": path, **(env or {})}
    where = ["--config", config] if config else ["--host-memory", "12MB", *tiers]
    command = [*launcher, *EXAMPLE, *TINY, *where, *out, *arguments]
    done = subprocess.run(command, env=full, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == exit_code, (done.stdout + done.stderr)[-4000:]
    assert len([*(tmp_path / "nvme").iterdir(), *(tmp_path / "pfs").iterdir()]) == leaves
    return done.stdout, json.loads((tmp_path / "out/steps.json").read_text())


def losses(figures):
    return [step["loss"] for step in figures]


def test_help_needs_no_launcher():
    done = subprocess.run([*EXAMPLE, "--help"], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0
    for word in ("--size", "--tier", "--checkpoint", "mpirun", "torchrun"):
        assert word in done.stdout


def test_alone_it_shows_progress_a_summary_and_a_picture(tmp_path):
    text, figures = example(tmp_path)
    for words in ("step 4/4", "loss", "text tokens/s", "nvme", "GB/s", "cache", "ETA", "cache hits / misses"):
        assert words in text
    assert (tmp_path / "out/run.png").read_bytes().startswith(b"\x89PNG")
    assert len(figures) == 4
    assert figures[-1]["bytes_read"] > 10**6, "most of the state is streamed"
    assert figures[-1]["step"] == 4


@pytest.mark.whole  # tests/unit/test_trace.py has its parts
def test_a_trace_shows_phases_subgroups_and_every_chunk(tmp_path):
    env = {"MLPO_HPC_TELEMETRY__DIR": str(tmp_path / "traces"), "MLPO_HPC_TELEMETRY__TRACE": "true"}
    _, figures = example(tmp_path, env=env)
    text = (tmp_path / "traces/trace.0.json").read_text()
    found = json.loads(text.rstrip().rstrip(",") + "]")
    rows = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}
    by_track = {}
    for event in found:
        if event["ph"] == "X":
            by_track.setdefault(rows[event["tid"]].split(" 2")[0], []).append(event)
    assert {"phases", "compute", "nvme read", "nvme write", "pfs read", "pfs write"} <= set(by_track)
    names = [event["name"] for event in by_track["phases"]]
    assert names.count("update") == names.count("forward") == names.count("backward") == 4
    read = sum(e["args"].get("bytes", 0) for track in ("nvme read", "pfs read") for e in by_track[track])
    assert read >= sum(step["bytes_read"] for step in figures)


@pytest.mark.long
def test_a_run_and_its_next_start_are_one_report(tmp_path):
    env = {"MLPO_HPC_TELEMETRY__DIR": str(tmp_path / "telemetry")}
    checkpoint = ["--checkpoint", str(tmp_path / "ckpt")]
    _, first = example(tmp_path, "--steps", "2", *checkpoint, env=env)
    _, second = example(tmp_path, *checkpoint, env=env)
    done = CliRunner().invoke(main, ["report", str(tmp_path / "telemetry"), "--json", "-o", str(tmp_path / "run.html")])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert [start["steps"] for start in found["starts"]] == [[1, 2], [3, 4]]
    assert losses(found["steps"]) == losses(first) + losses(second)
    assert [line["tiers"]["nvme"] != {} for line in found["steps"]] == [True] * 4
    read = [sum(of["bytes_read"] for tier in s["tiers"].values() for of in tier.values()) for s in found["steps"]]
    assert read == [step["bytes_read"] for step in first + second]
    page = (tmp_path / "run.html").read_text()
    assert "Loss over steps" in page
    assert "restart at step 3" in page


@pytest.mark.whole  # tests/unit/test_hdf5.py reads such files
def test_kept_state_files_are_read_by_any_tool(tmp_path):
    example(tmp_path, "--keep", leaves=2)
    files = [str(path) for name in ("nvme", "pfs") for path in (tmp_path / name).glob("*.h5")]
    read = [sys.executable, "examples/read_moments.py", "blocks.0.qkv.weight", *files]
    done = subprocess.run(read, capture_output=True, text=True, timeout=60, cwd=ROOT, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["fp32", "exp_avg", "exp_avg_sq"]
    assert "(768, 256)" in done.stdout
    if shutil.which("h5ls") is None:
        pytest.skip("no h5ls (Debian: hdf5-tools)")
    done = subprocess.run(["h5ls", "-r", files[0]], capture_output=True, text=True, timeout=60, check=True)
    for name in ("/parameters/blocks.0.qkv.weight", "/ranks/0/slots", "/ranks/0/index", "/ranks/0/records"):
        assert name in done.stdout


def test_mpirun_and_torchrun_train_the_same(tmp_path):
    if shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") is None:
        pytest.skip("no mpirun on PATH")
    by_mpi, by_torch = tmp_path / "mpi", tmp_path / "torch"
    by_mpi.mkdir()
    by_torch.mkdir()
    text, one = example(by_mpi, "--host-memory", "24MB", launcher=[str(ROOT / ".ci/mpirun"), "2"])
    assert "on 2 ranks" in text
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(first_free_port()),
    ]
    command = [*torchrun, "--no-python"]
    text, two = example(by_torch, "--host-memory", "24MB", launcher=command)
    assert "on 2 ranks" in text
    assert losses(one) == losses(two)


DYING = """
import torch
from mlpo_hpc.cluster import launch
from mlpo_hpc.cluster.node import start_mpi
launch.prepare()
world = start_mpi()
torch.distributed.init_process_group("gloo")  # wraps the hook of exceptions
if world.rank == world.size - 1:
    raise RuntimeError("this rank is gone")
world.Barrier()  # where the others would wait for ever
"""


def test_an_uncaught_exception_under_mpirun_ends_the_world_with_its_traceback(tmp_path):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    if shutil.which("mpirun", path=path) is None:
        pytest.skip("no mpirun on PATH")
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    command = [str(ROOT / ".ci/mpirun"), "2", sys.executable, str(script)]
    done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "this rank is gone" in done.stdout + done.stderr


def test_stopped_and_resumed_it_goes_on_as_if_nothing_had_been(tmp_path):
    straight, halves = tmp_path / "straight", tmp_path / "halves"
    straight.mkdir()
    halves.mkdir()
    _, whole = example(straight, "--steps", "6")
    checkpoint = ["--checkpoint", str(halves / "ckpt")]
    _, first = example(halves, "--steps", "3", *checkpoint)
    text, second = example(halves, "--steps", "6", *checkpoint)
    assert "at step 3" in text
    assert "step 4/6" in text
    assert losses(first) + losses(second) == losses(whole)
    text, _ = example(halves, "--steps", "6", *checkpoint)  # submitted once more
    assert "nothing to do: step 6 of 6 is reached" in text


@pytest.mark.long
def test_asked_to_stop_it_saves_exits_with_85_and_goes_on_later(tmp_path):
    straight, parts, stop = tmp_path / "straight", tmp_path / "parts", tmp_path / "stop"
    straight.mkdir()
    parts.mkdir()
    _, whole = example(straight)
    checkpoint = ["--checkpoint", str(parts / "ckpt")]
    stop.touch()
    text, first = example(parts, *checkpoint, env={"MLPO_HPC_STOP_FILE": str(stop)}, exit_code=85)
    assert "step 1/4" in text
    assert "step 2/4" not in text
    stop.unlink()
    text, second = example(parts, *checkpoint, "--lead", "0.001", env={"MLPO_HPC_STOP_FILE": str(stop)})
    assert "resumed from" in text
    assert text.count("the stop signal comes 0 s before the time limit, but the last checkpoint took") == 1
    assert losses(first) + losses(second) == losses(whole)
    text, _ = example(parts, "--steps", "5", *checkpoint, "--lead", "1000")
    assert "step 5/5" in text
    assert "the stop signal" not in text, "a thousand seconds are enough"


@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.whole), "fp16"])
def test_other_types_and_accumulation(tmp_path, dtype):
    if dtype == "fp16" and "avx512_fp16" not in Path("/proc/cpuinfo").read_text():
        dtype = "fp32"  # DeepSpeed refuses fp16 on CPUs without units for it; the gate covers fp16
    config = tmp_path / "ds.json"
    config.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 2,
                **({} if dtype == "fp32" else {"fp16": {"enabled": True}}),
                "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
                "zero_optimization": {
                    "stage": 3,
                    "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / "made/for/us")},
                },
            }
        )
    )
    _, figures = example(tmp_path, config=str(config), env={"MLPO_HPC_HOST_MEMORY": "16MB"})
    assert list(figures[0]["tiers"]) == ["nvme"], "DeepSpeed's nvme_path became a tier"
    assert figures[-1]["loss"] < figures[0]["loss"]


OFFLOAD = """
import argparse, json, sys
import deepspeed, torch
from deepspeed import initialize as imported_by_name
import mlpo_hpc
from mlpo_hpc.engine.stage3 import OffloadStage3

config = json.loads(sys.argv[1])
model = torch.nn.Linear(8, 8)

stock = deepspeed.initialize
try:
    with mlpo_hpc.offload(config):
        pass
except mlpo_hpc.MlpoError as error:
    print("EMPTY", error)
try:
    with mlpo_hpc.offload(config):
        raise KeyError("mine")
except KeyError:
    print("OWN ERROR PASSES")
mlpo_hpc.init_distributed()
try:
    with mlpo_hpc.offload(config):
        other = torch.nn.Linear(8, 8)
        plain = {key: config[key] for key in ("train_micro_batch_size_per_gpu", "zero_optimization")}
        imported_by_name(model=other, optimizer=torch.optim.AdamW(other.parameters()), config=plain)
except Exception as error:
    print("BYPASS", error)
with mlpo_hpc.offload(sys.argv[2]):  # the same, as a file, through args as scripts of today pass it
    args = argparse.Namespace(deepspeed_config=sys.argv[2], local_rank=0)
    engine = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())[0]
    reference = deepspeed.initialize(model=torch.nn.Linear(8, 8), config={"train_batch_size": 1})[0]
    print("REFERENCE", reference.optimizer)
    nested = mlpo_hpc.initialize(
        model=(small := torch.nn.Linear(4, 4)), model_parameters=small.parameters(), config=config
    )[0]
    print("NESTED", isinstance(nested.optimizer, OffloadStage3))
    nested.destroy()
    try:
        imported_by_name(model=other, optimizer=torch.optim.AdamW(other.parameters()), config=plain)
    except Exception as error:
        print("STILL REFUSED", error)
assert isinstance(engine.optimizer, OffloadStage3)
assert deepspeed.initialize is stock
loss = engine(torch.randn(1, 8)).sum()
engine.backward(loss)
engine.step()
print("STEPS", engine.optimizer.offload_report()["step"])
print("FORWARD", engine.optimizer.offload_report()["forward_s"] > 0)
engine.destroy()
"""


def test_offload_is_strict_and_leaves_deepspeed_as_it_was(tmp_path):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "mlp_offload": {"tiers": [{"name": "disk", "dir": str(tmp_path)}], "host_memory": "1MB"},
    }
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config))
    env = {**os.environ, "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-c", OFFLOAD, json.dumps(config), str(file)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "EMPTY nothing was initialised" in done.stdout
    assert "OWN ERROR PASSES" in done.stdout
    assert "BYPASS call deepspeed.initialize through the module" in done.stdout
    assert "STILL REFUSED call deepspeed.initialize through the module" in done.stdout
    assert "REFERENCE None" in done.stdout, "what does not train is stock's"
    assert "NESTED True" in done.stdout
    assert "STEPS 1" in done.stdout
    assert "FORWARD True" in done.stdout


def test_the_readme_s_example_runs_as_it_stands(tmp_path):
    code = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert code.count("\n") <= 12
    env = {**os.environ, "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "cache_hits" in done.stdout
    assert list((tmp_path / "tmp").rglob("mlpo*")) == [], "the embedded default's directories are gone"


def test_a_mistake_is_said_in_words_once_on_any_number_of_ranks(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    mpirun = [str(ROOT / ".ci/mpirun"), "2"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PATH": path}
    for launcher in ([*torchrun, "--master-port", str(first_free_port())], mpirun):
        command = [*launcher, *EXAMPLE, *TINY, "--tier", f"a={tmp_path}/missing"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, cwd=ROOT)
        text = done.stdout + done.stderr
        assert done.returncode != 0
        assert text.count("the offload engine cannot start") == 1, text
        assert "What to do: create the directory" in text
        assert 'pretrain_gpt.py", line' not in text, "no traceback of ours; torchrun shows one of its own"


def test_nothing_is_compiled(tmp_path):
    """https://github.com/deepspeedai/DeepSpeed/issues/7346: neither a compiler nor libaio is needed"""
    example(tmp_path, "--steps", "1", env={"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"), "CXX": "/bin/false"})
    assert not (tmp_path / "extensions").exists()
