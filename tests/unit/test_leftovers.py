"""What killed processes leave: what is ours, who is dead, what goes and what stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from mlpo_hpc.cli import main
from mlpo_hpc.cluster.job import Job, Slurm, this_job
from mlpo_hpc.cluster.node import Node
from mlpo_hpc.config import load
from mlpo_hpc.errors import StorageError, TierFull
from mlpo_hpc.state.tiers import remove_leftovers
from mlpo_hpc.storage import folder, leftovers, owner
from mlpo_hpc.storage.folder import MARK, mark_text, private_folder
from mlpo_hpc.storage.leftovers import Rule, clean
from mlpo_hpc.storage.owner import Owner, new_name, read_name
from mlpo_hpc.storage.place import find_places

ROOT = Path(__file__).parent.parent.parent
ALONE = Node("here", 0, 1, 0, 1)


@pytest.fixture(scope="module")
def gone():
    """A process that is no more."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    return replace(Owner.this(), pid=dead.pid, start_ticks=5)


@pytest.fixture
def tier(tmp_path):
    made = tmp_path / "tier"
    made.mkdir()
    return made


def leave(where: Path, by: Owner, marked: bool = True, content: bytes = b"state") -> Path:
    """A folder as a killed process leaves it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Owner, "this", classmethod(lambda cls: by))
        path = where / new_name()
    path.mkdir(0o700)
    if marked:
        (path / MARK).write_bytes(mark_text(path.name))
    (path / "state.h5").write_bytes(content)
    return path


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2, follow_symlinks=False)


def outcomes(where: Path, rule: Rule | None = None) -> dict[str, str]:
    return {found.path: found.outcome for found in clean(str(where), rule or Rule())}


def run(*arguments):
    done = CliRunner().invoke(main, ["clean", *map(str, arguments)])
    return done.exit_code, done.output


# ---- names ----------------------------------------------------------------------------------

words = st.text("abcXYZ019_", min_size=1, max_size=12)
jobs = st.builds(Job, st.sampled_from(["slurm", "pbs", "lsb", "flux"]), words | st.just(""), words, st.integers(0, 99))
hosts = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,30}[a-z0-9])?", fullmatch=True)
machines = st.from_regex(r"[0-9a-f]{8}|unknown", fullmatch=True)


@given(st.builds(Owner, hosts, machines, st.none() | jobs, st.integers(1, 2**22), st.integers(0, 2**63)))
def test_a_name_tells_who_gave_it(by):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Owner, "this", classmethod(lambda cls: by))
        assert read_name(new_name()) == by
        assert new_name() != new_name()


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, None),
        (
            {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "2", "SLURM_CLUSTER_NAME": "big-one"},
            Job("slurm", "big_one", "17", 2),
        ),
        ({"SLURM_JOB_ID": "17"}, Job("slurm", "", "17", 0)),
        ({"PBS_JOBID": "4[2].pbs-1.site.org"}, Job("pbs", "", "4_2__pbs_1_site_org", 0)),
        ({"LSB_JOBID": "5"}, Job("lsb", "", "5", 0)),
        ({"FLUX_JOB_ID": "ƒ2ZK"}, Job("flux", "", "_2ZK", 0)),
    ],
)
def test_the_job_is_what_its_scheduler_set_and_fits_into_a_name(environ, found, monkeypatch):
    assert this_job(environ) == found
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(owner.socket, "gethostname", lambda: "a host/with\nodd-letters")
    assert read_name(new_name()).job == found
    assert read_name(new_name()).host == "a_host_with_odd-letters"


HOSTILE = [
    ".mlpo_hpc-",
    ".mlpo_hpc-n1-12345678-none-1-5",
    ".mlpo_hpc-n1-12345678-none-1-5-0\n",
    ".mlpo_hpc-n1-12345678-none-1-5-0.h5",
    ".mlpo_hpc-n1-12345678-none-٣-5-0",  # a digit, but none of ours
    ".mlpo_hpc-n1-12345678-none-" + "9" * 30 + "-5-0",
    ".mlpo_hpc-n1-12345678-slurm.c.1-1-5-0",
    ".mlpo_hpc-n1-12345678-slurm.c.1.0.0-1-5-0",
    ".mlpo_hpc-$(reboot)-12345678-none-1-5-0",
    ".mlpo_hpc-\x1b[2J-12345678-none-1-5-0",
    os.fsdecode(b".mlpo_hpc-\xff-12345678-none-1-5-0"),
]


def test_what_has_another_name_stays(tier, gone):
    others = [*HOSTILE, "mlpo_hpc", "checkpoint", "pfs-job1.0-n1-7.0.h5", "trace.0.json", "x" + leave(tier, gone).name]
    for name in others:
        (tier / name).mkdir()
        (tier / name / "state.h5").write_text("")
        age(tier / name, 1e6)
    found = outcomes(tier)
    assert sorted(found.values()) == ["not ours"] * len(HOSTILE) + ["removed"]
    assert sorted(os.listdir(tier)) == sorted(others)


def test_a_terminal_is_shown_names_and_does_not_obey_them(tier):
    for name in HOSTILE:
        (tier / name).mkdir()
    code, text = run(tier)
    assert code == 0
    assert "\\x1b[2J" in text
    assert "\\udcff" in text
    assert text.count("\n") == len(HOSTILE) + 1
    assert run(tier, "--json")[0] == 0


# ---- who is dead ----------------------------------------------------------------------------


def test_who_lives_or_cannot_be_asked_stays(tier, gone):
    me = Owner.this()
    expected = {
        leave(tier, gone): "removed",
        leave(tier, me): "in use",
        leave(tier, replace(gone, start_ticks=me.start_ticks, pid=1)): "removed",  # a number that was given again
        leave(tier, replace(gone, host="n2")): "unknown",
        leave(tier, replace(gone, machine="unknown")): "unknown",
        leave(tier, replace(gone, job=Job("pbs", "", "7", 0))): "removed",  # nobody can be asked but this host
        leave(tier, replace(gone, host="n2", job=Job("pbs", "", "7", 0))): "unknown",
    }
    assert outcomes(tier) == {str(path): outcome for path, outcome in expected.items()}
    assert {path: path.exists() for path in expected} == {path: out != "removed" for path, out in expected.items()}


@pytest.mark.parametrize(("kind", "outcome"), [("ext4", "removed"), ("lustre", "unknown"), ("virtiofs", "unknown")])
def test_a_host_that_was_started_again_knows_its_own_drives(tier, gone, monkeypatch, kind, outcome):
    monkeypatch.setattr(leftovers, "describe", lambda path: SimpleNamespace(type=kind))
    path = leave(tier, replace(gone, machine="00000000"))
    assert outcomes(tier) == {str(path): outcome}


def test_what_is_locked_stays_whatever_is_said(tier, gone):
    """Containers of one host do not see each other's processes."""
    path = leave(tier, gone)
    with open(path / MARK, "r+b") as mark:
        assert folder.lock_mark(mark.fileno()) is True
        assert outcomes(tier, Rule(unknown=True)) == {str(path): "in use"}
    assert outcomes(tier) == {str(path): "removed"}


