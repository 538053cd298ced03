"""Under a real Slurm of two nodes: the example, tokens and scratch of each node, and what goes wrong with srun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.ranks import ROOT
from tests.slurm import bed as slurm

ENVIRONMENTS = Path(sys.prefix) / "mpi"
TINY = ["--size", "tiny", "--steps", "4", "--context", "64"]


def python(name):
    path = ENVIRONMENTS / name / "bin/python"
    if not path.exists():
        pytest.skip(f"no {path}: 'make test-slurm' makes it where an MPI is on PATH")
    return str(path)


def srun(bed, *command, options=(), **environ):
    where = {"PYTHONPATH": str(ROOT), **environ}
    return bed.run("srun", "-N2", "-n4", *options, *command, **where)


def tiers(nvme, pfs):
    found = [{"name": "nvme", "dir": str(nvme)}, {"name": "pfs", "dir": str(pfs), "kind": "shared"}]
    return {"MLPO_HPC_TIERS": json.dumps(found), "MLPO_HPC_HOST_MEMORY": "16MB"}


def example(bed, out, *options, interpreter="system", **environ):
    command = [python(interpreter), str(ROOT / "examples/pretrain_gpt.py"), *TINY, "--out", str(out)]
    done = srun(bed, *command, options=options, **tiers(bed.scratch, bed.shared), **environ)
    return done, done.stdout + done.stderr


def losses(out):
    return [step["loss"] for step in json.loads((out / "steps.json").read_text())]


def test_srun_trains_what_mpirun_trains(bed, tmp_path):
    """Four ranks on two nodes by PMIx: losses are those of ``mpirun -n 4`` here, and nothing is left."""
    done, text = example(bed, tmp_path / "srun", "--mpi=pmix")
    assert done.returncode == 0, text[-6000:]
    assert "tokens: backend 'mpi' (MPI's world is the training world)" in text
    assert "hosts n1, n2 are containers on one machine" in text, "which they are"
    assert f"pfs hdf5 over mpiio in {bed.shared}" in text
    assert list(bed.shared.iterdir()) == []
    for name in ("nvme", "pfs"):
        (tmp_path / name).mkdir()
    env = {
        **os.environ, **tiers(tmp_path / "nvme", tmp_path / "pfs"), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
        "PATH": f"{ENVIRONMENTS}/system/bin:{os.environ['PATH'].replace(str(Path(sys.prefix) / 'bin'), '')}",
    }  # fmt: skip
    command = [ROOT / ".ci/mpirun", "4", python("system"), "examples/pretrain_gpt.py", *TINY]
    with (tmp_path / "log").open("w") as log:
        code = subprocess.call(
            [*command, "--out", tmp_path / "mpirun"], env=env, stdout=log, stderr=log, cwd=ROOT, timeout=300
        )
    assert code == 0, (tmp_path / "log").read_text()[-6000:]
    assert losses(tmp_path / "srun") == losses(tmp_path / "mpirun")


def look(bed, folder, *options, interpreter, launcher=()):
    folder.mkdir()
    command = [python(interpreter), *launcher, "-m", "tests.slurm.worker", str(bed.scratch), str(folder)]
    done = srun(bed, *command, options=options)
    files = [folder / f"rank.{rank}" for rank in range(4)]
    assert all(file.exists() for file in files), (done.stdout + done.stderr)[-6000:]
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return [json.loads(file.read_text()) for file in files]


def check_nodes(found):
    """Each node has its own token and scratch, and every rank knows its place."""
    sizes = Counter(rank["host"] for rank in found)
    assert set(sizes) == {"n1", "n2"}
    assert len({rank["environ"]["MASTER_PORT"] for rank in found}) == 1
    for number, rank in enumerate(found):
        assert rank["environ"]["RANK"] == str(number)
        assert rank["environ"]["WORLD_SIZE"] == "4"
        assert rank["environ"]["LOCAL_WORLD_SIZE"] == str(sizes[rank["host"]])
        assert rank["environ"]["LOCAL_RANK"] == str(rank["node"][0])
        assert rank["node"][1] == sizes[rank["host"]]
        assert rank["seen"] == [rank["host"]], "the scratch of the other node is another disk"
        if rank["backend"] == "mpi" or rank["node"][0] > 0:
            assert rank["locked"], "the first rank of this node holds it"
        first = next(other for other, theirs in enumerate(found) if theirs["host"] == rank["host"])
        assert rank["holders"] in ([first], []), "and nobody of the other node is known here"


@pytest.mark.parametrize(("interpreter", "mpi"), [("system", "pmix"), ("openmpi", "pmix"), ("mpich", "pmi2")])
@pytest.mark.parametrize("spread", ["block", "even"])
def test_each_node_has_its_own_tokens_and_scratch(interpreter, mpi, spread, bed, tmp_path):
    options = ["--ntasks-per-node=2"] if spread == "even" else []
    found = look(bed, tmp_path / "look", f"--mpi={mpi}", *options, interpreter=interpreter)
    check_nodes(found)
    assert {rank["backend"] for rank in found} == {"mpi"}
    assert sorted(rank["node"][1] for rank in found) == ([2, 2, 2, 2] if spread == "even" else [1, 3, 3, 3])


def test_torchrun_under_srun_takes_file_locks(bed, tmp_path):
    """One task a node starts two ranks each: MPI would see two worlds of one, so it is not asked."""
    folder = tmp_path / "look"
    folder.mkdir()
    inner = ["-m", "tests.slurm.worker", str(bed.scratch), str(folder)]
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{slurm.first_free_port()}", "--rdzv-id=bed"]
    command = [python("system"), "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", *rendezvous, *inner]
    done = bed.run("srun", "-N2", "-n2", "--mpi=pmix", *command, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    found = [json.loads((folder / f"rank.{rank}").read_text()) for rank in range(4)]
    check_nodes(found)
    assert {rank["backend"] for rank in found} == {"flock"}
    assert "torchrun does not" in found[0]["reason"]


@pytest.mark.parametrize("interpreter", ["system", "openmpi", "mpich"])
def test_n_worlds_of_one_are_an_error_that_names_the_option(interpreter, bed, tmp_path):
    done, text = example(bed, tmp_path / "out", "--mpi=none", interpreter=interpreter)
    assert done.returncode != 0
    if interpreter == "mpich":
        assert "MPI (MPICH Version: 5.0.2) sees a world of 1" in text.replace("\t", " ").replace("      ", " ")
        assert "Start with srun --mpi=pmi2" in text
    else:
        assert "srun started 4 processes without a way for MPI to find the others" in text
        assert "Start with srun --mpi=pmix" in text
    assert text.count("cannot start") == 1, "said once, not by every rank"
    assert "Traceback" not in text
    assert "step 1/" not in text


def test_what_the_nodes_share_is_found_out(bed, tmp_path):
    """Neither is told its kind; ext4 is local by name, but one of them is mounted on both nodes."""
    dirs = [{"name": "nvme", "dir": str(bed.scratch)}, {"name": "pfs", "dir": str(bed.shared)}]
    command = [python("system"), str(ROOT / "examples/pretrain_gpt.py"), *TINY, "--out", str(tmp_path / "out")]
    where = {"MLPO_HPC_HOST_MEMORY": "16MB", "MLPO_HPC_TOKENS__BACKEND": "mpi"}
    done = srun(bed, *command, options=["--mpi=pmix"], MLPO_HPC_TIERS=json.dumps(dirs), **where)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text[-6000:]
    assert f"tier pfs: {bed.shared} (ext4) is shared by the nodes" in text
    assert f"tier nvme: {bed.scratch}" not in text, "each node has its own, as its type says"
    wrong = json.dumps([{**dirs[0], "kind": "shared"}, dirs[1]])
    done = srun(bed, *command, options=["--mpi=pmix"], MLPO_HPC_TIERS=wrong, **where)
    text = done.stdout + done.stderr
    assert done.returncode != 0
    assert "tier 'nvme' is 'shared', but what the first node writes there is not seen on host n2" in text


def test_tuning_uses_the_ranks_it_was_given(bed):
    command = [python("system"), "-m", "mlpo_hpc", "stripe", str(bed.shared), "--tune", "--seconds=0.2", "--writers=2"]
    done = srun(bed, *command, "--json", options=["--mpi=pmix"])
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["writers"] == 8
    assert found["results"][0]["write_bps"] > 0
    assert list(bed.shared.iterdir()) == []


def test_probing_takes_the_ranks_of_one_node(bed):
    command = [
        python("system"),
        "-m",
        "mlpo_hpc",
        "probe",
        f"pfs={bed.shared}",
        "--seconds=0.1",
        "--rounds=1",
        "--json",
    ]
    done = bed.run("srun", "-N1", "-n3", "--mpi=pmix", *command, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["measured"][0]["ranks"] == 3
    assert found["mlp_offload"]["tiers"][0]["write_bps"] > 0
    assert list(bed.shared.iterdir()) == []
    done = srun(bed, *command, options=["--mpi=pmix"])
    assert done.returncode != 0
    assert "the ranks are on 2 hosts: a node is what is measured, start with srun -N1" in done.stdout + done.stderr


def doctor(bed, tmp_path, *options, interpreter="system", kinds=("node_local", "shared"), script="exec"):
    """Its report, and the text of all tasks."""
    tiers = [
        {"name": "nvme", "dir": str(bed.scratch), "kind": kinds[0]},
        {"name": "pfs", "dir": str(bed.shared), "kind": kinds[1]},
    ]
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}, "mlp_offload": {"tiers": tiers}}))
    command = f"{script} {python(interpreter)} -m mlpo_hpc doctor --config {path} --parameters 1e6 --timeout 8 --json"
    done = srun(bed, "bash", "-c", command, options=options)
    text = done.stdout + done.stderr
    assert done.stdout.count('"fit"') == 1, f"one report: {text}"
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["fit"] else 1), text
    assert list(bed.shared.iterdir()) == []
    return {f"{line['check']} {line['subject']}".strip(): line for line in reversed(found["findings"])}, found


@pytest.mark.parametrize(("interpreter", "mpi"), [("system", "pmix"), ("openmpi", "pmix"), ("mpich", "pmi2")])
def test_the_doctor_gives_one_report_of_both_nodes(interpreter, mpi, bed, tmp_path):
    lines, found = doctor(bed, tmp_path, f"--mpi={mpi}", interpreter=interpreter)
    assert (found["fit"], found["hosts"], found["num_ranks"]) == (True, ["n1", "n2"], 4)
    good = [
        "pmi",
        "mpi",
        "thread level",
        "h5py",
        "nodes",
        "tier nvme",
        "tier pfs",
        "sharing nvme",
        "sharing pfs",
        "space",
    ]
    assert {name: lines[name]["verdict"] for name in good} == dict.fromkeys(good, "ok")
    assert lines["tier nvme"]["hosts"] == ["n1", "n2"], "both say the same: one line"
    assert lines["mpi"]["seen"].popitem()[0].endswith("one world of 4 ranks")
    assert lines["sharing pfs"]["seen"] == {"the nodes see the same files": [""]}


@pytest.mark.parametrize(
    ("interpreter", "mpi"), [("system", "none"), ("mpich", "none"), ("mpich", "pmix"), ("system", "pmi2")]
)
def test_the_doctor_finds_a_launcher_that_is_none_of_this_mpi(interpreter, mpi, bed, tmp_path):
    lines, found = doctor(bed, tmp_path, f"--mpi={mpi}", interpreter=interpreter)
    assert (lines["mpi"]["verdict"], found["num_ranks"]) == ("fail", 4), "all nodes are heard all the same"
    assert "--mpi=pmi2" in lines["mpi"]["advice"] or "--mpi=pmix" in lines["mpi"]["advice"]
    assert lines["mpi"]["hosts"] == ["n1", "n2"]


def test_the_doctor_names_a_node_that_does_not_answer_and_what_nodes_do_not_share(bed, tmp_path):
    """The only task of n2 sleeps: MPI_Init of the others does not return, and nobody waits for that for ever."""
    sleep = 'if [ "$SLURM_PROCID" = 3 ]; then exec sleep 20; fi; exec'
    lines, _ = doctor(bed, tmp_path, "--mpi=pmix", script=sleep)
    assert (lines["nodes"]["verdict"], lines["nodes"]["hosts"]) == ("fail", ["n2"])
    assert lines["nodes"]["seen"] == {"rank 3: no answer within 13 s": ["n2"]}
    assert "gave no answer in time" in next(iter(lines["mpi"]["seen"]))
    lines, _ = doctor(bed, tmp_path, "--mpi=pmix", kinds=("shared", "node_local"))
    assert (lines["sharing nvme"]["verdict"], lines["sharing pfs"]["verdict"]) == ("fail", "warn")


def test_without_mpi_file_locks_do(bed, tmp_path):
    done, text = example(bed, tmp_path / "out", "--mpi=none", MLPO_HPC_TOKENS__BACKEND="flock")
    assert done.returncode == 0, text[-6000:]
    assert len(losses(tmp_path / "out")) == 4
    assert "tokens: backend 'flock' (as configured)" in text
    assert "tier pfs: transport 'posix', for MPI-IO cannot be used: " in text
    assert f"pfs hdf5 over posix in {bed.shared}" in text


@pytest.mark.parametrize(("interpreter", "mpi"), [("system", "pmix"), ("mpich", "pmi2")])
def test_containers_and_transports_on_two_nodes(interpreter, mpi, bed, tmp_path):
    """The bodies of the MPI tests, with a file for each node: three ranks share one, one has its own."""
    command = [python(interpreter), "-m", "tests.mpi", "files"]
    # A rank that died would leave the others waiting in MPI_Finalize under PMI 2.
    options = [f"--mpi={mpi}", "--kill-on-bad-exit=1"]
    done = srun(bed, *command, options=options, MPI_TEST_RECORDS=str(tmp_path))
    finished = sorted(path.name for path in tmp_path.glob("finished.*"))
    assert finished == [f"finished.{rank}" for rank in range(4)], (done.stdout + done.stderr)[-6000:]


def test_the_batch_script_runs_as_it_is(bed, tmp_path):
    python("system")
    where = {
        "MLPO_VENV": str(ENVIRONMENTS / "system"), "MLPO_PFS": str(bed.shared), "MLPO_NVME": str(bed.scratch),
        "MLPO_ARGS": f"{' '.join(TINY)} --out {tmp_path}/out", "MLPO_CHECKPOINT": str(tmp_path / "checkpoint"),
        "PYTHONPATH": str(ROOT), **tiers(bed.scratch, bed.shared),
    }  # fmt: skip
    job = [f"--output={tmp_path}/log", "-N2", "--ntasks-per-node=2", "--wait", "slurm/pretrain.sbatch"]
    done = bed.run("sbatch", *job, cwd=ROOT, **where)
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "log").read_text()[-6000:]
    assert len(losses(tmp_path / "out")) == 4
    assert list(bed.shared.iterdir()) == [], "the job's directory is gone"


def test_a_dead_holder_is_named_where_the_launcher_does_not_end_the_job(bed, tmp_path):
    """PMI 2 tells nobody of a death (PMIx does, and Slurm then ends the job at once)."""
    command = [python("mpich"), "-m", "tests.mpi.killed"]
    where = {"PYTHONPATH": str(ROOT), "MPI_TEST_RECORDS": str(tmp_path)}
    done = bed.run("srun", "-N1", "-n2", "--mpi=pmi2", "--kill-on-bad-exit=0", *command, timeout_s=60, **where)
    text = done.stdout + done.stderr
    assert done.returncode != 0
    assert (tmp_path / "holding").exists()
    assert not (tmp_path / "survived").exists()
    assert "rank 0 (process " in text, text
    assert "on n1) died" in text


def test_the_interface_and_the_port_can_be_given(bed, tmp_path):
    done, text = example(bed, tmp_path / "out", "--mpi=pmix", MLPO_HPC_INTERFACE="lo", MASTER_PORT="21234")
    assert done.returncode == 0, text[-6000:]
    done, text = example(bed, tmp_path / "none", "--mpi=pmix", MLPO_HPC_INTERFACE="hsn9")
    assert done.returncode != 0
    assert "no address on a network interface 'hsn9'; it has lo" in text
