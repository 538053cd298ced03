"""The benchmark's parts that need neither DeepSpeed nor storage."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from mlpo_hpc.bench import (
    checkpoints,
    picture,
    plain_writer,
    result,
    room,
    session,
    systems,
    table,
    testbed,
    throttle,
    toolchain,
)
from mlpo_hpc.bench.conditions import BenchTier, Conditions
from mlpo_hpc.bench.crew import BenchError, Team, worker_environment
from mlpo_hpc.bench.progress import Expectation
from mlpo_hpc.bench.result import Outcome, Sample
from mlpo_hpc.cli import main
from mlpo_hpc.config import load
from mlpo_hpc.engine.translate import translate
from mlpo_hpc.errors import StorageError

MB = 10**6
TIERS = (BenchTier("nvme", "/a", 200 * MB, 210 * MB), BenchTier("pfs", "/b", 110 * MB, 100 * MB))
STANDARD = Conditions(TIERS)
BENCH = Path(__file__).parent.parent.parent / "docs/bench"
"""What was measured."""


def config_of(system, conditions=STANDARD, swap=None):
    return systems.ds_config(system, conditions, systems.tiers_of(system, conditions), swap)


def sample(system, accumulation=1, number=0, **figures):
    usual = {"forward_s": 0.1, "backward_s": 0.9, "update_s": 1.0, "iteration_s": 2.0, "loss": 1.0}
    moved = {"read_bytes": {"nvme": 100 * MB}, "written_bytes": {"nvme": 50 * MB}}
    return Sample(system, accumulation, number, **{**usual, **moved, **figures})


# ---- conditions and systems ---------------------------------------------------------------


def test_the_standard_model_has_67_million_parameters_in_16_subgroups():
    assert STANDARD.numel == 8 * 2 * 4 * 1024**2
    assert STANDARD.largest_subgroup_numel(4_000_000) == 4 * 1024**2
    assert STANDARD.largest_subgroup_numel(8_000_000) == 2 * 4 * 1024**2
    assert STANDARD.largest_subgroup_numel(10**12) == STANDARD.numel
    assert dataclasses.replace(STANDARD, ranks=2).largest_subgroup_numel(4_000_000) == 2 * 2 * 1024**2


def test_standard_host_memory_holds_16_swap_buffers():
    assert systems.buffer_count(STANDARD, 4_000_000) == 16
    swaps, left_out = systems.swaps_to_try(STANDARD)
    assert [(swap.queue_depth, swap.sub_group_size) for swap in swaps] == [(16, 4_000_000), (32, 4_000_000)]
    assert len(left_out) == 1
    assert "8,000,000" in left_out[0]


def test_more_host_memory_lets_larger_subgroups_be_tried():
    swaps, left_out = systems.swaps_to_try(dataclasses.replace(STANDARD, host_memory_bytes=1000 * MB))
    assert len(swaps) == 4
    assert not left_out


def test_stock_nvme_swaps_in_a_pipeline_to_the_first_tier():
    config = config_of("nvme", swap=systems.Swap(32, 4_000_000))
    offload = config["zero_optimization"]["offload_optimizer"]
    assert (offload["device"], offload["nvme_path"], offload["buffer_count"]) == ("nvme", "/a", 16)
    assert offload["pipeline_read"]
    assert offload["pipeline_write"]
    assert config["aio"]["queue_depth"] == 32
    assert "mlp_offload" not in config


def test_stock_cpu_has_no_section_of_ours():
    config = config_of("cpu")
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert "mlp_offload" not in config


def test_ours_gets_tiers_and_host_memory_only():
    section = config_of("ours")["mlp_offload"]
    assert section == {
        "tiers": [{"name": "nvme", "dir": "/a"}, {"name": "pfs", "dir": "/b"}],
        "host_memory": 268 * MB,
    }


def test_each_rung_of_the_ladder_has_one_principle_more():
    rungs = [config_of(name)["mlp_offload"] for name in ("paper-1", "paper-2", "paper-3", "paper")]
    found = [(len(r["tiers"]), r["order"], r["tokens"]["backend"], r["prefetch"], r["state_format"]) for r in rungs]
    assert found == [
        (1, "sequential", "off", 1, "fp32"),
        (1, "alternate", "off", 1, "fp32"),
        (1, "alternate", "local", 1, "fp32"),
        (2, "alternate", "local", 1, "fp32"),
    ]
    assert rungs[-1]["placement"] == {"static": [2.0, 1.0]}


def test_several_ranks_take_turns_across_processes():
    assert config_of("paper", dataclasses.replace(STANDARD, ranks=2))["mlp_offload"]["tokens"]["backend"] == "flock"


@pytest.mark.parametrize("system", [name for name in systems.SYSTEMS if name not in systems.STOCK])
def test_our_configurations_are_valid(system):
    config = config_of(system)
    load(config)
    assert translate(config).sub_group_size == 4_000_000


def test_without_tiers_ours_is_in_host_memory():
    bare = Conditions((), host_memory_bytes=None)
    assert config_of("ours", bare)["mlp_offload"] == {"tiers": []}


def test_a_worker_inherits_no_launcher_and_no_settings(monkeypatch):
    environ = {"PATH": "/bin", "SLURM_PROCID": "3", "MLPO_HPC_ORDER": "sequential", "MLPO_HPC_SITE": "x", "HOME": "/h"}
    found = worker_environment(environ, 1, 2, 23456)
    assert "SLURM_PROCID" not in found
    assert "MLPO_HPC_ORDER" not in found
    assert (found["MLPO_HPC_SITE"], found["HOME"]) == ("x", "/h")
    assert (found["RANK"], found["WORLD_SIZE"], found["MASTER_PORT"]) == ("1", "2", "23456")
    assert int(found["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)


class Quiet:
    """Stands for a worker, with a socket of its own."""

    def __init__(self, *answers):
        self._mine, self._theirs = socket.socketpair()
        self._answers = list(answers)
        self._theirs.send(b"x")

    def fileno(self):
        return self._mine.fileno()

    def receive(self):
        answer = self._answers.pop(0)
        if not self._answers:
            self._mine.recv(1)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def failed(self, what):
        return BenchError(what)


def test_a_team_hears_all_its_ranks():
    assert Team([Quiet(None, {"n": 0}), Quiet({"n": 1})]).hear(10) == [{"n": 0}, {"n": 1}]


def test_a_rank_that_ends_is_told_while_others_wait_for_it():
    waits = Quiet(None)
    with pytest.raises(BenchError, match="rank 1 ended"):
        Team([waits, Quiet(BenchError("rank 1 ended"))]).hear(60)


def test_a_team_that_gives_no_answer_is_told():
    with pytest.raises(BenchError, match="no answer for 0 s"):
        Team([Quiet(None)]).hear(0.2)


def test_time_left_is_that_of_the_turns_before():
    plan = [("a", 1), ("b", 1), ("a", 1), ("b", 1)]
    expectation = Expectation(plan)
    assert expectation.left_s() is None
    expectation.done(("a", 1), 10.0)
    assert expectation.left_s() == 30.0  # b as a, for want of better
    expectation.done(("b", 1), 2.0)
    assert expectation.left_s() == 12.0


# ---- results ------------------------------------------------------------------------------


def outcome(**changes):
    """Two rounds; ours twice as fast in the second."""
    samples = []
    for number, ours_s in ((0, 2.0), (1, 1.0)):
        for ga, iteration_s in ((1, 5.0), (8, 12.0)):
            figures = {"state_bytes": 800 * MB, "found_bytes": 500 * MB, "host_bytes": 400 * MB, "update_s": ours_s}
            figures["reusable_bytes"] = 300 * MB
            samples.append(sample("ours", ga, number, iteration_s=iteration_s, **figures))
            samples.append(sample("nvme", ga, number, update_s=8.0, iteration_s=10.0))
            samples.append(sample("cpu", ga, number, iteration_s=9.0))
            samples.append(sample("paper", ga, number, update_s=3.0, state_bytes=800 * MB, found_bytes=600 * MB))
    found = Outcome(STANDARD, ("nvme", "cpu", "paper", "ours"), samples)
    phases = [("forward", 0.0, 0.1), ("backward", 0.1, 1.0), ("update", 1.0, 2.0)]
    found.timelines = {name: {"phases": phases, "tiers": {}} for name in ("nvme", "paper", "ours")}
    found.timelines["ours"]["tiers"] = {"nvme": {"read": [(1.0, 1.5, 10 * MB)], "written": [(1.2, 1.9, 10 * MB)]}}
    return dataclasses.replace(found, **changes)


def test_ratios_pair_the_rounds():
    found = result.ratios(outcome())
    assert found["update_vs_nvme"] == {"median": 6.0, "min": 4.0, "max": 8.0}
    assert found["update_vs_paper_policies"] == {"median": 2.25, "min": 1.5, "max": 3.0}
    assert found["iteration_vs_nvme"]["median"] == 2.0
    assert found["update_vs_floor"] == {"median": 1.5, "min": 1.0, "max": 2.0}  # floor: 300 MB at 300 MB/s
    assert found["iteration_ga8_vs_cpu_plus_floor"]["median"] == pytest.approx(12 / (9 + 1))
    assert found["reusable_host_share"]["median"] == 0.75


def test_a_ratio_of_systems_that_did_not_run_is_absent():
    everything = outcome()
    ours_only = [s for s in everything.samples if s.system == "ours" and s.accumulation == 1]
    found = result.ratios(dataclasses.replace(everything, samples=ours_only))
    assert set(found) == {"update_vs_floor", "reusable_host_share"}


def test_without_what_our_engine_reports_there_is_no_floor():
    silent = sample("ours")
    assert result.floor_s(silent, STANDARD) is None
    assert result.ratios(Outcome(STANDARD, ("ours",), [silent])) == {}


def test_floors_of_stock_and_of_host_memory():
    assert result.floor_s(sample("nvme"), STANDARD) == 16 * STANDARD.numel / (200 * MB)
    assert result.floor_s(sample("cpu"), STANDARD) == 0.0
    assert result.floor_s(sample("ours"), Conditions(())) == 0.0


def test_the_slowest_rank_counts_and_bytes_add_up():
    mine = {"forward_s": 1, "backward_s": 1, "update_s": 3, "iteration_s": 5, "loss": 1.0, "state_bytes": 7}
    mine |= {"read_bytes": {"a": 1}, "written_bytes": {"a": 2}, "found_bytes": None}
    theirs = mine | {"update_s": 2, "iteration_s": 6, "loss": 2.0, "read_bytes": {"a": 10, "b": 5}}
    merged = result.merge("ours", 1, 0, [mine, theirs])
    assert (merged.update_s, merged.iteration_s, merged.loss) == (3, 6, 1.5)
    assert merged.read_bytes == {"a": 11, "b": 5}
    assert (merged.state_bytes, merged.found_bytes, merged.host_bytes) == (14, None, None)


def test_systems_that_did_other_work_are_noticed():
    assert not result.losses_differ(outcome())
    assert result.losses_differ(Outcome(STANDARD, ("cpu", "ours"), [sample("cpu"), sample("ours", loss=2.0)]))


def test_the_json_has_samples_conditions_and_ratios():
    plain = json.loads(json.dumps(result.plain(outcome(swap=systems.Swap(16, 4_000_000)))))
    assert len(plain["samples"]) == 16
    assert plain["conditions"]["tiers"][1]["write_bps"] == 100 * MB
    assert plain["tuning"]["chosen"] == {"queue_depth": 16, "sub_group_size": 4_000_000}
    assert plain["ratios"]["update_vs_nvme"]["max"] == 8.0
    row = next(row for row in plain["rows"] if row["system"] == "ours" and row["accumulation"] == 8)
    assert row["text_tokens"] == 32
    assert row["update_s"] == {"median": 1.5, "min": 1.0, "max": 2.0}
    assert row["update_to_floor"] == 1.5


def test_tables_show_every_system(capsys):
    table.show(outcome(notes=["mind this"]))
    text = capsys.readouterr().out
    for name in ("nvme", "cpu", "paper", "ours", "mind this"):
        assert name in text


def test_pictures_are_drawn(tmp_path):
    picture.draw_bench(outcome(), tmp_path / "bench.png")
    picture.draw_timeline(outcome(), tmp_path / "timeline.png")
    picture.draw_timeline(outcome(timelines={}), tmp_path / "empty.png")
    assert all(path.stat().st_size > 5000 for path in tmp_path.glob("*.png"))


def test_bandwidth_over_time_keeps_all_bytes():
    rates = picture.bandwidth([(0.5, 1.5, 100), (-1.0, 1.0, 40), (3.9, 4.1, 20)], 4.0, 4)
    assert rates == pytest.approx([50 + 20, 50, 0, 10])


# ---- what is missing is said before anything is built -------------------------------------


@pytest.fixture
def extensions(monkeypatch, tmp_path):
    """An empty folder of compiled operators."""
    folder = tmp_path / "extensions"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
    (folder / "async_io").mkdir(parents=True)
    return folder


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_a_lock_is_stale_if_it_is_old_and_nobody_has_it_open(extensions):
    lock = extensions / "async_io" / "lock"
    lock.touch()
    assert not toolchain.is_stale(lock, time.time())
    age(lock, 1000)
    assert toolchain.is_stale(lock, time.time())
    with lock.open():
        assert not toolchain.is_stale(lock, time.time())
    lock.unlink()
    assert not toolchain.is_stale(lock, time.time())


def test_a_stale_lock_is_named(extensions, monkeypatch):
    monkeypatch.setattr(toolchain, "_require_tools", lambda libaio: None)
    lock = extensions / "async_io" / "lock"
    lock.touch()
    age(lock, 1000)
    with pytest.raises(toolchain.ConfigError, match=f"{lock}.*remove"):
        toolchain.require(["nvme"])
    toolchain.require(["ours"])


def test_locks_are_found_below_versions_too(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    lock = tmp_path / ".cache/torch_extensions/py311_cpu/cpu_adam/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert toolchain.locks(["cpu_adam", "async_io"]) == [lock]


def test_a_compilation_that_was_broken_off_leaves_no_lock(extensions):
    mine, theirs = extensions / "async_io" / "lock", extensions / "cpu_adam" / "lock"
    theirs.parent.mkdir()
    theirs.touch()
    with pytest.raises(KeyboardInterrupt), toolchain.no_new_locks(["nvme"]):
        mine.touch()
        raise KeyboardInterrupt
    assert not mine.exists()
    assert theirs.exists()


def test_compiled_operators_are_not_compiled_again(extensions):
    assert "async_io" in toolchain.to_compile(["nvme", "cpu"])
    (extensions / "async_io" / "async_io.so").touch()
    assert "async_io" not in toolchain.to_compile(["nvme", "cpu"])
    assert toolchain.to_compile(["paper", "ours"]) == []


def run(*args):
    return CliRunner().invoke(main, ["bench", *map(str, args)])


@pytest.fixture
def tier(tmp_path):
    (tmp_path / "tier").mkdir()
    return tmp_path / "tier"


def test_without_a_compiler_it_says_so(monkeypatch, tier):
    monkeypatch.setenv("CXX", "no-such-compiler")
    done = run(tier, "--systems", "cpu,ours")
    assert done.exit_code == 1
    assert "no-such-compiler" in done.output
    assert "--systems" in done.output
    assert not list(tier.iterdir())


def test_without_libaio_it_says_so(monkeypatch, tier):
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(toolchain.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1))
    done = run(tier, "--systems", "nvme")
    assert done.exit_code == 1
    assert "libaio-dev" in done.output


def test_without_ninja_it_says_so(monkeypatch, tier):
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None if name == "ninja" else f"/bin/{name}")
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    done = run(tier, "--systems", "cpu")
    assert done.exit_code == 1
    assert "ninja" in done.output


def test_a_test_bed_needs_root(monkeypatch):
    monkeypatch.setattr(testbed.os, "geteuid", lambda: 1000)
    done = run("--testbed", "nvme=200", "--systems", "ours")
    assert done.exit_code == 1
    assert "root" in done.output


def test_a_test_bed_needs_a_control_group(monkeypatch):
    monkeypatch.setattr(testbed.os, "geteuid", lambda: 0)
    monkeypatch.setattr(testbed, "has_v1", lambda: False)
    monkeypatch.setattr(testbed, "has_v2", lambda: False)
    assert "control group" in testbed.missing()


@pytest.mark.parametrize(("kind", "free", "words"), [("tmpfs", 10**15, "memory"), ("ext4", 1000, "free space")])
def test_a_test_bed_needs_space_on_storage(monkeypatch, tmp_path, kind, free, words):
    monkeypatch.setattr(testbed, "missing", str)
    found = SimpleNamespace(is_memory=kind == "tmpfs", type=kind, free_bytes=free)
    monkeypatch.setattr(testbed, "describe", lambda path: found)
    with (
        pytest.raises(testbed.ConfigError, match=words),
        testbed.capped_disks(tmp_path, {"a": 1}, {"a": 10**6}),
    ):
        pytest.fail("it was built")
    assert not list((tmp_path).glob("a*"))


def test_a_tool_that_fails_is_told_and_nothing_is_left(monkeypatch, tmp_path):
    real = testbed._run

    def fail_to_mount(*command):
        return real("false") if command[0] == "mkfs.ext4" else real(*command)

    monkeypatch.setattr(testbed, "_run", fail_to_mount)
    monkeypatch.setattr(throttle, "has_v1", lambda: True)
    with pytest.raises(testbed.StorageError, match="false failed"), testbed.capped_disk(tmp_path, "disk", 10**6):
        pytest.fail("it was built")
    assert not list(tmp_path.glob("disk*"))


def test_too_little_space_is_told(monkeypatch, tier):
    found = SimpleNamespace(is_memory=False, device=1, free_bytes=1000)
    monkeypatch.setattr(room, "describe", lambda path: found)
    done = run(tier, "--systems", "ours")
    assert done.exit_code == 1
    assert "are free" in done.output
    assert not list(tier.iterdir())


def test_a_missing_directory_is_told(tmp_path):
    done = run(tmp_path / "nothing", "--systems", "ours")
    assert done.exit_code == 1
    assert "no directory" in done.output


def test_too_little_memory_is_told(monkeypatch, tier):
    monkeypatch.setattr(room, "available_bytes", lambda: 10**6)
    done = run(tier, "--systems", "ours")
    assert done.exit_code == 1
    assert "host memory" in done.output


def test_a_file_that_cannot_be_written_is_told_first(tier, tmp_path):
    done = run(tier, "--systems", "ours", "--json", tmp_path / "nothing" / "out.json")
    assert done.exit_code == 1
    assert "missing or not writable" in done.output


def test_too_few_swap_buffers_are_told(monkeypatch):
    monkeypatch.setattr(session.toolchain, "require", lambda names: None)
    small = dataclasses.replace(STANDARD, host_memory_bytes=50 * MB)
    with pytest.raises(session.ConfigError, match="--host-memory"):
        session.check(small, ["nvme"])


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["--no-tiers", "--testbed", "a=1"],
        ["--no-tiers", "--systems", "paper"],
        ["--testbed", "a"],
        ["--testbed", "a=1,a=2"],
        ["/tmp", "--systems", "theirs"],
        ["/tmp", "--ga", "x"],
        ["/tmp", "--host-memory", "lots"],
        ["a=/tmp", "a=/var"],
    ],
)
def test_wrong_usage_is_told(args):
    assert run(*args).exit_code == 2


def test_space_is_asked_for_all_systems_at_once():
    needed = room.tier_bytes(STANDARD, ["nvme", "paper-1", "ours"])
    assert needed["nvme"] > (16 + 12 + 12) * STANDARD.numel > needed["pfs"] > 12 * STANDARD.numel


# ---- control groups -----------------------------------------------------------------------


def test_version_2_caps_and_counts_in_its_group(tmp_path):
    (tmp_path / "io.stat").write_text("7:1 rbytes=5 wbytes=6 rios=1 wios=1\n7:2 rbytes=1 wbytes=2\n")
    capping = throttle.ThrottleV2(tmp_path)
    capping.cap("7:1", 1000)
    assert (tmp_path / "io.max").read_text() == "7:1 rbps=1000 wbps=1000"
    capping.cap("7:1", 0)
    assert (tmp_path / "io.max").read_text() == "7:1 rbps=max wbps=max"
    assert capping.moved_bytes("7:1") == {"read": 5, "write": 6}
    assert capping.moved_bytes("7:9") == {"read": 0, "write": 0}


# ---- checkpoints --------------------------------------------------------------------------


def test_what_a_checkpoint_costs_and_what_a_plain_writer_costs_the_passes_by_hand():
    def iteration(passes_s=1.0, update_s=1.0, save_s=0.0):
        phases = {"save_s": save_s, "forward_s": 0.5 * passes_s, "backward_s": 0.5 * passes_s, "update_s": update_s}
        return {**phases, "iteration_s": passes_s + update_s}

    case = checkpoints.Case(
        plain=[[iteration()] * 3, [iteration()] * 3],
        saves=[[iteration(1.1, 1.2, 0.1), iteration(1.1)], [iteration(1.1, save_s=0.1), iteration()]],
        writers=[[iteration(1.04, 9.0), iteration(1.04)], [iteration(1.02)]],
        committed_s=[5.0, 4.0],
        checkpoint_bytes=12 * STANDARD.numel,
        load_s=3.0,
        load_floor_s=2.0,
    )
    found = checkpoints.figures(case, STANDARD)
    assert found["iteration_s"] == 2.0
    assert found["stall"]["mean"] == pytest.approx((0.5 + 0.2) / 2 / 2.0)
    assert found["stall"]["error"] == pytest.approx((0.25 - 0.10) / 2)
    assert found["stall_by_phase"] == pytest.approx(
        {"save_s": 0.05, "forward_s": 0.0375, "backward_s": 0.0375, "update_s": 0.05}
    )
    assert found["stall_of_passes"]["mean"] == pytest.approx((0.2 + 0.1) / 2 / 2.0)
    assert found["plain_writer_of_passes"]["mean"] == pytest.approx((0.08 + 0.02) / 2 / 2.0), "its updates do not count"
    assert (found["committed_within_iterations"]["median"], found["committed_s"]["max"]) == (2.0, 5.0)
    assert (found["bytes_per_parameter"], found["load_vs_floor"]) == (12.0, 1.5)


def state_of(pid):
    """A letter; None: there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def eventually(is_so):
    """Whether it comes to be so, within a time that no machine needs."""
    deadline = time.monotonic() + 60.0
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_so()


