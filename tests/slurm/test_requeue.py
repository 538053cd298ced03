"""The end of the walltime under a real Slurm: saved, requeued, finished, as if nothing had been."""

from __future__ import annotations

import re
import time

import pytest

from tests.ranks import ROOT
from tests.slurm.test_slurm import ENVIRONMENTS, losses, python, tiers

STEPS = 60
ENDS_S = 300


SLOW_TO_EXIT = """
import os, time
time.sleep(2 * int(os.environ["SLURM_PROCID"]))
os._exit(85)
"""


def submit(bed, folder, *options):
    """The batch script as it is, in a folder that holds what it starts; the number of the job."""
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
    python("system")
    where = {
        "MLPO_VENV": str(ENVIRONMENTS / "system"), "MLPO_NVME": str(bed.scratch), "MLPO_PFS": str(bed.shared),
        "MLPO_ARGS": f"--size tiny --steps {STEPS} --context 64", "MLPO_SRUN_MPI": "pmix", "PYTHONPATH": str(ROOT),
        "SCRATCH": str(folder), **tiers(bed.scratch, bed.shared),
    }  # fmt: skip
    script = str(ROOT / "slurm/pretrain.sbatch")
    done = bed.run("sbatch", "--parsable", "-N2", "--output=log.%j", *options, script, cwd=folder, **where)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def facts(bed, job):
    return dict(re.findall(r"(\w+)=(\S+)", bed.run("scontrol", "show", "job", "--oneliner", job).stdout))


def wait_for(what, condition, log):
    deadline = time.monotonic() + ENDS_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {ENDS_S} s\n{read(log)[-6000:]}"
        time.sleep(0.05)


def read(log):
    return log.read_text() if log.exists() else ""


def restart_soon(bed, job, log):
    """Slurm lets a requeued job wait for two minutes. A node counts in seconds, and refuses it in that of its end."""
    wait_for("the requeued job", lambda: facts(bed, job)["JobState"] == "PENDING", log)
    assert facts(bed, job)["Restarts"] == "1", read(log)[-6000:]
    bed.run("scontrol", "update", f"JobId={job}", "StartTime=now+3")


def wait_for_end(bed, job, log):
    wait_for("the end of the job", lambda: facts(bed, job)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED"), log)
    return facts(bed, job)


@pytest.mark.timeout(3 * ENDS_S)
def test_a_job_saves_before_its_time_limit_requeues_itself_and_finishes(bed, tmp_path):
    """Its tasks are held still until Slurm's signal is there, so that they are in the middle, on any machine."""
    straight = submit(bed, tmp_path)
    log = tmp_path / f"log.{straight}"
    assert wait_for_end(bed, straight, log)["JobState"] == "COMPLETED", read(log)[-6000:]

    job = submit(bed, tmp_path, "--time=2", "--signal=B:USR1@45")
    log = tmp_path / f"log.{job}"
    wait_for("the second step", lambda: "step 2/" in read(log), log)
    bed.run("scancel", "--signal=STOP", job)
    wait_for("Slurm's signal", lambda: "USR1: the time limit is near" in read(log), log)
    bed.run("scancel", "--batch", "--signal=USR1", job)
    wait_for("a second one", lambda: read(log).count("USR1: the time limit is near") == 2, log)
    bed.run("scancel", "--signal=CONT", job)
    restart_soon(bed, job, log)
    assert wait_for_end(bed, job, log)["JobState"] == "COMPLETED", read(log)[-6000:]

    text = read(log)
    assert text.count("asked to stop by SIGUSR2: all ranks stop after this step") == 1
    first, second = (losses(tmp_path / f"runs/{job}/{restart}") for restart in (0, 1))
    assert f"at step {len(first)}" in text
    assert 2 <= len(first) < STEPS
    assert first + second == losses(tmp_path / f"runs/{straight}/0")
    assert list(bed.shared.iterdir()) == []


@pytest.mark.timeout(3 * ENDS_S)
@pytest.mark.parametrize(("why", "state"), [("file", "COMPLETED"), ("restarts", "FAILED"), ("user", "CANCELLED")])
def test_what_is_not_requeued(why, state, bed, tmp_path, monkeypatch):
    """A stop file, too many restarts and the user's own scancel end the job."""
    if why == "restarts":
        monkeypatch.setenv("MLPO_MAX_RESTARTS", "0")
    job = submit(bed, tmp_path)
    log = tmp_path / f"log.{job}"
    wait_for("the first step", lambda: "step 1/" in read(log), log)
    if why == "file":
        (tmp_path / f"stop-{job}").touch()
    else:
        bed.run("scancel", *(["--batch", "--signal=USR1"] if why == "restarts" else []), job)
    found = wait_for_end(bed, job, log)
    assert (found["JobState"], found["Restarts"]) == (state, "0"), read(log)[-6000:]
    if why != "user":
        assert f"submitted again with MLPO_CHECKPOINT={tmp_path}/mlpo/checkpoint-{job}" in read(log)
        assert (tmp_path / f"mlpo/checkpoint-{job}/latest").exists()
    assert found["ExitCode"].split(":")[0] == ("85" if why == "restarts" else "0")


def test_ranks_that_exit_one_after_the_other_are_not_killed(bed, tmp_path, monkeypatch):
    """`--kill-on-bad-exit=1` would end the second rank by a signal, and that would be the status of the step."""
    monkeypatch.setenv("MLPO_MAX_RESTARTS", "0")
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/pretrain_gpt.py").write_text(SLOW_TO_EXIT)
    job = submit(bed, tmp_path)
    found = wait_for_end(bed, job, tmp_path / f"log.{job}")
    assert found["ExitCode"] == "85:0", read(tmp_path / f"log.{job}")