def test_without_locks_an_hour_must_pass(tier, gone, monkeypatch):
    monkeypatch.setattr(leftovers, "lock_mark", lambda fd: None)
    path = leave(tier, gone)
    assert outcomes(tier) == {str(path): "unknown"}
    age(path, 3700)
    assert outcomes(tier) == {str(path): "removed"}


def test_without_locks_slurm_s_word_will_do(tier, gone, slurm, monkeypatch):
    monkeypatch.setattr(leftovers, "lock_mark", lambda fd: None)
    over, running = leave(tier, of_job(gone, 2)), leave(tier, of_job(gone, 1))
    assert outcomes(tier, Rule(Slurm(os.environ))) == {str(over): "removed", str(running): "in use"}


def test_a_folder_in_use_is_locked_and_gone_afterwards(tier):
    with private_folder(str(tier)) as mine:
        assert os.listdir(mine) == [MARK]
        (found,) = clean(str(tier), Rule(unknown=True))
        assert (found.path, found.outcome, found.reason) == (mine, "in use", "somebody has it locked")
        os.mkdir(os.path.join(mine, "inner"))
        os.symlink("/", os.path.join(mine, "inner", "link"))
    assert os.listdir(tier) == []


def test_a_folder_that_cannot_be_marked_is_not_left(tier, monkeypatch):
    def full(fd, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder.os, "write", full)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TierFull, match="making a folder"), private_folder(str(tier)):
        pass
    assert os.listdir(tier) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_that_is_there_already_is_left_alone(tier, monkeypatch):
    with private_folder(str(tier)) as mine:
        monkeypatch.setattr(folder, "new_name", lambda: os.path.basename(mine))
        with pytest.raises(StorageError, match="making a folder"), private_folder(str(tier)):
            pass
        assert os.listdir(mine) == [MARK]