def test_a_plain_writer_writes_while_it_is_let_and_leaves_nothing(tmp_path):
    folder = tmp_path / "tier"
    folder.mkdir()
    nbytes = 3 * plain_writer.PIECE_BYTES
    with plain_writer.PlainWriter(str(folder), nbytes) as writer:
        assert not writer.is_done()
        time.sleep(0.2)
        assert not writer.is_done(), "it is stopped"
        with writer.writing():
            assert eventually(writer.is_done)
    with plain_writer.PlainWriter(str(folder), 10**12) as unfinished:
        for _ in range(2):
            with unfinished.writing():
                assert eventually(lambda: state_of(unfinished._child.pid) != "T")
            assert eventually(lambda: state_of(unfinished._child.pid) == "T")
        assert not unfinished.is_done()
    assert unfinished._child.returncode == -signal.SIGKILL
    assert not list(folder.iterdir())


def test_a_plain_writer_that_cannot_write_says_so(tmp_path, capfd):
    with pytest.raises(StorageError, match=r"ended with 1: .*nowhere"):
        plain_writer.PlainWriter(str(tmp_path / "nowhere"), 1)
    assert "nowhere" in capfd.readouterr().err


def test_a_plain_writer_ends_with_who_let_it(tmp_path):
    """Stopped, it would stay for ever."""
    program = (
        "import sys, time; from mlpo_hpc.bench.plain_writer import PlainWriter; w = PlainWriter(sys.argv[1], 10**12);"
        "print(w._child.pid, flush=True); time.sleep(1000)"
    )
    owner = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    pid = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    owner.stdout.close()
    try:
        assert eventually(lambda: state_of(pid) in {None, "Z"}), "gone, or collected by nobody"
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def rows_of_checkpoints():
    """Of the table in the docs, from what was measured: both cores compute, or one is left to I/O."""
    measured = [json.loads((BENCH / name).read_text())["cases"] for name in ("checkpoint.json", "checkpoint-io.json")]
    both, one = ([each["shared"], each["node_local"]] for each in measured)
    cases = [*both, *one]

    def error(found):
        return f"{found['mean']:.1%} +- {found['error']:.1%}"

    def spread(found, shape):
        median, least, most = (f"{found[key]:{shape}}" for key in ("median", "min", "max"))
        return median if median == least == most else f"{median} ({least} - {most})"

    phases = [case["stall_by_phase"] for case in cases]
    yield "iteration without it", [f"{case['iteration_s']:.2f} s" for case in cases]
    yield "stall by one checkpoint, of an iteration", [error(case["stall"]) for case in cases]
    yield "of that in `save_checkpoint` itself", [f"{each['save_s']:.1%}" for each in phases]
    yield "in forward and backward passes", [f"{each['forward_s'] + each['backward_s']:.1%}" for each in phases]
    writers = [error(case["plain_writer_of_passes"]) for case in one]
    yield "the same by a plain program that writes as much", ["", "", *writers]
    yield "in updates", [f"{each['update_s']:.1%}" for each in phases]
    yield "committed within, iterations", [spread(case["committed_within_iterations"], ".0f") for case in cases]
    yield "committed within, seconds", [spread(case["committed_s"], ".1f") for case in cases]
    yield "bytes on disk, a trained parameter", [f"{case['bytes_per_parameter']:.2f}" for case in cases]
    loads = [f"{case['load_vs_floor']:.2f}" for case in cases]
    yield "`load_checkpoint`, in units of reading the state once", loads


@pytest.mark.parametrize(("name", "cells"), list(rows_of_checkpoints()))
def test_the_docs_show_what_checkpoints_cost(name, cells):
    assert f"| {name} | {' | '.join(cells)} |" in (BENCH.parent / "performance.md").read_text()


@pytest.mark.parametrize("name", [f"checkpoint-io-{run}.json" for run in ("first", "again", "short")])
def test_the_docs_tell_of_other_runs(name):
    found = json.loads((BENCH / name).read_text())["cases"]["shared"]["stall"]
    lines = (BENCH.parent / "performance.md").read_text().splitlines()
    (line,) = (line for line in lines if f"(bench/{name})" in line)
    assert f"{found['mean']:.1%} +- {found['error']:.1%}" in " ".join([lines[lines.index(line) - 1], line])
