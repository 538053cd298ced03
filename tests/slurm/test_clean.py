"""``mlpo clean`` asks a real Slurm: what a running job may hold stays, what is left of one that is over goes."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from tests.ranks import ROOT

LEFT = """#!/bin/sh
#SBATCH --nodelist=n1 --output={out}
{python} -c '
import os, signal
from mlpo_hpc.storage.folder import private_folder
with private_folder("{where}") as folder:
    open(folder + "/state.h5", "w").write("state")
    os.kill(os.getpid(), signal.SIGKILL)
'
echo killed
exec sleep 300
"""
WAIT_S = 60.0


def clean(bed, *options):
    done = bed.run(sys.executable, "-m", "mlpo_hpc", "clean", str(bed.shared), "--json", *options, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return [(one["outcome"], one["reason"]) for one in json.loads(done.stdout)["leftovers"]]


def wait_for(what):
    deadline = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.2)


def test_what_a_killed_process_left_goes_when_its_job_is_over(bed, tmp_path):
    script, out = tmp_path / "job.sh", tmp_path / "job.out"
    script.write_text(LEFT.format(python=sys.executable, where=bed.shared, out=out))
    done = bed.run("sbatch", "--parsable", str(script), PYTHONPATH=str(ROOT))
    job = done.stdout.strip()
    assert job.isdecimal(), done.stderr
    wait_for(lambda: out.exists() and "killed" in out.read_text())
    (name,) = (path.name for path in Path(bed.shared).iterdir())
    assert name.startswith(".mlpo_hpc-n1-")
    assert f"-slurm.bed.{job}.0-" in name
    assert clean(bed) == [("in use", f"Slurm says that job {job} is RUNNING")]
    bed.run("scancel", job)
    wait_for(lambda: clean(bed, "--dry-run")[0][0] == "dead")
    assert clean(bed) == [("removed", f"Slurm says that job {job} is over")]
    assert list(bed.shared.iterdir()) == []


def test_a_job_that_slurm_has_forgotten_is_over(bed):
    folder = bed.shared / ".mlpo_hpc-n1-12345678-slurm.bed.999999.0-1-5-0"
    folder.mkdir()
    assert clean(bed) == [("removed", "Slurm knows no job 999999 any more")]
