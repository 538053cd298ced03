"""The scripts of slurm/, as they are, on two nodes: they train, they measure, and nothing is left on any storage."""

from __future__ import annotations

import json
import re
import shlex
import sys

import pytest
from click.testing import CliRunner

from mlpo_hpc.cli import main
from tests import modulesystems
from tests.centre import NEW, make_centre
from tests.ranks import ROOT
from tests.slurm.test_requeue import ENDS_S, STEPS, losses, read, restart_soon, wait_for, wait_for_end
from tests.slurm.test_slurm import ENVIRONMENTS, TINY, python

DIES = """
import os, signal, time
from mlpo_hpc.storage.folder import private_folder
nvme, pfs = os.environ["MLPO_NVME"], os.environ["MLPO_PFS"] + "/" + os.environ["SLURM_JOB_ID"]
with private_folder(nvme), private_folder(pfs):
    deadline = time.monotonic() + 60  # the end of the first one is the end of the other
    while len(os.listdir(pfs)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
"""
BENCH = "--systems paper,ours --quick --iterations 1 --blocks 4 --hidden 256 --sub-group-size 2e5 --host-memory 32MB"


def submit(bed, folder, script, *options, **environ):
    """Run a script of slurm/ to its end, in a folder that has the example; the log."""
    python("system")
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
    where = {
        "MLPO_VENV": str(ENVIRONMENTS / "system"), "MLPO_NVME": str(bed.scratch), "MLPO_PFS": str(bed.shared),
        "MLPO_HPC_HOST_MEMORY": "16MB", "PYTHONPATH": str(ROOT), **environ,
    }  # fmt: skip
    command = ["sbatch", "--parsable", "--wait", "--output=log", *options, str(ROOT / "slurm" / script)]
    done = bed.run(*command, cwd=folder, **where)
    return done, read(folder / "log")


def check_nothing_is_left(bed):
    done = bed.run("srun", "-N2", "-n2", "--mpi=none", "ls", "-A", str(bed.scratch), str(bed.shared))
    assert done.returncode == 0, done.stderr
    found = {line for line in done.stdout.split("\n") if line and not line.endswith(":")}
    # A folder of Slurm's own for PMIx is removed by it, some time after a step was killed.
    assert {name for name in found if not name.startswith("spmix_appdir_")} == {"lost+found"}


def test_from_a_checkout_with_an_environment_nothing_must_be_set(bed, tmp_path):
    for name, target in {"examples": ROOT / "examples", "slurm": ROOT / "slurm", ".venv": sys.prefix}.items():
        (tmp_path / name).symlink_to(target)
    where = {"MLPO_ARGS": " ".join(TINY), "MLPO_HPC_HOST_MEMORY": "16MB", "PYTHONPATH": str(ROOT)}
    done = bed.run("sbatch", "-N2", "--wait", "--output=log", "slurm/pretrain.sbatch", cwd=tmp_path, **where)
    log = read(tmp_path / "log")
    assert done.returncode == 0, done.stderr + log[-6000:]
    assert "on 2 ranks" in log
    assert [path.name.split("-")[0] for path in (tmp_path / "mlpo").iterdir()] == ["checkpoint"]


def test_many_nodes_start_from_an_environment_on_their_own_disks(bed, tmp_path):
    where = {"MLPO_ARGS": " ".join(TINY), "MLPO_STAGE_VENV": "1"}
    done, log = submit(bed, tmp_path, "multi_node.sbatch", "--ntasks-per-node=2", **where)
    assert done.returncode == 0, log[-6000:]
    (out,) = (tmp_path / "runs").iterdir()
    assert len(losses(out)) == 4
    assert "on 4 ranks" in log
    assert f"pfs hdf5 over mpiio in {bed.shared}/" in log
    assert f"in {bed.scratch}" in log, "both tiers, as the script has them"
    check_nothing_is_left(bed)


def test_python_runs_from_the_copy(bed, tmp_path):
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/pretrain_gpt.py").write_text("import sys; print(sys.prefix)")
    done, log = submit(bed, tmp_path, "single_node.sbatch", "-c2", MLPO_STAGE_VENV="1")
    assert done.returncode == 0, log
    assert f"{bed.scratch}/mlpo_hpc-venv-" in log
    check_nothing_is_left(bed)


