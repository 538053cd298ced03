"""The doctor as a whole: processes that hang, ranks that tell the first one, many nodes as few lines, the command."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from mlpo_hpc.cli import main
from mlpo_hpc.cluster.network import first_free_port
from mlpo_hpc.config import OffloadConfig, Tier
from mlpo_hpc.doctor import joint
from mlpo_hpc.doctor.child import Child
from mlpo_hpc.doctor.examine import Examination, Wish
from mlpo_hpc.doctor.finding import CHECKS, VERDICTS, Finding, merge, split_advice
from mlpo_hpc.doctor.meeting import Answer, Greeting, find_point, reception, report
from mlpo_hpc.doctor.plan import Plan
from mlpo_hpc.doctor.start import Start, find_start
from mlpo_hpc.doctor.storage import Room
from mlpo_hpc.errors import MlpoError, here
from tests import testbed
from tests.ranks import ROOT, run_ranks


def finding(check="memlock", verdict="ok", seen="unlimited", advice="", subject=""):
    return Finding(check=check, verdict=verdict, seen=seen, advice=advice, subject=subject)


def test_a_bad_finding_says_what_to_do():
    with pytest.raises(ValidationError, match="does not say what to do"):
        finding(verdict="fail")
    with pytest.raises(ValidationError):
        finding(check="no such check")


def test_equal_findings_of_many_nodes_are_one_and_others_are_named():
    hosts = [f"n{number:02}" for number in range(64)]
    found = [(host, finding()) for host in hosts[:-1]]
    found += [(host, finding("gpu", "warn", "none", "ask for some")) for host in hosts]
    found += [(hosts[-1], finding("memlock", "warn", "64 KiB", "raise it")), ("", finding("launcher"))]
    lines = merge([*found, found[0]])
    assert [(line.check, line.verdict, len(line.hosts)) for line in lines] == [
        ("gpu", "warn", 64), ("memlock", "warn", 1), ("launcher", "ok", 0), ("memlock", "ok", 63),
    ]  # fmt: skip
    assert joint.fold(lines[3].hosts) == "n[00-62]"
    assert lines[1].seen == {"64 KiB": ["n63"]}


def test_what_nodes_see_differently_is_told_apart_below_one_advice():
    found = [(f"n{i}", finding("space", "fail", f"{9 if i else 8} GB", "free some")) for i in range(3)]
    (line,) = merge(found)
    assert list(line.seen.items()) == [("9 GB", ["n1", "n2"]), ("8 GB", ["n0"])]


def test_an_error_is_what_was_seen_and_what_to_do():
    text = f"looking failed on {here('/x')}. What to do: make it.\n  Then try."
    assert split_advice(text) == ("looking failed on /x", "make it. Then try.")
    assert split_advice(f"{here()} has none") == ("this node has none", "")


@pytest.fixture
def child():
    children = []

    def start(*arguments):
        children.append(Child(*arguments))
        return children[-1]

    yield start
    for started in children:
        started.end()


def test_a_process_that_hangs_is_given_up_and_ended(child):
    hanging = child("h5py")
    os.kill(hanging._process.pid, signal.SIGSTOP)
    assert hanging.answer(time.monotonic() + 0.2) == (None, "gave no answer in time")
    assert hanging._process.poll() is None, "its end could end the job before the report is out"


def test_a_process_that_dies_is_told_with_what_it_printed(child):
    killed, faulty = child("h5py"), child("no such look")
    os.kill(killed._process.pid, signal.SIGKILL)
    assert killed.answer(time.monotonic() + 30) == (None, "ended without an answer (signal SIGKILL)")
    answer, trouble = faulty.answer(time.monotonic() + 30)
    assert answer is None
    assert trouble.startswith("ended without an answer (exit code 1): ...")
    assert "KeyError: 'no such look'" in trouble


def answer(rank, host="n1", job="7.0", **rest):
    told = {"machine": "m", "cores": [0, 1], "threads": None, "local_size": 1, "findings": [], **rest}
    return Answer(job=job, rank=rank, host=host, **told)


def test_ranks_tell_the_first_one_and_are_let_go_together():
    port = first_free_port()
    asked, gone = [], threading.Semaphore(0)

    def tell(greeting, rank):
        asked.append(greeting.marks)
        return answer(rank)

    def visit(rank):
        report(("127.0.0.1", port), "7.0", lambda greeting: tell(greeting, rank), time.monotonic() + 30)
        gone.release()

    others = [threading.Thread(target=visit, args=(rank,)) for rank in (1, 2, 3)]
    for other in others:
        other.start()  # before the first rank hears
    with reception(port, Greeting(job="7.0", marks={"pfs": "here"})) as server:
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
            found = server.collect(3, time.monotonic() + 30)
        assert sorted(theirs.rank for theirs in found) == [1, 2, 3]
        assert not gone.acquire(blocking=False), "they wait until the report is out"
    for other in others:
        other.join(30)
        assert not other.is_alive()
    assert asked == [{"pfs": "here"}] * 3


def test_a_rank_that_does_not_come_is_not_waited_for_for_ever():
    with reception(first_free_port(), Greeting(job="7.0")) as server:
        assert server.collect(1, time.monotonic() + 0.2) == []


def test_another_job_s_doctor_is_no_first_rank_and_nobody_is_neither():
    port = first_free_port()
    with reception(port, Greeting(job="8.0")) as server:
        with pytest.raises(MlpoError, match=r"another job's doctor answers there \(8\.0\)"):
            report(("127.0.0.1", port), "7.0", lambda greeting: answer(1), time.monotonic() + 0.3)
        assert server.collect(1, time.monotonic() + 0.1) == []
    with pytest.raises(MlpoError, match=f"not reached at 127.0.0.1, port {port}: .*refused"):
        report(("127.0.0.1", port), "7.0", lambda greeting: answer(1), time.monotonic() + 0.3)


def test_all_tasks_of_a_step_tell_the_same_point():
    step = {"SLURM_STEP_NODELIST": "n[07-09]", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    address, port = find_point(Start("srun", size=3), step)
    assert address == "n07"
    assert port != find_point(Start("srun", size=3), {**step, "SLURM_STEP_ID": "1"})[1]
    assert find_point(Start("Open MPI", size=3), {}) is None
    assert find_point(Start("torchrun", size=3), {"MASTER_ADDR": "n1", "MASTER_PORT": "1"})[0] == "n1"


@pytest.mark.parametrize(
    ("hosts", "silent"),
    [(["n1", "n1", "n2", "n3"], ["n2", "n3"]), (["n1", "n2", "n3"], ["n2", "n3"]), ([], [""])],
)
def test_nodes_that_do_not_answer_are_named(hosts, silent):
    start = Start("srun", size=4)
    found = list(joint.judge_nodes([answer(0), answer(1)], start, hosts, ("late", "look there")))
    assert [host for host, _ in found] == silent
    assert {line.seen for _, line in found} == {"rank 2-3: late"}
    all_there = list(joint.judge_nodes([answer(rank) for rank in range(4)], start, hosts, ("", "")))
    assert [(host, line.verdict) for host, line in all_there] == [("", "ok")]


@pytest.mark.parametrize(
    ("cores", "threads", "verdict", "words"),
    [
        ([[0, 1, 2, 3], [4, 5, 6, 7]], None, "ok", "4 of 8 cores a rank"),
        ([[0], [0]], None, "warn", "1 of 1 cores a rank"),
        ([[0, 1, 2, 3], [4, 5, 6, 7]], 1, "warn", "torch uses 1 threads"),
        ([list(range(8))] * 2, None, "warn", "torch uses 8 threads"),  # as many as it may run on
        ([list(range(8))] * 2, 4, "ok", "4 of 8 cores a rank"),
    ],
)
def test_cores_are_shared_fairly(cores, threads, verdict, words):
    ranks = [answer(i, cores=mine, threads=threads, local_size=2) for i, mine in enumerate(cores)]
    found = joint.judge_cores(ranks, Start("srun", size=2, local_size=2))
    assert (found.verdict, words in found.seen) == (verdict, True), found
    assert joint.judge_cores(ranks[:1], Start("srun", size=2, local_size=2)).verdict == "skipped"


def test_nodes_must_have_the_same_versions():
    assert list(joint.judge_versions([answer(0, versions="a"), answer(1, "n2", versions="a")])) == []
    found = list(joint.judge_versions([answer(0, versions="a"), answer(1, "n2", versions="b")]))
    assert [(host, line.verdict, line.seen) for host, line in found] == [("n1", "fail", "a"), ("n2", "fail", "b")]


@pytest.mark.parametrize(
    ("kind", "seen", "expected"),
    [
        ("shared", [True, True], [("", "ok")]),
        ("shared", [True, False], [("n1", "ok"), ("n2", "fail")]),
        ("node_local", [True, True], [("", "warn")]),
        (None, [False, False], [("", "ok")]),
    ],
)
def test_what_nodes_share_is_found_out(kind, seen, expected):
    tier = Tier(name="pfs", dir="/x", kind=kind)
    others = [answer(i + 1, f"n{i + 1}", marks={"pfs": sees}) for i, sees in enumerate(seen)]
    found = list(joint.judge_sharing([answer(0, "n0"), *others], [tier]))
    assert [(host, line.verdict) for host, line in found] == expected


def test_state_is_divided_by_the_ranks_of_a_node():
    room = Room(path="/x", filesystem="ext4", device="a", free_bytes=10**10, capacity_bytes=None, shared=False)
    plan = Plan(OffloadConfig(tiers=[]), (Tier(name="nvme", dir="/x"),), 12, ())
    nodes = [
        [answer(i, rooms={"nvme": room}, budget_bytes=1) for i in range(3)],
        [answer(3, "n2", rooms={"nvme": room})],
    ]
    found = list(joint.judge_rooms(nodes, plan, 12 * 10**9, num_nodes=2, size=4))
    assert [(host, line.seen.partition(" of")[0], line.verdict) for host, line in found] == [
        ("n1", "9 GB", "warn"), ("n2", "3 GB", "ok"),
    ]  # fmt: skip
    (_, spread), _ = joint.judge_rooms(nodes, plan, 12 * 10**9, num_nodes=12, size=4)
    assert spread.seen.startswith("1 GB of state a node")
    unseen = [[answer(0)]]
    assert next(joint.judge_rooms(unseen, plan, 1, 1, 1))[1].verdict == "skipped"
    unknown = Plan(OffloadConfig(), (), 12, ())
    assert "no tiers are configured" in next(joint.judge_rooms(unseen, unknown, 1, 1, 1))[1].seen


def config(tmp_path, *dirs):
    path = tmp_path / "ds_config.json"
    tiers = [{"name": f"tier{number}", "dir": str(where)} for number, where in enumerate(dirs)]
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}, "mlp_offload": {"tiers": tiers}}))
    return str(path)


def run(*arguments, **environ):
    command = [sys.executable, "-m", "mlpo_hpc", "doctor", *arguments]
    env = {**os.environ, "PATH": "/nowhere", **environ}  # no scheduler, so no login node
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout


def verdicts(found):
    return {f"{line['check']} {line['subject']}".strip(): line["verdict"] for line in found["findings"]}


def test_a_host_alone_is_looked_at_without_starting_mpi(tmp_path):
    (tmp_path / "a").mkdir()
    code, text = run("--config", config(tmp_path, tmp_path / "a"), "--parameters", "1e6", "--json")
    found = json.loads(text)
    assert (code, found["fit"], found["num_ranks"]) == (0, True, 1)
    got = verdicts(found)
    good = ["configuration", "h5py", "tier tier0", "direct I/O tier0", "space", "memory", "cores"]
    assert {name: got[name] for name in good} == dict.fromkeys(good, "ok")
    assert got["mpi"] == got["launcher"] == "skipped"
    order = [VERDICTS.index(line["verdict"]) for line in found["findings"]]
    assert order == sorted(order), "worst first"
    assert list((tmp_path / "a").iterdir()) == []


def test_what_will_fail_gives_1_and_says_what_to_do(tmp_path):
    code, text = run("--config", config(tmp_path, tmp_path / "missing"))
    assert code == 1
    first, second = text.splitlines()[:2]
    assert first.split()[:3] == ["fail", "tier", "tier0"]
    assert f"{tmp_path}/missing"[:20] in text
    assert "->" in second or "->" in text.splitlines()[2]
    assert f"{socket.gethostname()}: not fit; 1 will fail" in text


def test_on_a_login_node_storage_of_the_nodes_is_not_missed(tmp_path):
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    code, text = run("--config", config(tmp_path, "${SLURM_TMPDIR}"), "--json", PATH=str(tmp_path))
    found = json.loads(text)
    assert (code, verdicts(found)["tier tier0"]) == (0, "skipped")
    assert "look in a job ('srun mlpo doctor')" in text


def test_wrong_usage_is_2():
    for arguments in (["--parameters", "many"], ["--nodes", "0"], ["--nonsense"], ["--timeout", "0"]):
        assert CliRunner().invoke(main, ["doctor", *arguments]).exit_code == 2, arguments
    assert CliRunner().invoke(main, ["doctor", "--help"]).exit_code == 0


@pytest.mark.parametrize(("text", "expected"), [("7b", 7e9), ("1.5B", 1.5e9), ("70e9", 70e9), ("350m", 350e6)])
def test_parameters_are_written_as_people_do(text, expected, monkeypatch):
    seen = []
    monkeypatch.setattr(Examination, "__init__", lambda self, wish, endings: seen.append(wish))
    monkeypatch.setattr(Examination, "run", lambda self: None)
    assert CliRunner().invoke(main, ["doctor", "--parameters", text]).exit_code == 0
    assert seen == [Wish(parameters=expected)]


def test_two_ranks_give_one_report(tmp_path):
    (tmp_path / "a").mkdir()
    path = config(tmp_path, tmp_path / "a")
    outcomes = run_ranks(2, ["-m", "mlpo_hpc", "doctor", "--json", "--config", path], timeout_s=120)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert outcomes[1].text == ""
    found = json.loads(outcomes[0].text)
    assert (found["num_ranks"], verdicts(found)["nodes"]) == (2, "ok")
    assert found["hosts"] == [socket.gethostname()]
    assert list((tmp_path / "a").iterdir()) == []


def test_a_rank_that_is_missing_is_a_finding_in_bounded_time(tmp_path):
    """Two ranks by the variables, of which one was never started."""
    port = str(first_free_port())
    alone = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    code, text = run("--json", "--timeout", "1", **alone)
    found = json.loads(text)
    assert (code, verdicts(found)["nodes"], verdicts(found)["cores"]) == (1, "fail", "skipped")
    assert "rank 1: no answer within 6 s" in text
    assert find_start(alone).size == 2


def test_a_rank_that_cannot_tell_the_first_one_says_so_and_leaves_the_exit_code_to_it():
    port = str(first_free_port())
    other = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-m", "mlpo_hpc", "doctor", "--timeout", "1"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **other}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
    assert "the first rank was not reached at 127.0.0.1" in done.stderr


def test_a_file_system_that_hangs_is_a_finding(tmp_path):
    """A frozen one: who writes there waits in the kernel, where no signal reaches."""
    if reason := testbed.missing():
        pytest.skip(reason)
    with testbed.capped_disk(tmp_path, "disk", 64 * 2**20) as disk, ExitStack() as thawing:
        subprocess.run(["fsfreeze", "-f", disk.path], check=True)
        thawing.callback(subprocess.run, ["fsfreeze", "-u", disk.path], check=True)
        code, text = run("--config", config(tmp_path, disk.path), "--timeout", "2", "--json")
        found = json.loads(text)
    assert (code, verdicts(found)["tier tier0"], verdicts(found)["configuration"]) == (1, "fail", "ok")
    assert "its directory gave no answer in time" in text


def test_a_doctor_that_is_ended_leaves_nothing(tmp_path):
    """While it waits for a rank of another node, which would look for a folder in the tier."""
    (tmp_path / "a").mkdir()
    port = str(first_free_port())
    first = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-m", "mlpo_hpc", "doctor", "--config", config(tmp_path, tmp_path / "a")]
    doctor = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **first, **where})
    deadline = time.monotonic() + 60
    while not list((tmp_path / "a").iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list((tmp_path / "a").iterdir()), "the folder is there"
    doctor.terminate()
    assert doctor.wait(30) == 1
    assert list((tmp_path / "a").iterdir()) == []


def test_every_check_is_in_the_docs():
    text = (ROOT / "docs/doctor.md").read_text()
    for check in CHECKS:
        assert f"| `{check}` |" in text, check
