"""mlpo plan on checkpoints: beside training and waiting, which stay, space, wear; by hand, and what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from click.testing import CliRunner

from mlpo_hpc.cli import main
from mlpo_hpc.errors import ConfigError
from mlpo_hpc.planner.commit import Commit, Manner, Timetable, foresee_commit, hold, target_of
from mlpo_hpc.planner.job import Job
from mlpo_hpc.planner.machine import CODEC_ITEMS_PS_CORE, Machine, PlanTier
from mlpo_hpc.planner.model import find_model
from mlpo_hpc.planner.needs import fits_in_memory
from mlpo_hpc.planner.plan import make_plan
from mlpo_hpc.planner.policy import OURS, PART_ITEMS
from mlpo_hpc.planner.simulate import Forecast, Work, simulate, weights_of
from mlpo_hpc.planner.upkeep import Schedule, foresee_upkeep, read_interval
from mlpo_hpc.state.rhythm import LEAST_LEAD_S

BENCH = Path(__file__).parent.parent.parent / "docs/bench"
GB = 1e9

# Iterations of 10 s; 30 GB of state, 6 GB of weights; 18 GB are written in each step, so 12 GB are in memory alone.
ITEMS = 3e9
NVME = PlanTier("nvme", 4 * GB, 4 * GB)
PFS = PlanTier("pfs", 2 * GB, 2 * GB, shared=True)
MOVED = {"nvme": {"read": 12 * GB, "write": 12 * GB}, "pfs": {"read": 6 * GB, "write": 6 * GB}}
FORECAST = Forecast(1.0, 2.0, 7.0, 6.0, 0.4, MOVED)
HOLDING = hold(FORECAST, {"nvme": 2, "pfs": 1}, ITEMS)
COPY = 4 * 2 * ITEMS
"""Memory that must be left for a copy of the weights."""


# ---- one checkpoint -----------------------------------------------------------------------


def commit(tiers=(NVME, PFS), holding=HOLDING, spare_bytes=COPY):
    return foresee_commit(FORECAST, tiers, holding, 2, spare_bytes)


@pytest.fixture
def no_lead(monkeypatch):
    monkeypatch.setattr("mlpo_hpc.planner.commit.LEAST_LEAD_S", 0.0)


by_hand = pytest.mark.usefixtures("no_lead")
"""Without the moment before each update, for round numbers."""


def test_what_is_where():
    assert HOLDING.memory_bytes == 12 * GB
    assert HOLDING.tier_bytes == {"nvme": 20 * GB, "pfs": 10 * GB}
    assert [HOLDING.sealed_bytes(tier) for tier in ("nvme", "pfs")] == [8 * GB, 4 * GB]

    assert hold(FORECAST, {"nvme": 1}, 1.7e9).memory_bytes == 0, "less than what is written: of two steps"


def test_a_checkpoint_that_training_waits_for():
    """Weights 6, memory 12, and of what is on nvme alone 12, at 2 GB/s; 6 GB lie beside the checkpoint already."""
    made = commit()
    assert (made.tier, made.nbytes) == ("pfs", 72 * GB)
    assert made.manners["wait"] == Manner(0, 15.0, {"pfs": 30 * GB})
    assert made.lead_s == 2 * (10 + 15)


@by_hand
def test_a_checkpoint_beside_training():
    """pfs writes 4 GB from memory, 20 from nvme and the weights in 15 s; the passes, 3 s, are free, and 1/50 of 3 s."""
    beside = commit().manners["background"]
    assert beside.iterations == 5  # 15 / 3.06 = 4.9
    assert beside.slowed_s == pytest.approx(15 / 3.06 * 0.06)
    assert beside.written_bytes == {"nvme": 8 * GB, "pfs": 30 * GB}


@by_hand
def test_on_a_half_duplex_tier_reading_takes_time_too():
    beside = commit((NVME, replace(PFS, full_duplex=False))).manners["background"]
    assert beside.iterations == 5  # 15 / (3 + 6 / 50) = 4.81


@by_hand
def test_a_short_update_is_left_alone():
    way = Timetable(passes_s=6, update_s=4, busy_s=3, urgent_s=1, later_s=11)
    assert (way.idle_s, way.given_s, way.iterations, way.paced_s) == (6, 0, 2, 0)
    never_idle = Timetable(passes_s=1, update_s=4, busy_s=5, urgent_s=0, later_s=1)
    assert (never_idle.idle_s, never_idle.iterations) == (0, pytest.approx(10))


def test_what_can_wait_leaves_the_tiers_alone_shortly_before_an_update():
    way = Timetable(passes_s=6, update_s=4, busy_s=3, urgent_s=1, later_s=11)
    assert way.left_s == 6 - LEAST_LEAD_S
    assert way.iterations == pytest.approx(12 / way.left_s)
    short = Timetable(passes_s=LEAST_LEAD_S, update_s=4, busy_s=0, urgent_s=0, later_s=3)
    assert short.left_s == LEAST_LEAD_S / 2, "of which half is left"
    assert short.iterations == pytest.approx(60)


@by_hand
def test_what_has_no_room_in_an_iteration_stalls_the_next_update():
    way = Timetable(passes_s=2, update_s=8, busy_s=9, urgent_s=5, later_s=10)
    assert way.stall_s == 4
    assert way.iterations == pytest.approx((1 + 10) / (1 + 9 / 50))
    assert way.paced_s == pytest.approx((1 + 10) / (1 + 9 / 50) * 9 / 50)
    assert Timetable(2, 8, 12, 0, 6).idle_s == 0, "rounding of an iteration is no time"


@by_hand
def test_weights_are_written_at_once_where_they_cannot_be_copied():
    """6 GB in 3 s, on a tier that is busy for 8 of 10 s: the update waits for one of them."""
    busy = replace(FORECAST, moved_bytes={"pfs": {"read": 14 * GB, "write": 16 * GB}})
    holding = replace(HOLDING, memory_bytes=0.0, tier_bytes={"pfs": 30 * GB})
    made = [foresee_commit(busy, (PFS,), holding, 1, spare_bytes) for spare_bytes in (COPY, COPY - 1)]
    assert [one.can_copy for one in made] == [True, False]
    beside = [one.manners["background"] for one in made]
    assert [one.slowed_s for one in beside] == pytest.approx([3 / 2.16 * 0.16, 1 + 2 / 2.16 * 0.16])
    assert [one.written_bytes for one in beside] == [{"pfs": 6 * GB}] * 2


@by_hand
def test_state_in_memory_alone_is_written_like_the_weights():
    still = replace(FORECAST, moved_bytes={tier: {"read": 0.0, "write": 0.0} for tier in MOVED})
    holding = hold(still, {}, ITEMS)
    assert holding.unstored_bytes == 30 * GB
    made = foresee_commit(still, (NVME, PFS), holding, 1, 4 * (2 * ITEMS + 30 * GB))
    assert made.can_copy
    assert made.manners["background"] == Manner(6, 0.0, {"nvme": 0.0, "pfs": 36 * GB})
    assert made.manners["wait"] == Manner(0, 18.0, {"pfs": 36 * GB})


def test_checkpoints_are_beside_what_all_nodes_share():
    assert target_of((NVME, PFS)) == PFS
    assert target_of((NVME, replace(PFS, shared=False))) == NVME
    alone = foresee_commit(FORECAST, (NVME,), hold(FORECAST, {"nvme": 1}, ITEMS), 1, COPY)
    assert alone.manners["wait"].written_bytes == {"nvme": 18 * GB}, "weights and what is in memory"


def test_memory_that_holds_all_state_is_counted_as_the_engine_does():
    job = Job(find_model("llama-2-13b"), Machine((NVME,)))
    record_bytes = int(12 * job.items / 4 / job.num_subgroups)
    needed_bytes = 4 * (record_bytes * job.num_subgroups + 8 * PART_ITEMS)
    assert fits_in_memory(replace(job, host_bytes=needed_bytes), OURS)
    assert not fits_in_memory(replace(job, host_bytes=needed_bytes - 1), OURS)


# ---- what was measured --------------------------------------------------------------------

MEASURED = json.loads((BENCH / "checkpoint.json").read_text())
MACHINE = json.loads((BENCH / "bench.json").read_text())


def predicted(case):
    """From the bandwidths and the speed of a step in memory of bench.json, and the passes of checkpoint.json."""
    conditions = MACHINE["conditions"]
    rates = [(tier["name"], tier["read_bps"], tier["write_bps"]) for tier in conditions["tiers"]]
    tiers = [PlanTier(*rate, shared=case == "shared" or rate is not rates[0]) for rate in rates]
    numel = conditions["blocks"] * 8 * conditions["hidden"] ** 2
    (in_memory,) = (row for row in MACHINE["rows"] if row["system"] == "cpu" and row["accumulation"] == 1)
    codec_s = numel / CODEC_ITEMS_PS_CORE / conditions["facts"]["cores"]
    update_items_ps = numel / (in_memory["update_s"]["median"] + codec_s)
    plain = [each for beside in MEASURED["samples"][case]["plain"] for each in beside]
    passes_s = [median(each[phase] for each in plain) for phase in ("forward_s", "backward_s")]
    forecast = simulate(OURS, tiers, Work(numel, 1, 16, conditions["host_memory_bytes"], *passes_s, update_items_ps))
    shares = {tier.name: weight for tier, weight in zip(tiers, weights_of(OURS, tiers), strict=True)}
    return forecast, foresee_commit(forecast, tiers, hold(forecast, shares, numel), 1, 32 * GB)


@pytest.mark.parametrize("case", ["shared", "node_local"])
def test_the_measured_checkpoints_are_predicted(case):
    measured, (forecast, made) = MEASURED["cases"][case], predicted(case)
    beside = made.manners["background"]
    assert beside.iterations == pytest.approx(measured["committed_within_iterations"]["median"], abs=1)
    committed_s = beside.iterations * forecast.iteration_s + beside.slowed_s
    assert committed_s == pytest.approx(measured["committed_s"]["median"], rel=0.2)
    assert beside.slowed_s / forecast.iteration_s < measured["stall"]["mean"], "storage is not all of it"
    numel = MACHINE["conditions"]["blocks"] * 8 * MACHINE["conditions"]["hidden"] ** 2
    assert made.nbytes / numel == pytest.approx(measured["bytes_per_parameter"], rel=0.01)


ROWS = {"shared": "all tiers shared", "node_local": "first tier node-local"}


@pytest.mark.parametrize("case", ROWS)
def test_the_docs_say_what_is_predicted(case):
    measured, (forecast, made) = MEASURED["cases"][case], predicted(case)
    beside = made.manners["background"]
    committed_s = beside.iterations * forecast.iteration_s + beside.slowed_s
    cells = (
        ROWS[case],
        f"{beside.iterations} / {measured['committed_within_iterations']['median']:.0f} iterations",
        f"{committed_s:.3g} / {measured['committed_s']['median']:.3g} s",
        f"{beside.slowed_s / forecast.iteration_s:.1%} / {measured['stall']['mean']:.1%}",
        f"{measured['stall_by_phase']['update_s']:.1%}",
    )
    assert f"| {' | '.join(cells)} |" in (BENCH.parent / "plan.md").read_text()


# ---- many of them -------------------------------------------------------------------------

ONE = Commit("pfs", 100.0, {"wait": Manner(0, 2160.0, {"pfs": 50.0})}, True, 0)
QUICK = Commit("pfs", 100.0, {"wait": Manner(0, 0.0, {"pfs": 50.0, "nvme": 5.0})}, True, 0)


def test_a_schedule_by_hand():
    """Ten a day, of which two and a half stay; three are kept and one is in the making."""
    schedule = Schedule(every=1000, keep_last=3, keep_every=4000)
    upkeep = foresee_upkeep(schedule, QUICK, 8.64, 1000.0)
    assert (upkeep.least_count, upkeep.most_count) == (3, 4)
    assert upkeep.grown_bytes == pytest.approx(250)
    assert upkeep.written_bytes == pytest.approx({"pfs": 500, "nvme": 50})
    assert upkeep.full_days == pytest.approx((1000 - 400) / 250)
    assert upkeep.slowed_share == 0


def test_training_that_waits_has_fewer_a_day():
    upkeep = foresee_upkeep(Schedule(every=1000), ONE, 8.64, None)
    assert upkeep.slowed_share == pytest.approx(2160 / (8640 + 2160))
    assert upkeep.written_bytes == pytest.approx({"pfs": 8 * 50})
    assert upkeep.grown_bytes == pytest.approx(8 * 100), "without keep_last all stay"
    assert (upkeep.least_count, upkeep.most_count, upkeep.full_days) == (1, 1, None)


@pytest.mark.parametrize(("keep_every", "stay"), [(None, 0), (4000, 10 / 4), (1500, 10 / 3), (100, 10)])
def test_only_saved_steps_can_stay(keep_every, stay):
    upkeep = foresee_upkeep(Schedule(every=1000, keep_last=1, keep_every=keep_every), QUICK, 8.64, 10000.0)
    assert upkeep.grown_bytes == pytest.approx(100 * stay)
    assert (upkeep.least_count, upkeep.most_count) == (2, 2), "one, and one in the making"


def test_room():
    upkeep = foresee_upkeep(Schedule(keep_last=3), QUICK, 8.64, 399.0)
    assert [upkeep.has_room_for(count) for count in (3, 4)] == [True, False]
    assert upkeep.written_bytes == {}
    assert (upkeep.every, upkeep.grown_bytes, upkeep.full_days) == (None, None, None)


def test_intervals():
    assert Schedule(**read_interval("500")).iterations(7.0) == 500
    assert Schedule(**read_interval("30min")).iterations(7.0) == 257
    assert Schedule(**read_interval("1min")).iterations(100.0) == 1
    for text in ("", "0", "0min", "x", "5h", "-1", "1.5"):
        with pytest.raises(ConfigError, match="no interval"):
            read_interval(text)
    with pytest.raises(ConfigError, match="give keep_last too"):
        Schedule(keep_every=10)


# ---- the plan -----------------------------------------------------------------------------

DRIVES = PlanTier("nvme", 6.9e9, 5.3e9, full_duplex=False, capacity_bytes=3840 * 10**9)
SHARED = PlanTier("pfs", 3.6e9, 3.6e9, shared=True, capacity_bytes=500 * 10**9)
JOB = Job(find_model("llama-2-13b"), Machine((DRIVES, SHARED)), host_bytes=40 * 10**9)


def test_checkpoints_wear_drives_too():
    plain, (schedule) = make_plan(JOB), Schedule(every=100, commit="background", keep_last=1)
    plan = make_plan(JOB, schedule=schedule)
    added = plan.upkeep.written_bytes["nvme"]
    assert added > 0
    assert plan.wear[0].written_bytes == plain.wear[0].written_bytes + added
    assert plan.wear[0].drive_writes == plan.wear[0].written_bytes / DRIVES.capacity_bytes


def test_room_for_checkpoints_is_what_state_leaves():
    plan = make_plan(JOB, schedule=Schedule(keep_last=2))
    assert plan.upkeep.room_bytes == 500e9 - plan.outlooks["ours"].tier_bytes["pfs"]
    assert plan.commit.nbytes == 12 * JOB.model.numel
    assert plan.problems == []
    assert any("no room for 3 checkpoints" in text for text in plan.warnings)
    two = make_plan(replace(JOB, machine=replace(JOB.machine, nodes=2)), schedule=Schedule(keep_last=2))
    assert two.upkeep.room_bytes == 500e9 - 2 * two.outlooks["ours"].tier_bytes["pfs"]


@pytest.mark.parametrize(
    ("machine", "schedule", "warning"),
    [
        ({}, Schedule(every=1, commit="background"), "waits for the one before"),
        ({}, Schedule(every=100), "is full of checkpoints that stay"),
        ({"node_bytes": 10**11}, Schedule(commit="background", keep_last=1), "no room for a copy"),
        ({"nodes": 2, "tiers": (DRIVES,)}, Schedule(keep_last=1), "no tier is shared"),
        ({"tiers": (replace(SHARED, capacity_bytes=250 * 10**9),)}, Schedule(1, commit="background"), "old and new"),
    ],
)
def test_what_goes_wrong_with_checkpoints_is_said(machine, schedule, warning):
    job = replace(JOB, machine=replace(JOB.machine, **machine))
    assert any(warning in text for text in make_plan(job, schedule=schedule).warnings)
    assert not any(warning in text for text in make_plan(job).warnings), "nobody asked"


def run(*arguments, code=0):
    tiers = ("--tier", "nvme=6.9/5.3,half,capacity=3.84TB", "--tier", "pfs=3.6/3.6,shared,capacity=500GB")
    done = CliRunner().invoke(main, ["plan", "llama-2-13b", *tiers, "--host-memory", "40GB", *arguments])
    assert done.exit_code == code, done.output
    return done.output


def test_a_job_of_short_passes_that_moves_nothing_is_planned_too():
    args = ["plan", "1B", "--gpus", "1", "--sequence", "128", "--tier", "nvme=6/5,capacity=1TB"]
    done = CliRunner().invoke(main, args)
    assert done.exit_code == 0, done.output


def test_the_command_tells_checkpoints():
    options = ("--checkpoint-every", "30min", "--commit", "background", "--keep-last", "2", "--keep-every", "1000")
    told = json.loads(run(*options, "--json"))["checkpoint"]
    plan = make_plan(JOB, schedule=Schedule(every_s=1800, commit="background", keep_last=2, keep_every=1000))
    assert told["manners"]["background"]["iterations"] == plan.commit.manners["background"].iterations
    assert told["upkeep"]["every"] == int(1800 / plan.outlooks["ours"].forecast.iteration_s)
    text = run(*options)
    assert f"--signal=B:USR1@{plan.commit.lead_s}" in text
    assert "checkpoints of a node" in text
    assert "GB for 3, and" in text


def test_checkpoints_that_do_not_fit_are_exit_code_1():
    told = json.loads(run("--keep-last", "3", "--json", code=1))
    assert told["checkpoint"]["upkeep"]["fits"] is False
    assert any("3 checkpoints, the one in the making too" in text for text in told["problems"])


@pytest.mark.parametrize("options", [("--keep-every", "5"), ("--checkpoint-every", "5h"), ("--commit", "later")])
def test_wrong_usage_is_exit_code_2(options):
    run(*options, code=2)
