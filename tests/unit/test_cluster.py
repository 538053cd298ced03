"""Launchers' variables, host memory and control groups."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from mlpo_hpc.cluster import launch, memory, network, node
from mlpo_hpc.cluster.cores import fair_cores, thread_advice
from mlpo_hpc.cluster.memory import _cgroup_headrooms
from mlpo_hpc.errors import ConfigError, MpiMismatch
from mlpo_hpc.storage import folder
from mlpo_hpc.tokens import open as tokens_open
from tests.ranks import ROOT


@pytest.mark.parametrize(
    ("environ", "name", "expected"),
    [
        ({}, "single", ("0", "1", "0", "1")),
        (
            {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
            "torchrun",
            ("3", "8", "1", "4"),
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "5",
                "OMPI_COMM_WORLD_SIZE": "6",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            "Open MPI",
            ("5", "6", "1", "2"),
        ),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            "MPICH",
            ("1", "2", "1", "2"),
        ),
        (
            {
                "SLURM_PROCID": "2",
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_LOCALID": "0",
                "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
            },
            "srun",
            ("2", "4", "0", "2"),
        ),
        (
            # srun --mpi=pmi2
            {
                "PMI_RANK": "3",
                "PMI_SIZE": "4",
                "SLURM_PROCID": "3",
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_LOCALID": "1",
                "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
            },
            "srun",
            ("3", "4", "1", "2"),
        ),
    ],
)
def test_ranks_are_told_by_each_launcher(environ, name, expected):
    found = launch.find_launcher(environ)
    assert (found.name if found else "single") == name
    ranks = launch.ranks(environ, found)
    assert tuple(ranks[key] for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE")) == expected


def test_alone_everything_is_set_and_what_is_set_already_stays(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "")  # so that monkeypatch removes what prepare() sets
        monkeypatch.delenv(name)
    monkeypatch.setenv("MASTER_PORT", "12345")
    assert launch.prepare() == "single"
    assert os.environ["MASTER_ADDR"] == "127.0.0.1"
    assert os.environ["MASTER_PORT"] == "12345"


def test_srun_ranks_meet_at_the_step_s_first_node_and_a_port_of_the_job(monkeypatch):
    step = {"SLURM_STEP_NODELIST": "n[07-09]", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "3")
    monkeypatch.setenv("SLURM_LOCALID", "0")
    srun = launch.LAUNCHERS[-1]
    address, port = launch._meeting_point(srun, 3)
    assert address == "n07"
    assert port in network.PORTS
    assert launch._meeting_point(srun, 3) == (address, port), "the same on every rank"
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    assert launch._meeting_point(srun, 3)[1] != port
    monkeypatch.setenv("MLPO_HPC_INTERFACE", "lo")
    with pytest.raises(ConfigError, match="needs an MPI"):
        launch._meeting_point(srun, 3)


def test_a_port_in_use_is_passed_over_or_refused(monkeypatch):
    wanted = network.port_of_job("77.0")
    with socket.socket() as busy:
        busy.bind(("", wanted))
        busy.listen()
        assert not network.is_free(wanted)
        assert network.first_free_port("77.0") != wanted
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("MASTER_PORT", str(wanted))
        with pytest.raises(ConfigError, match=f"MASTER_PORT {wanted} is in use"):
            launch.prepare()
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        launch._refuse_busy_port(os.environ)
        monkeypatch.setenv("RANK", "1")
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
        launch._refuse_busy_port(os.environ)
    assert network.first_free_port("77.0") == wanted


def test_an_interface_is_where_ranks_meet():
    assert network.address_of("lo") in ("127.0.0.1", "::1")
    with pytest.raises(ConfigError, match=r"'hsn7'; it has .*lo"):
        network.address_of("hsn7")
    environ = {"MLPO_HPC_INTERFACE": "hsn0", "NCCL_SOCKET_IFNAME": "hsn1"}
    network.use_interface(environ)
    assert environ["GLOO_SOCKET_IFNAME"] == "hsn0"
    assert environ["NCCL_SOCKET_IFNAME"] == "hsn1", "what is set already stays"


OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
SRUN = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        (OPEN_MPI, "Open MPI"),
        ({**OPEN_MPI, "RANK": "0", "WORLD_SIZE": "4"}, "Open MPI"),  # a wrapper that sets them for each task
        (SRUN, "srun"),
        ({**SRUN, "RANK": "0", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x"}, None),  # torchrun under srun
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, None),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, None),  # one task that started four ranks itself
        ({}, None),
    ],
)
def test_which_launcher_made_the_training_world_one_of_mpi(environ, name):
    found = launch.mpi_launcher(environ, 4)
    assert (found.name if found else None) == name


@pytest.mark.parametrize(
    ("environ", "library", "words"),
    [
        (SRUN, "Open MPI v5.0.11", ["srun started 4", "world of 1", "srun --mpi=pmix"]),
        (SRUN, "MPICH Version: 5.0.2", ["srun --mpi=pmi2", "--mpi=list", "flock"]),
        (OPEN_MPI, "MPICH Version: 5.0.2", ["Open MPI started 4", "mpirun of the MPI library"]),
    ],
)
def test_n_worlds_of_one_are_told_from_one_of_n(environ, library, words, monkeypatch):
    for key, value in environ.items():
        monkeypatch.setenv(key, value)
    text = node._mismatch(1, 4, library)
    for word in words:
        assert word in text
    assert "cray" not in text


def test_srun_without_pmi_is_said_before_open_mpi_starts(monkeypatch):
    for key, value in SRUN.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(MpiMismatch, match=r"without a way for MPI.*--mpi=pmix .*flock"):
        node._look_for_pmi(4, "Open MPI v5.0.11")
    node._look_for_pmi(4, "Intel(R) MPI Library 2021.9")  # may find srun in ways of its own
    monkeypatch.setenv("PMIX_RANK", "0")
    node._look_for_pmi(4, "Open MPI v5.0.11")


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({**SRUN, "SLURM_LOCALID": "3", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, ("3", "4")),
        ({"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, ("2", "8")),
        ({}, ("0", "8")),
    ],
)
def test_rank_set_by_hand_leaves_the_rest_to_the_launcher_behind(extra, expected):
    environ = {"RANK": "5", "WORLD_SIZE": "8", **extra}
    found = launch.ranks(environ, launch.find_launcher(environ))
    assert (found["RANK"], found["WORLD_SIZE"]) == ("5", "8")
    assert (found["LOCAL_RANK"], found["LOCAL_SIZE"]) == expected


def test_rank_set_by_hand_needs_a_meeting_point(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="set MASTER_ADDR and MASTER_PORT too"):
        launch._meeting_point(launch.LAUNCHERS[0], 2)


def test_of_a_world_that_others_started_nothing_is_guessed(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # so that monkeypatch removes what prepare() sets
        monkeypatch.delenv(name)
    assert launch.prepare((3, 4)) == "single"
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("3", "4")
    assert "LOCAL_RANK" not in os.environ
    assert "MASTER_PORT" not in os.environ


def test_ranks_that_do_not_meet_by_mpi_meet_by_their_job(monkeypatch, caplog):
    for name, value in {**SRUN, "PMI_RANK": "0", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_ID": "5"}.items():
        monkeypatch.setenv(name, value)

    def mismatch(size):
        raise MpiMismatch("a world of 1")

    monkeypatch.setattr(node, "start_mpi", mismatch)
    assert launch._meeting_point(launch.LAUNCHERS[-1], 4)[0] == "n1"
    assert "do not meet by MPI: a world of 1" in caplog.text


def test_the_address_is_one_that_the_others_can_reach(monkeypatch):
    assert launch.address_for([("n1", "a"), ("n1", "a")]) == "127.0.0.1"
    assert launch.address_for([("n1", "a"), ("n2", "b")]) == "n1"
    twins = [("localhost", "a"), ("localhost", "b")]
    with pytest.raises(ConfigError, match="several machines call themselves localhost"):
        launch.address_for(twins)
    monkeypatch.setenv("MLPO_HPC_INTERFACE", "lo")
    assert launch.address_for(twins) == network.address_of("lo")


@pytest.mark.parametrize(
    ("spec", "counts"), [("4", ["4"]), ("3,1", ["3", "1"]), ("4(x2),3", ["4", "4", "3"]), ("2(x3)", ["2", "2", "2"])]
)
def test_tasks_of_each_node_are_read_as_slurm_writes_them(spec, counts):
    assert [launch._tasks_of_node(spec, node) for node in range(len(counts))] == counts


def test_containers_of_one_machine_are_found_out(caplog):
    node._warn_of_containers([("n1", "a"), ("n1", "a"), ("n2", "b")])
    assert caplog.text == ""
    node._warn_of_containers([("n1", "a"), ("n2", "a")])
    assert "hosts n1, n2 are containers on one machine" in caplog.text


def test_ranks_that_do_not_see_each_other_s_files_take_no_turns(monkeypatch, tmp_path):
    """Containers of one host name: a rank of the node does not find the first one's folder."""
    mine = node.Node("n1", 0, 2, 0, 2, "a")
    made = []

    def gather(value):
        if isinstance(value, tuple):  # who is on which node, and what it made
            is_folder = isinstance(value[1], str)
            made.extend([value[1]] * is_folder)
            return [value, (mine.key, None if is_folder else value[1])]
        return [value, False if value is True else value]

    monkeypatch.setattr(node, "gather", gather)
    monkeypatch.setattr(folder, "gather", gather)
    monkeypatch.setattr(tokens_open, "gather", gather)
    assert tokens_open.pick_backend(mine) == ("off", tokens_open.CONTAINERS)
    assert not os.path.exists(made[0]), "nothing is left"
    with ExitStack() as endings, pytest.raises(ConfigError, match=r"'flock' cannot work.*Use 'off'"):
        tokens_open.open_tokens("flock", [tokens_open.Resource("k", "nvme", 1)], mine, 60, endings)