@pytest.mark.parametrize("call", ["mkdir", "write"])
def test_a_signal_while_a_folder_is_made_leaves_none(tier, monkeypatch, call):
    real = getattr(os, call)

    def ended(*args):
        real(*args)
        raise KeyboardInterrupt  # as `undone_on_signals` makes of SIGTERM

    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patched:
        patched.setattr(folder.os, call, ended)
        with private_folder(str(tier)):
            raise AssertionError("it was ended before")
    assert os.listdir(tier) == []


def test_the_next_run_of_a_job_knows_that_the_one_before_is_over(tier, gone, monkeypatch):
    here = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2", "SLURM_CLUSTER_NAME": "bed"}
    for name, value in here.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", str(tier / "none"))
    elsewhere = replace(gone, host="n2")
    expected = {
        leave(tier, replace(elsewhere, job=Job("slurm", "bed", "7", 1))): "removed",
        leave(tier, replace(elsewhere, job=Job("slurm", "bed", "7", 2))): "unknown",  # another rank, just now
        leave(tier, replace(elsewhere, job=Job("slurm", "other", "7", 1))): "unknown",
        leave(tier, replace(gone, job=Job("slurm", "bed", "7", 2))): "removed",  # an earlier step
        leave(tier, replace(Owner.this(), job=Job("slurm", "bed", "7", 2))): "in use",
    }
    assert outcomes(tier, Rule(Slurm(os.environ))) == {str(path): outcome for path, outcome in expected.items()}


# ---- what Slurm says ------------------------------------------------------------------------

SQUEUE = """#!/bin/sh
echo "$@" >> {calls}
case "$*" in
  *--jobs=1) echo RUNNING;;
  *--jobs=2) echo COMPLETED;;
  *--jobs=3) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1;;
  *--jobs=4) printf 'COMPLETED\\nPENDING\\n';;
  *--jobs=5) echo COMPLETING;;
  *--jobs=6) ;;
  *--jobs=7) echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1;;
  *--jobs=8) exec sleep 600;;
  *) [ "$SQUEUE_USERS$SLURM_CLUSTERS" = "" ] && echo RUNNING;;
esac
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Slurm's commands, as they answer; the calls of squeue are in the file that is returned."""
    programs, calls = tmp_path / "bin", tmp_path / "calls"
    programs.mkdir()
    calls.touch()
    texts = {
        "squeue": SQUEUE.format(calls=calls),
        "scontrol": "#!/bin/sh\necho 'BootTime = x'\necho 'ClusterName             = bed-1'\n",
    }
    for name, text in texts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return calls


def of_job(who: Owner, number: int | str, cluster: str = "bed_1") -> Owner:
    return replace(who, job=Job("slurm", cluster, str(number), 0))


def test_slurm_is_asked_whether_a_job_is_over(tier, gone, slurm):
    elsewhere = replace(gone, host="n2")
    expected = {
        leave(tier, of_job(elsewhere, 1)): "in use",
        leave(tier, of_job(gone, 1)): "in use",  # although this process of it is gone
        leave(tier, of_job(elsewhere, 2)): "removed",
        leave(tier, of_job(elsewhere, 3)): "removed",
        leave(tier, of_job(elsewhere, 4)): "in use",  # of an array, some are over
        leave(tier, of_job(elsewhere, 5)): "in use",
        leave(tier, of_job(elsewhere, 6)): "removed",
        leave(tier, of_job(elsewhere, 3, "other")): "unknown",  # a number of another cluster
        leave(tier, of_job(elsewhere, 3, "")): "unknown",
        leave(tier, of_job(elsewhere, "x3")): "unknown",
    }
    found = {found.path: found for found in clean(str(tier), Rule(Slurm(os.environ)))}
    assert {path: one.outcome for path, one in found.items()} == {str(path): out for path, out in expected.items()}
    assert sum("--jobs=1" in line for line in slurm.read_text().splitlines()) == 1, "each job once"
    reasons = " ".join(one.reason for one in found.values())
    for part in ("job 1 is RUNNING", "job 2 is over", "knows no job 3", "is PENDING", "not of this cluster (bed_1)"):
        assert part in reasons