def test_the_program_of_the_quickstart_in_the_script_that_it_has_written(bed, tmp_path):
    text = (ROOT / "docs/quickstart.md").read_text()
    (tmp_path / "ds_config.json").write_text(text.split("```json\n")[1].split("```")[0])
    (tmp_path / "train.py").write_text(text.split("```python\n")[1].split("```")[0])
    command = re.search(r"^mlpo (sbatch --nodes 2 .*) -o train.sbatch$", text, re.M)[1]
    options = shlex.split(command.replace("--gpus 4 ", "").replace("PROJECT", "root"))
    written = CliRunner().invoke(main, [*options, "-o", str(tmp_path / "train.sbatch")])
    assert written.exit_code == 0, written.output
    done, log = submit(bed, tmp_path, tmp_path / "train.sbatch")
    assert done.returncode == 0, log[-6000:]
    assert re.findall(r"^(\d) loss .* MB read from nvme pfs$", log, re.M) == list("01234")
    assert (tmp_path / "checkpoints/global_step5/manifest.json").exists()
    check_nothing_is_left(bed)


def test_what_a_killed_rank_leaves_on_each_node_is_removed(bed, tmp_path):
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/pretrain_gpt.py").write_text(DIES)
    done, log = submit(bed, tmp_path, "multi_node.sbatch")
    assert done.returncode != 0
    assert log.count("removed   ") == 4, "one on each disk, two on the shared one: " + log
    check_nothing_is_left(bed)


def test_the_benchmark_measures_on_one_node(bed, tmp_path):
    done, log = submit(bed, tmp_path, "bench.sbatch", "--ntasks-per-node=2", MLPO_ARGS=BENCH)
    assert done.returncode == 0, log[-6000:]
    (out,) = (tmp_path / "runs").iterdir()
    assert json.loads((out / "bench.json").read_text())
    assert (out / "bench.png").exists()
    check_nothing_is_left(bed)


def test_without_a_python_it_says_what_to_do(bed, tmp_path):
    done, log = submit(bed, tmp_path, "single_node.sbatch", MLPO_VENV=str(tmp_path / "none"))
    assert done.returncode == 2
    assert f"there is no {tmp_path}/none/bin/python: load the module before sbatch, or set MLPO_VENV" in log


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return make_centre(tmp_path_factory.mktemp("site"))


@pytest.mark.timeout(3 * ENDS_S)
@pytest.mark.parametrize("system", modulesystems.COMMANDS)
def test_with_the_module_a_job_trains_is_requeued_and_leaves_nothing(system, site, bed, tmp_path):
    if not modulesystems.find(system):
        pytest.skip(f"{system} is not installed (see .ci/packages)")
    for name in ("examples", "slurm"):
        (tmp_path / name).symlink_to(ROOT / name)
    where = {name: bed.environ[name] for name in ("SLURM_CONF", "OMPI_MCA_btl_tcp_if_include", "DS_ACCELERATOR")} | {
        "MLPO_NVME": str(bed.scratch), "MLPO_PFS": str(bed.shared), "SCRATCH": str(tmp_path), "OMP_NUM_THREADS": "1",
        "MLPO_ARGS": f"--size tiny --steps {STEPS} --context 64", "MLPO_HPC_HOST_MEMORY": "16MB",
    }  # fmt: skip
    script = "module load mlpo_hpc && mlpo sbatch --requeue | cmp - slurm/pretrain.sbatch && \
        sbatch --parsable -N2 --output=log slurm/pretrain.sbatch"
    done = modulesystems.run(system, script, site.modulefiles, tmp_path, **where)
    assert done.returncode == 0, done.stdout + done.stderr
    job, log = done.stdout.strip(), tmp_path / "log"

    wait_for("the second step", lambda: "step 2/" in read(log), log)
    bed.run("scancel", "--batch", "--signal=USR1", job)
    restart_soon(bed, job, log)
    found = wait_for_end(bed, job, log)
    assert (found["JobState"], found["Restarts"]) == ("COMPLETED", "1"), read(log)[-6000:]
    parts = [len(losses(tmp_path / f"runs/{job}/{restart}")) for restart in (0, 1)]
    assert sum(parts) == STEPS
    assert parts[0] >= 2
    assert f"apps/mlpo_hpc/{NEW}" in (site.apps / "modulefiles/mlpo_hpc" / f"{NEW}.lua").read_text()
    check_nothing_is_left(bed)