def test_nothing_is_asked_of_other_programs(tmp_path):
    """No ``hostname``, no ``scontrol``: an empty PATH will do."""
    code = "import mlpo_hpc, os; mlpo_hpc.init_distributed(); print(os.environ['MASTER_ADDR'])"
    environ = {"PATH": str(tmp_path), "DS_ACCELERATOR": "cpu", "HOME": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "127.0.0.1"


def tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_limit_of_any_control_group_above_us_counts_v2(tmp_path):
    tree(
        tmp_path,
        {
            "self": "0::/job/step\n",
            "fs/job/memory.max": "1000\n",
            "fs/job/memory.current": "700\n",
            "fs/job/memory.stat": "inactive_file 100\nanon 5\n",
            "fs/job/step/memory.max": "max\n",
            "fs/job/step/memory.current": "600\n",
        },
    )
    assert list(_cgroup_headrooms(tmp_path / "self", tmp_path / "fs")) == [400]


def test_a_limit_counts_v1(tmp_path):
    tree(
        tmp_path,
        {
            "self": "7:cpu,cpuacct:/x\n4:memory:/slurm/job_5\n0::/\n",
            "fs/memory/slurm/job_5/memory.limit_in_bytes": "5000\n",
            "fs/memory/slurm/job_5/memory.usage_in_bytes": "2000\n",
            "fs/memory/slurm/job_5/memory.stat": "total_inactive_file 500\n",
        },
    )
    assert list(_cgroup_headrooms(tmp_path / "self", tmp_path / "fs")) == [3500]


def test_no_control_group_is_ordinary(tmp_path):
    assert list(_cgroup_headrooms(tmp_path / "missing", tmp_path)) == []
    assert memory.available_bytes() > 0


@pytest.mark.parametrize(
    ("mine", "everyone", "cores"),
    [
        ({0, 1, 2, 3}, [{0, 1, 2, 3}], 4),
        ({0, 1, 2, 3}, [{0, 1, 2, 3}] * 4, 1),
        ({0, 1}, [{0, 1}, {2, 3}], 2),
        ({0}, [{0}] * 8, 1),
        (range(64), [range(64)] * 4, 16),
        ({0, 1, 2, 3}, [{0, 1, 2, 3}, {0, 1}], 3),
    ],
)
def test_the_cores_of_a_rank_are_those_that_others_do_not_take(mine, everyone, cores):
    assert fair_cores(mine, everyone) == cores


def test_a_bad_number_of_threads_is_told_with_a_good_one():
    assert thread_advice(8, 8) == thread_advice(4, 8) == thread_advice(1, 2) == thread_advice(1, 1) == ""
    assert "OMP_NUM_THREADS=16" in thread_advice(1, 16)
    assert "in each other's way" in thread_advice(64, 16)