def test_settings_that_would_hide_jobs_do_not_reach_squeue(tier, gone, slurm, monkeypatch):
    monkeypatch.setenv("SQUEUE_USERS", "nobody")
    monkeypatch.setenv("SLURM_CLUSTERS", "other")
    path = leave(tier, of_job(replace(gone, host="n2"), 99))
    assert outcomes(tier, Rule(Slurm(os.environ))) == {str(path): "in use"}


@pytest.mark.parametrize("number", [7, 8])
def test_a_slurm_that_does_not_answer_tells_nothing_and_is_asked_once(tier, gone, slurm, number):
    elsewhere = replace(gone, host="n2")
    there, later = leave(tier, of_job(elsewhere, number)), leave(tier, of_job(elsewhere, 9))
    here = leave(tier, of_job(gone, number))
    found = {one.path: one for one in clean(str(tier), Rule(Slurm(os.environ, timeout_s=0.5)))}
    assert found[str(here)].outcome == "removed", "this host knows its processes"
    for path in (there, later):
        assert found[str(path)].outcome == "unknown"
        assert "Slurm cannot be asked" in found[str(path)].reason
    assert len(slurm.read_text().splitlines()) == 1


def test_without_slurm_a_host_knows_its_own_processes(tier, gone, monkeypatch):
    monkeypatch.setenv("PATH", str(tier / "none"))
    here, there = leave(tier, of_job(gone, 3)), leave(tier, of_job(replace(gone, host="n2"), 3))
    found = {one.path: one for one in clean(str(tier), Rule(Slurm(os.environ)))}
    assert found[str(here)].outcome == "removed"
    assert found[str(there)].outcome == "unknown"
    assert "no 'scontrol' on PATH" in found[str(there)].reason


# ---- what is ours ---------------------------------------------------------------------------


def test_links_are_not_followed(tier, tmp_path, gone):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    with_links = leave(tier, gone)
    (with_links / "inner").mkdir()
    for where in (with_links, with_links / "inner"):
        (where / "to a folder").symlink_to(precious)
        (where / "to a file").symlink_to(precious / "file")
    linked = leave(tier, gone)
    target = linked.rename(tmp_path / linked.name)
    linked.symlink_to(target)
    marked_by_link = leave(tier, gone, marked=False)
    (marked_by_link / MARK).symlink_to(precious / "file")
    assert outcomes(tier, Rule(unknown=True)) == {
        str(with_links): "removed",
        str(linked): "not ours",
        str(marked_by_link): "not ours",
    }
    assert (precious / "file").read_text() == "kept"
    assert (target / "state.h5").exists()


def test_only_what_has_our_mark_goes(tier, gone):
    unmarked = leave(tier, gone, marked=False)
    copied = leave(tier, gone)
    (copied / MARK).write_bytes(mark_text("another name"))
    pipe = leave(tier, gone, marked=False)
    os.mkfifo(pipe / MARK)
    torn = leave(tier, gone)
    (torn / MARK).write_bytes(b"")
    expected = dict.fromkeys([unmarked, copied, pipe, torn], "not ours")
    for path in expected:
        age(path, 1e6)
    assert outcomes(tier, Rule(unknown=True)) == {str(path): outcome for path, outcome in expected.items()}
    assert all((path / "state.h5").exists() for path in expected)


def test_who_was_killed_before_the_mark_left_nothing_in_it(tier, gone):
    empty, unwritten, file, full = (leave(tier, gone, marked=False) for _ in range(4))
    (empty / "state.h5").unlink()
    (unwritten / "state.h5").unlink()
    (unwritten / MARK).touch()
    for path, content in ((file, ""), (full, "x")):
        (path / "state.h5").unlink()
        path.rmdir()
        path.write_text(content)
    expected = {empty: "removed", unwritten: "removed", file: "removed", full: "not ours"}
    assert sorted(outcomes(tier).values()) == ["not ours", "unknown", "unknown", "unknown"]
    for path in expected:
        age(path, 3700)
    assert outcomes(tier) == {str(path): outcome for path, outcome in expected.items()}
    assert os.listdir(tier) == [full.name]


