"""The engine at work on one and two ranks: life cycle, debug API, checkpoints, faults, bad input."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial

import pytest

from tests.ranks import ROOT, run_ranks

WHOLE = partial(pytest.param, marks=pytest.mark.whole)
RANKS = [WHOLE(1), 2]


@pytest.fixture
def dirs(tmp_path):
    made = [tmp_path / "nvme", tmp_path / "pfs"]
    for path in made:
        path.mkdir()
    return [str(path) for path in made]


def launch(scenario, num_ranks, tmp_path, timeout_s=120, env=None, **args):
    args["out"] = str(tmp_path / "out")
    command = ["-m", "tests.integration.worker", scenario, json.dumps(args)]
    return run_ranks(num_ranks, command, timeout_s, env)


def run(scenario, num_ranks, tmp_path, **args):
    """Run a scenario that must end well on all ranks, by its own record of having finished."""
    outcomes = launch(scenario, num_ranks, tmp_path, **args)
    results = []
    for rank, outcome in enumerate(outcomes):
        file = tmp_path / f"out.{rank}"
        assert outcome.finished(file), outcome.text[-4000:]
        results.append(json.loads(file.read_text()))
    return results


@pytest.mark.parametrize("num_ranks", RANKS)
def test_destroy_leaves_nothing_and_a_second_engine_works(num_ranks, tmp_path, dirs):
    for found in run("lifecycle", num_ranks, tmp_path, dirs=dirs):
        assert found["during"]["threads"]
        assert found["during"]["files"]
        assert found["after"] == {"threads": [], "files": []}
        assert found["listing"] == [], "state files have no name"


def test_interpreter_exit_leaves_nothing(tmp_path, dirs):
    outcomes = launch("leave_without_destroy", 1, tmp_path, dirs=dirs)
    assert outcomes[0].code == 0, outcomes[0].text[-3000:]
    assert [*(tmp_path / "nvme").iterdir(), *(tmp_path / "pfs").iterdir()] == []


def test_kill_9_leaves_nothing(tmp_path, dirs):
    args = {"dirs": dirs, "out": str(tmp_path / "out"), "rank": 9, "what": "EIO"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.worker", "fault_in_step", json.dumps(args)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
        env={**os.environ, "RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"},
    )  # fmt: skip
    for line in process.stdout:
        if "tiers: t0" in line:
            break
    process.kill()
    process.wait()
    assert [*(tmp_path / "nvme").iterdir(), *(tmp_path / "pfs").iterdir()] == []


def test_what_kill_9_leaves_while_files_are_laid_out_the_next_start_removes(tmp_path, dirs):
    tiers = [{"name": "pfs", "dir": dirs[1], "container": "hdf5", "read_bps": 1e8, "write_bps": 1e8}]
    section, job = {"tiers": tiers}, {"SLURM_JOB_ID": "17", "SLURM_CLUSTER_NAME": "bed"}
    killed = launch("killed_while_laid_out", 2, tmp_path, dirs=dirs, section=section, env=job)
    assert killed[0].code == -signal.SIGKILL, killed[0].text[-3000:]
    assert not (tmp_path / "out.1").exists(), "the other rank does not go on"
    (left,) = (tmp_path / "pfs").iterdir()
    assert "-slurm.bed.17.0-" in left.name
    env = {**job, "SLURM_RESTART_COUNT": "1"}
    outcomes = launch("leave_without_destroy", 2, tmp_path, dirs=dirs, section=section, env=env)
    assert all(outcome.finished(tmp_path / f"out.{rank}") for rank, outcome in enumerate(outcomes))
    assert f"removed {left}, left by job 17 of cluster bed, restart 0, process" in outcomes[0].text
    assert list((tmp_path / "pfs").iterdir()) == []


@pytest.mark.parametrize("num_ranks", RANKS)
def test_weights_that_were_changed_from_outside_become_master_weights(num_ranks, tmp_path, dirs):
    """Pruned weights would be NaNs with their old low halves; stock DeepSpeed drops the change."""
    outcomes = launch("changed_weights", num_ranks, tmp_path, dirs=dirs, checkpoint=str(tmp_path / "checkpoint"))
    for rank, outcome in enumerate(outcomes):
        file = tmp_path / f"out.{rank}"
        assert outcome.finished(file), outcome.text[-4000:]
        found = json.loads(file.read_text())
        assert found.pop("codec") == "split"
        names = found.pop("names")
        assert len(found) == 11
        assert all(found.values()), found
    for name in names:
        assert outcomes[0].text.count(f"16-bit weights of {name} were changed from outside") == 1


@pytest.mark.parametrize("num_ranks", RANKS)
def test_the_debug_api_reads_and_sets_through_the_cache(num_ranks, tmp_path, dirs):
    for found in run("debug_api", num_ranks, tmp_path, dirs=dirs):
        assert found == {
            "alone": True,
            "kept": True,
            "exact": [True] * 4,
            "near": True,
            "refused": True,
            "gradient": True,
        }


DEEPSPEEDS = {"checkpoint": {"format": "deepspeed"}}
BACKGROUND = {"checkpoint": {"commit": "background"}}


@pytest.mark.parametrize(
    ("num_ranks", "dtype", "section"),
    [
        (1, "bf16", BACKGROUND),
        (2, "bf16", BACKGROUND),
        (2, "fp16", {}),
        WHOLE(2, "fp16", DEEPSPEEDS),
        WHOLE(1, "bf16", {}),
        WHOLE(2, "bf16", {}),
        WHOLE(2, "fp16", BACKGROUND),
    ],
)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(num_ranks, dtype, section, tmp_path, dirs):
    args = {"dirs": dirs, "dtype": dtype, "section": section, "checkpoint": str(tmp_path / "ckpt")}
    for found in run("resume", num_ranks, tmp_path, **args):
        assert found["equal"]
        assert found["unharmed"], "saving changes nothing"
        assert found["where"] == 4
        assert found["losses"][0] == found["losses"][1] == found["losses"][2]


def test_checkpoints_go_to_and_come_from_stock_deepspeed(tmp_path, dirs):
    args = {"dirs": dirs, "section": DEEPSPEEDS, "checkpoint": str(tmp_path / "ckpt")}
    found = run("stock_reads_ours", 1, tmp_path, **args)
    assert found == [{"to_stock": True, "from_stock": True}]


@pytest.mark.parametrize(("spare_memory", "num_tiers"), [WHOLE(True, 0), WHOLE(False, 2), (False, 0), (True, 2)])
def test_host_memory_alone_saves_and_resumes(spare_memory, num_tiers, tmp_path, dirs):
    args = {"host_memory": 10**7, "section": BACKGROUND, "spare_memory": spare_memory, "looked_at": True}
    found = run("resume", 1, tmp_path, dirs=dirs[:num_tiers], checkpoint=str(tmp_path / "ckpt"), **args)
    assert found[0]["equal"]
    assert found[0]["unharmed"]


def test_a_checkpoint_of_another_cut_is_refused_with_the_value_to_set(tmp_path, dirs):
    args = {"dirs": dirs, "section": DEEPSPEEDS, "host_memory": 420_000, "checkpoint": str(tmp_path / "ckpt")}
    found = run("other_cut", 1, tmp_path, **args)
    assert "sub_group_size" in found[0]["error"]


def test_a_run_goes_on_with_other_ranks_tiers_subgroups_and_codec(tmp_path, dirs):
    """State, weights, frozen parameters, buffers and what the client gave: bit for bit."""
    folder = tmp_path / "ckpt"
    saved = run("elsewhere", 2, tmp_path, dirs=dirs, saves=True, checkpoint=str(folder))
    assert "client_state['x']['bad'] is a builtins.set" in saved[0]["refused"][0]
    assert "of another model" in saved[0]["refused"][1]
    assert saved[0]["unharmed"]
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "three"]
    assert all(path.stat().st_mode & 0o077 == 0 for path in [*(folder / "three").iterdir(), folder / "three"])
    others = [
        (1, {"dirs": dirs[:1], "sub_group_size": 9000, "host_memory": 10**6}),
        (3, {"dirs": dirs, "section": {"state_format": "fp32"}}),
        (4, {"dirs": [], "host_memory": 10**7}),
    ]
    for num_ranks, changes in others:
        for found in run("elsewhere", num_ranks, tmp_path, saves=False, checkpoint=str(folder), **changes):
            assert found["there"] == saved[0]["there"]


def test_a_save_that_fails_leaves_the_checkpoint_before_it(tmp_path, dirs):
    found = run("failing_save", 2, tmp_path, dirs=dirs, checkpoint=str(tmp_path / "ckpt"))
    for rank in found:
        for what in ("ENOSPC", "EIO", "EDQUOT"):
            assert rank[what].startswith("the checkpoint was not saved:\nrank ")
            assert f"failed: {what}" in rank[what]
            assert "What to do: " in rank[what]
            assert str(tmp_path / "ckpt") in rank[what]
            assert rank[what].endswith("saved before and are as they were, the newest first: one")
            made = {name.split("-")[-1].split(".")[0] for name in rank[f"{what}: files"]}
            assert len(made) == 2, "the manifest, and nothing of what failed"
        assert rank["unharmed"]
        assert rank["after the commit"].startswith("it is not certain that the checkpoint was saved:\nrank 0 on ")
        assert rank["path"] == str(tmp_path / "ckpt" / "two")
        assert rank["whole"], "nothing that a committed manifest names is taken away"


def test_a_checkpoint_that_fails_beside_training_does_not_end_it(tmp_path, dirs):
    args = {"dirs": dirs, "section": BACKGROUND, "checkpoint": str(tmp_path / "ckpt")}
    for found in run("failing_in_background", 2, tmp_path, **args):
        assert len(found["losses"]) == 2
        assert "ENOSPC" in found["error"]
        assert found["one"]
        assert found["three"]
        assert set(found["files"]) >= {"latest", "one"}
        assert "two" not in found["files"], "nothing is left of it when the next one begins"
        assert found["back"]
        assert "has not saved a checkpoint 'four'" in found["unknown"]
        assert "ENOSPC" in found["at the end"]


SHARED = {"checkpoint": {"commit": "background"}, "tokens": {"backend": "flock"}}


def test_files_of_a_node_on_shared_storage_become_parts_of_checkpoints(tmp_path, dirs):
    """Parallel HDF5 or not, MPI-IO or not: whatever is at hand here."""
    tiers = [
        {"name": f"t{i}", "dir": d, "kind": "shared", "read_bps": 1e8, "write_bps": 1e8} for i, d in enumerate(dirs)
    ]
    folders = {"checkpoint": str(tmp_path / "ckpt"), "archive": str(tmp_path / "archive" / "of" / "ckpt")}
    for found in run("resume", 2, tmp_path, dirs=dirs, section={**SHARED, "tiers": tiers}, **folders):
        assert found["equal"], "after the run and its state were gone and the checkpoint was moved"
        assert found["unharmed"]
    assert not (tmp_path / "ckpt").exists()
    assert list((tmp_path / "archive" / "of" / "ckpt" / "four").glob("sealed*.h5"))
    assert [os.listdir(d) for d in dirs] == [[], []]


DAMAGES = {
    "chunk": [" is not what was saved: checksum ", "state-00001-"],
    "manifest": ["the manifest is damaged (", "/two/manifest.json"],
    "shard": ["a file of the checkpoint is missing", "/two/shard-00001-"],
    "state": ["a file of the checkpoint is missing", "/two/state-00000-"],
    "version": ["version 2 of the checkpoint format", "install a newer mlpo_hpc", "/two/manifest.json"],
}


def test_what_is_wrong_with_a_checkpoint_is_told_and_which_others_there_are(tmp_path, dirs):
    first, second = run("damaged", 2, tmp_path, dirs=dirs, checkpoint=str(tmp_path / "ckpt"))
    assert first == second
    assert first.pop("one"), "the older one is loaded when it is asked for"
    assert set(first) == set(DAMAGES)
    for what, words in DAMAGES.items():
        assert first[what].startswith("the checkpoint was not loaded:\nrank ")
        for text in words:
            assert text in first[what]
        assert first[what].endswith("Other checkpoints that are there, the newest first: one")
    assert re.search(r": [0-5]\.(weight|bias) is not what was saved", first["chunk"]), "the parameter is named"


# Which layers take part, by step and micro-step.
WINDOWS = {
    "steps": [[[0, 1, 2, 3, 4, 5]], [[0, 5]], [[1, 2, 3]], [[0, 1, 2, 3, 4, 5]], [[4]]],
    "micro-steps": [[[0, 1], [2, 3]], [[0, 1, 2], [0, 5]], [[4], [4]], [[0, 1, 2, 3, 4, 5], [3]], [[5], [0]]],
    "one each": [[[0], [1], [2]], [[2], [1], [0]], [[3, 4, 5], [0], [0]]],
}


@pytest.mark.parametrize("num_ranks", RANKS)
def test_layers_used_in_part_get_their_true_gradient(num_ranks, tmp_path, dirs):
    cases = [{"windows": windows, "clip": clip} for windows in WINDOWS.values() for clip in (0.0, 0.05)]
    for found in run("partial_use", num_ranks, tmp_path, dirs=dirs, cases=cases):
        assert len(found["worst"]) == len(cases)
        assert max(found["worst"]) < 2e-6, found


BAD_INPUT = {
    "missing directory on one rank": (
        {"tier": "${TIER_DIR}", "by_rank": {"0": {"env": {"TIER_DIR": "/tmp"}}, "1": {"env": {"TIER_DIR": "/no/x"}}}},
        ["rank 1 on", "/no/x", "create the directory"],
    ),
    "budget": ({"host_memory": 1000}, ["smallest that works is", "bytes a node", "Raise 'host_memory'"]),
    "more memory than there is": ({"host_memory": 10**15}, ["'host_memory' is 1,000,000,000,000,000", "use less"]),
    "unknown key": ({"section": {"tires": 1}}, ["'tires'", "valid keys"]),
    "ranks disagree": (
        {"by_rank": {"1": {"host_memory": 500_000}}},
        ["ranks disagree", "mlp_offload.host_memory: 500000 | "],
    ),
    "ranks disagree by environment": (
        {"by_rank": {"1": {"env": {"MLPO_HPC_ORDER": "sequential"}}}},
        ["ranks disagree", "mlp_offload.order: sequential | alternate"],
    ),
    "another version on one rank": (
        {"by_rank": {"1": {"version": "9.9"}}},
        ["ranks disagree", "versions.mlpo_hpc: 9.9 | ", "the same environment"],
    ),
    "unknown key on one rank": ({"by_rank": {"1": {"section": {"ordre": "x"}}}}, ["rank 1 on", "'ordre'"]),
    "too little memory and no tier": ({"dirs": [], "host_memory": 1000}, ["add 'tiers'"]),
    "too small a tier": ({"capacity": 50_000}, ["room for", "t0", "add a tier"]),
    "ranks disagree about DeepSpeed's part": (
        {"by_rank": {"1": {"changes": {"gradient_clipping": 0.5}}}},
        ["ranks disagree", "gradient_clipping: 0.5 | "],
    ),
    "a shared tier that is none": (
        {
            "tier": "${TIER_DIR}",
            "kind": "shared",
            "by_rank": {"0": {"env": {"TIER_DIR": "/tmp"}}, "1": {"env": {"TIER_DIR": "/var"}, "host": "n2"}},
        },
        ["rank 1 on n2: tier 't0' is 'shared'", "not seen on host n2, rank 1, /var", "node_local"],
    ),
    "stage": ({"changes": {"zero_optimization": {"stage": 2}}}, ["stage 3"]),
    "memory as storage": ({"dirs": ["/dev/shm"]}, ["/dev/shm", "allow_memory"]),
}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """All bad inputs in one launch on two ranks."""
    folder = tmp_path_factory.mktemp("bad")
    made = [str(folder / name) for name in ("nvme", "pfs")]
    for path in made:
        os.mkdir(path)
    cases = [{"dirs": made, **args} for args, _ in BAD_INPUT.values()]
    return run("bad_input", 2, folder, cases=cases)


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_one_error_on_all_ranks_before_training(name, refusals):
    index = list(BAD_INPUT).index(name)
    first, second = (found["errors"][index] for found in refusals)
    assert first == second
    for text in BAD_INPUT[name][1]:
        assert text in first
    assert refusals[0]["left"] == []


@pytest.mark.parametrize("kind", [None, WHOLE("shared"), WHOLE("node_local")])
def test_whether_nodes_share_a_directory_is_found_out(kind, tmp_path, dirs):
    """Two ranks with two host names in one directory: one of them locks it for both."""
    case = {"dirs": dirs, "by_rank": {"1": {"host": "n2"}}} | ({"kind": kind} if kind else {})
    outcomes = launch("bad_input", 2, tmp_path, cases=[case])
    found = [json.loads((tmp_path / f"out.{rank}").read_text()) for rank in range(2)]
    assert [rank["errors"] for rank in found] == [[""], [""]], outcomes[0].text[-3000:]
    said = {None: "is shared by the nodes", "node_local": "all nodes see the same files in"}
    assert kind == "shared" or said[kind] in outcomes[0].text


def test_a_second_job_in_the_same_directory_is_refused(tmp_path, dirs):
    from mlpo_hpc.storage.lock import DirectoryLock

    lock = DirectoryLock(dirs[1])  # this process is the other job
    found = run("bad_input", 2, tmp_path, cases=[{"dirs": dirs}])
    lock.close()
    assert found[0] == found[1]
    assert "another job uses" in found[0]["errors"][0]
    assert dirs[1] in found[0]["errors"][0]


@pytest.mark.parametrize("what", ["ENOSPC", WHOLE("EDQUOT"), WHOLE("EIO"), "truncated", "altered"])
def test_a_fault_in_mid_step_is_said_and_ends_the_world(what, tmp_path, dirs):
    outcomes = launch("fault_in_step", 2, tmp_path, dirs=dirs, rank=1, what=what)
    assert all(outcome.code != 0 for outcome in outcomes), outcomes[0].text[-2000:]
    text = outcomes[1].text
    assert "breaking" in text
    assert "killed by the test" not in outcomes[0].text + text, "the world ends by itself"
    # A write after the truncation makes the file longer again: then the checksum finds the hole.
    altered = ["is not what was written"]
    expected = {"truncated": ["ends at byte", *altered], "altered": altered}.get(what, [what])
    assert any(words in text for words in expected)
    assert "rank 1" in text
    assert any(path in text for path in dirs)
    assert not (tmp_path / "out.0").exists()
    assert [*(tmp_path / "nvme").iterdir(), *(tmp_path / "pfs").iterdir()] == []


def test_whole_state_in_one_hdf5_file_on_any_number_of_ranks(tmp_path, dirs):
    """Bit for bit: what was saved, what the run that goes on becomes, and what one rank reads of it."""
    (tmp_path / "files").mkdir()
    args = {"dirs": dirs, "file": str(tmp_path / "files" / "whole.h5")}
    saved = run("whole_state", 2, tmp_path, saves=True, **args)
    for rank in saved:
        assert rank["back"] == [rank["there"], rank["weights"]]
        assert rank["again"] == rank["went_on"]
        assert "is of another model or optimizer: parameters that are here only" in rank["said"][0]
        assert "5.bias, 5.weight" in rank["said"][0]
        assert "the state was not saved" in rank["said"][1]
        assert "failed: ENOENT" in rank["said"][1]
        assert rank["same"], "nothing is changed by what is refused"
    assert sorted(path.name for path in (tmp_path / "files").iterdir()) == ["whole.h5", "whole.h5.other"]
    (alone,) = run("whole_state", 1, tmp_path, saves=False, **args)
    assert (alone["there"], alone["weights"]) == (saved[0]["there"], saved[0]["weights"])


def test_deepspeed_s_own_monitor_gets_our_figures(tmp_path, dirs):
    found = run("monitored", 2, tmp_path, dirs=dirs, logs=str(tmp_path / "logs"))
    folder = tmp_path / "logs" / "job"
    for name in ("update_s", "cache_hits", "t0_write_s", "t1_bytes_read"):
        assert (folder / f"Train_Offload_{name}.csv").exists(), sorted(path.name for path in folder.iterdir())
    rows = (folder / "Train_Offload_bytes_read.csv").read_text().split()
    assert [row.split(",")[0] for row in rows[1:]] == ["4", "8", "12"], "samples, as DeepSpeed counts them"
    assert float(rows[-1].split(",")[1]) == found[0]["bytes_read"]
