"""Batch scripts: those in the tree are what ``mlpo sbatch`` writes, and what is not known is left to the user."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from mlpo_hpc.batch.machine import GENERIC, Fact, machines
from mlpo_hpc.batch.render import BatchJob, left_to_the_user, render
from mlpo_hpc.cli import main
from mlpo_hpc.cluster.sites import sites

ROOT = Path(__file__).parent.parent.parent
WRITTEN_BY = "# Written by: "
TREE = sorted([*(ROOT / "slurm").glob("*.sbatch"), *(ROOT / "tests/unit/sbatch").glob("*.sbatch")])
JOBS = [
    BatchJob(),
    BatchJob(kind="requeue", nodes=3, gpus=2, account="abc-1", partition="gpu", time="1-00:30"),
    BatchJob(kind="requeue", command="""python train.py --name "it's" --resume "$MLPO_CHECKPOINT" """),
    BatchJob(kind="bench"),
]


def mlpo(*words):
    return CliRunner().invoke(main, list(words))


@pytest.mark.parametrize("path", TREE, ids=lambda path: path.stem)
def test_a_script_in_the_tree_is_what_its_own_command_writes(path):
    """To change one: change the template, run the command that its third line has, and write what it prints there."""
    text = path.read_text()
    command = next(line for line in text.split("\n") if line.startswith(WRITTEN_BY)).removeprefix(WRITTEN_BY)
    done = mlpo(*shlex.split(command)[1:])
    assert done.exit_code == 0, done.output
    assert done.stdout == text


def test_the_tree_has_a_script_for_each_machine_and_each_kind():
    text = "\n".join(path.read_text() for path in TREE)
    for name in machines():
        assert f"--site {name}" in text
    for name in ("single_node", "multi_node", "pretrain", "bench"):
        assert (ROOT / f"slurm/{name}.sbatch").exists()


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.kind}{job.nodes}")
@pytest.mark.parametrize("name", machines())
def test_every_script_is_bash_without_a_fault_that_is_known_of(name, job, tmp_path):
    path = tmp_path / "job.sbatch"
    path.write_text(render(machines()[name], job))
    subprocess.run(["bash", "-n", str(path)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(path)], check=True)
    lines = path.read_text().split("\n")
    last_request = max(number for number, line in enumerate(lines) if line.startswith("#SBATCH "))
    assert all(line.startswith("#") for line in lines[: last_request + 1]), "Slurm reads on until the first command"


@pytest.mark.parametrize("name", [name for name in machines() if name != GENERIC])
def test_every_fact_has_its_page(name):
    facts = [fact for _, fact in machines()[name] if isinstance(fact, Fact)]
    assert len(facts) >= 2
    script = render(machines()[name], BatchJob(command="true"))
    for fact in facts:
        assert fact.source.startswith("https://")
        if fact is not machines()[name].partition:
            assert fact.remark in script


def test_every_site_with_slurm_has_its_machine():
    assert {name for name, site in sites().items() if site.scheduler == "Slurm"} == set(machines()) - {GENERIC}


def test_what_is_not_known_is_said_in_the_script_and_beside_it():
    done = mlpo("sbatch", "--site", "jsc", "--json")
    found = json.loads(done.stdout)
    assert [text.split("=")[0] for text in found["left_to_you"]] == [
        "--account", "--partition", "--cpus-per-task", "MLPO_NVME",
    ]  # fmt: skip
    for text in found["left_to_you"]:
        assert f"#   {text}\n" in found["script"]
    assert "#SBATCH --partition" not in found["script"]
    text = mlpo("sbatch", "--site", "jsc", "--partition", "booster", "--account", "x").stderr
    assert "--partition" not in text
    assert "left to you: --cpus-per-task=N" in text
    assert left_to_the_user(machines()["lumi"], BatchJob(account="project_1")) == []


def test_a_site_is_found_by_its_environment(monkeypatch):
    monkeypatch.setenv("NERSC_HOST", "perlmutter")
    assert json.loads(mlpo("sbatch", "--json").stdout)["site"] == "perlmutter"
    monkeypatch.delenv("NERSC_HOST")
    assert json.loads(mlpo("sbatch", "--json").stdout)["site"] == "generic"


def test_a_site_without_slurm_is_told_what_to_do():
    done = mlpo("sbatch", "--site", "polaris")
    assert done.exit_code == 2
    assert "polaris has PBS, not Slurm" in done.stderr
    assert "mpiexec" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--site", "x"], "no machine 'x' is known; there are generic, frontier"),
        (["--nodes", "0"], "--nodes 0: "),
        (["--time", "1h"], "--time 1h: "),
        (["--time", "10\n#SBATCH --x"], "--time 10"),
        (["--account", "a\nrm"], "--account a"),
        (["--requeue", "--bench"], "give either --requeue or --bench"),
        (["--bench", "--nodes", "2"], "the benchmark runs mlpo bench, on one node"),
        (["--script", "a 'b"], "bash does not read the command"),
        (["--script", "a && b"], "put more into a script"),
        (["--script", "a\nb"], "put more into a script"),
        (["--script", " "], "put more into a script"),
    ],
)
def test_what_makes_no_script_is_an_error_that_says_why(options, message):
    done = mlpo("sbatch", *options)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stdout == ""


def test_a_file_that_is_there_is_not_overwritten(tmp_path):
    path = tmp_path / "job.sbatch"
    assert mlpo("sbatch", "-o", str(path)).exit_code == 0
    text = path.read_text()
    path.write_text("mine")
    done = mlpo("sbatch", "-o", str(path))
    assert (done.exit_code, path.read_text()) == (1, "mine")
    assert "is there already" in done.stderr
    assert text == (ROOT / "slurm/single_node.sbatch").read_text()


def test_what_comes_from_outside_cannot_add_lines():
    for field in ("account", "partition", "time"):
        with pytest.raises(ValidationError):
            BatchJob.model_validate({field: "1\n#SBATCH --wrap=true"})