def test_what_belongs_to_others_stays(tier, gone, monkeypatch):
    theirs = leave(tier, gone)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    (found,) = clean(str(tier), Rule(unknown=True))
    assert (found.outcome, found.reason) == ("not ours", f"belongs to user {os.getuid()}")
    assert (theirs / "state.h5").exists()


@pytest.mark.parametrize(
    ("difference", "reason"), [({"st_uid": -1}, "belongs to user"), ({"st_dev": -1}, "is mounted")]
)
def test_what_holds_something_of_others_or_a_mounted_disk_stays(tier, gone, monkeypatch, difference, reason):
    path, real = leave(tier, gone), os.stat
    (path / "disk").mkdir()

    def stat(name, **how):
        found = real(name, **how)
        if name != "disk":
            return found
        mine = {key: getattr(found, key) for key in ("st_mode", "st_uid", "st_dev", "st_ino", "st_blocks")}
        return SimpleNamespace(**mine | difference)

    monkeypatch.setattr(leftovers.os, "stat", stat)
    (found,) = clean(str(tier), Rule())
    assert found.outcome == "not ours"
    assert reason in found.reason
    assert (path / "state.h5").exists()


# ---- races ----------------------------------------------------------------------------------


def test_what_vanishes_meanwhile_is_no_fault(tier, gone, monkeypatch):
    path, real = leave(tier, gone), os.listdir

    def list_then_lose(where):
        names = real(where)
        if where == str(tier):
            path.rename(tier / "elsewhere")
        return names

    monkeypatch.setattr(leftovers.os, "listdir", list_then_lose)
    assert outcomes(tier) == {}


def test_what_takes_its_place_meanwhile_is_not_touched(tier, gone, monkeypatch):
    path, real = leave(tier, gone), leftovers._judge

    def judge_then_replace(*arguments):
        verdict = real(*arguments)
        path.rename(tier / "elsewhere")
        path.mkdir()
        (path / "precious").write_text("kept")
        return verdict

    monkeypatch.setattr(leftovers, "_judge", judge_then_replace)
    (found,) = clean(str(tier), Rule())
    assert (found.outcome, found.reason) == ("failed", "Directory not empty")
    assert (path / "precious").read_text() == "kept"


def test_several_who_clean_at_once_are_not_in_each_other_s_way(tier, gone):
    for _ in range(40):
        leave(tier, gone)
    with ThreadPoolExecutor(4) as pool:
        found = [outcome for part in pool.map(outcomes, [tier] * 4) for outcome in part.values()]
    assert set(found) <= {"removed", "in use", "unknown"}
    assert os.listdir(tier) == []


def test_a_removal_that_was_broken_off_is_gone_on_with(tier, gone, monkeypatch):
    path = leave(tier, gone)
    (path / "inner").mkdir()

    def fail(name, dir_fd):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(folder.shutil, "rmtree", fail)
        code, text = run(tier)
    assert code == 1
    assert "failed" in text
    assert "Input/output error" in text
    assert (path / MARK).exists(), "the mark goes last"
    assert outcomes(tier) == {str(path): "removed"}


# ---- the next start -------------------------------------------------------------------------

LAYING_OUT = """
import sys
from mlpo_hpc.state import node_file
from mlpo_hpc.state.node_file import Slots
from tests.containers import open_alone
from mlpo_hpc.config import load
from mlpo_hpc.storage.place import find_places

def wait(plan, opening):
    print(plan.path, flush=True)
    sys.stdin.read()

node_file._settle = wait
tiers = [{"name": "pfs", "dir": sys.argv[1], "container": "hdf5"}]
with open_alone(find_places(load({"mlp_offload": {"tiers": tiers}})), Slots(4096, 2)):
    pass
"""


def test_what_kill_9_leaves_the_next_start_removes(tier, caplog):
    command = [sys.executable, "-c", LAYING_OUT, str(tier)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    killed = subprocess.Popen(command, cwd=ROOT, **pipes)
    path = Path(killed.stdout.readline().strip())
    places = find_places(load({"mlp_offload": {"tiers": [{"name": "pfs", "dir": str(tier)}]}}))
    caplog.set_level("INFO", "mlpo_hpc")
    remove_leftovers(places, ALONE)
    assert path.exists(), "it lives"
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert path.exists()
    remove_leftovers(places, ALONE)
    assert os.listdir(tier) == []
    assert f"removed {path.parent}, left by process {killed.pid}" in caplog.text


def test_a_start_says_what_it_leaves_and_is_not_stopped_by_it(tier, gone, monkeypatch, caplog):
    places = find_places(load({"mlp_offload": {"tiers": [{"name": "nvme", "dir": str(tier)}]}}))
    unknown, foreign = leave(tier, replace(gone, host="n2")), tier / HOSTILE[1]
    foreign.mkdir()
    remove_leftovers(places, ALONE)
    assert unknown.exists()
    assert f"1 leftovers stay, see 'mlpo clean --dry-run {tier}'" in caplog.text

    def refuse(where):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(leftovers.os, "listdir", refuse)
    remove_leftovers(places, ALONE)
    assert "looking for leftovers failed: EACCES" in caplog.text


@pytest.mark.parametrize("kind", ["node_local", "shared"])
def test_a_start_asks_slurm_only_about_shared_storage(tier, gone, slurm, kind):
    places = find_places(load({"mlp_offload": {"tiers": [{"name": "t", "dir": str(tier), "kind": kind}]}}))
    leave(tier, of_job(replace(gone, host="n2"), 2))
    remove_leftovers(places, ALONE)
    assert (os.listdir(tier) == []) == (kind == "shared")
    assert bool(slurm.read_text()) == (kind == "shared")


def test_a_start_that_takes_long_leaves_the_rest(tier, gone, monkeypatch, caplog):
    from mlpo_hpc.state import tiers

    for _ in range(3):
        leave(tier, gone)
    monkeypatch.setattr(tiers, "CLEANING_S", -1.0)
    remove_leftovers(find_places(load({"mlp_offload": {"tiers": [{"name": "t", "dir": str(tier)}]}})), ALONE)
    assert len(os.listdir(tier)) == 2
    assert "the rest is for 'mlpo clean'" in caplog.text


# ---- the command ----------------------------------------------------------------------------


def test_a_dry_run_says_and_removes_nothing(tier, gone):
    path, other = leave(tier, gone, content=bytes(50000)), leave(tier, replace(gone, host="n2"))
    code, text = run("--dry-run", tier)
    assert code == 0
    assert f"would go  {path}" in text
    assert f"unknown   {other}" in text
    assert "process" in text
    assert text.endswith("; 0.1 MB to be freed\n")
    assert path.exists()
    code, text = run(tier, "--json")
    found = {one["path"]: one for one in json.loads(text)["leftovers"]}
    assert found[str(path)]["outcome"] == "removed"
    assert found[str(path)]["owner"]["pid"] == gone.pid
    assert found[str(path)]["size_bytes"] >= 50000
    assert found[str(other)]["outcome"] == "unknown"
    assert not path.exists()
    assert run(tier, "--unknown")[0] == 0
    assert os.listdir(tier) == []
    assert run(tier) == (0, "nothing was left behind\n")


def test_what_is_younger_than_is_said_stays(tier, gone):
    young, old = leave(tier, gone), leave(tier, gone)
    age(old, 90000)
    code, text = run(tier, "--older-than", "1d")
    assert code == 0
    assert young.exists()
    assert not old.exists()
    assert "young" in text


def test_wrong_usage_and_directories_that_cannot_be_read_are_told(tier, monkeypatch):
    for arguments in ((), (tier / "missing",), (tier, "--older-than", "soon"), (tier, "--older-than", "-1d")):
        assert run(*arguments)[0] == 2, arguments

    def refuse(where):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(leftovers.os, "listdir", refuse)
    code, text = run(tier)
    assert code == 1
    assert "EACCES" in text
    with pytest.raises(StorageError, match="looking for leftovers"):
        list(clean(str(tier), Rule()))
