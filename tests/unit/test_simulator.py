"""The planner's simulator: its parts, what no schedule can beat, and every run whose times are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlpo_hpc.bench.predict import predict
from mlpo_hpc.engine import records
from mlpo_hpc.planner.clock import Clock
from mlpo_hpc.planner.drive import Drive
from mlpo_hpc.planner.machine import PlanTier
from mlpo_hpc.planner.model import find_model
from mlpo_hpc.planner.policy import MLP, OURS, PAPER, PART_ITEMS, ZERO3
from mlpo_hpc.planner.published import compare, facts
from mlpo_hpc.planner.simulate import Work, simulate, weights_of

ROOT = Path(__file__).parent.parent.parent
WITHIN = 0.1
TRUE_BILLIONS = {"paper-40b": 48.16, "paper-52b": 44.28, "paper-70b": 68.61, "paper-100b": 105.89, "paper-120b": 106.7}
LOCAL = PlanTier("nvme", 6e9, 5e9, full_duplex=False)
REMOTE = PlanTier("pfs", 3e9, 3e9, shared=True)
WORK = Work(10e9, 2, 16, 30e9, 0.5, 1.0, 1e10)


# ---- what is known ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published():
    return {(one.load, one.system): one for one in compare()}


@pytest.mark.parametrize("system", ["zero3", "mlp"])
@pytest.mark.parametrize("model", TRUE_BILLIONS)
def test_published_runs_are_predicted(published, model, system):
    one = published[model, system]
    assert abs(one.error("update_s")) < WITHIN
    assert abs(one.error("iteration_s")) < WITHIN


def test_all_published_runs_are_there(published):
    assert len(published) == 10
    for model, billions in TRUE_BILLIONS.items():
        assert find_model(model).numel / 1e9 == pytest.approx(billions, rel=1e-3)


def test_published_constants_are_one_set():
    known = facts()
    assert set(known["rows"]) == set(TRUE_BILLIONS)
    assert all(set(row) == {"zero3", "mlp"} for row in known["rows"].values()), "a row has no constants of its own"


BENCHMARK = predict((ROOT / "docs/bench/bench.json").read_text())


@pytest.mark.parametrize("one", BENCHMARK, ids=lambda one: f"{one.system}, {one.load}")
def test_our_benchmark_is_predicted(one):
    assert abs(one.error("update_s")) < WITHIN
    assert abs(one.error("iteration_s")) < WITHIN


def test_all_systems_of_our_benchmark_are_predicted():
    systems = {"nvme", "paper-1", "paper-2", "paper-3", "paper", "ours"}
    assert {(one.system, one.load) for one in BENCHMARK} == {
        (system, f"accumulation {count}") for system in systems for count in (1, 8)
    }


# ---- what must hold for any machine -------------------------------------------------------


@settings(deadline=None)
@given(
    policy=st.sampled_from([ZERO3, replace(ZERO3, gradients="update"), MLP, PAPER, OURS]),
    order=st.sampled_from(["sequential", "alternate"]),
    rates=st.lists(
        st.tuples(st.floats(0.2, 8), st.floats(0.2, 8), st.booleans(), st.floats(0.3, 1)), min_size=1, max_size=3
    ),
    ranks=st.integers(1, 3),
    num_subgroups=st.integers(1, 12),
    host_gb=st.floats(0, 150),
    passes_s=st.floats(0, 20),
)
def test_every_step_ends_and_reads_what_it_must(policy, order, rates, ranks, num_subgroups, host_gb, passes_s):
    tiers = [PlanTier(str(rate), 1e9 * rate[0], 1e9 * rate[1], *rate[2:]) for rate in rates]
    policy = replace(policy, order=order, working_records=3 if order == "sequential" else policy.working_records)
    work = Work(10e9, ranks, num_subgroups, 1e9 * host_gb, 0.0, passes_s, 1e10)
    forecast = simulate(policy, tiers, work)
    used = tiers[:1] if policy.shares == "first" else tiers
    # A chunk on each tier may be half read when the update begins.
    chunk_bytes = policy.read_bytes * work.items / ranks / num_subgroups / policy.chunks
    to_read_bytes = policy.read_bytes * work.items * (1 - forecast.found_share) - len(used) * chunk_bytes
    assert forecast.update_s > 0.999 * to_read_bytes / sum(tier.read_bps for tier in used)
    assert forecast.update_s > 0.999 * work.items / work.update_items_ps
    assert 0 <= forecast.found_share <= 1


def test_ours_is_near_its_floor():
    forecast = simulate(OURS, [LOCAL, REMOTE], WORK)
    assert 1 <= forecast.update_s / forecast.floor_s < 1.1


def test_what_fits_into_memory_is_not_moved():
    forecast = simulate(OURS, [LOCAL, REMOTE], replace(WORK, host_bytes=200e9))
    assert forecast.found_share == 1
    assert forecast.floor_s == 0
    assert forecast.update_s == pytest.approx(WORK.items / WORK.update_items_ps)
    assert all(sum(ways.values()) == 0 for ways in forecast.moved_bytes.values())


PART_BYTES = PART_ITEMS * 10
"""State of one part with codec ``split``."""


def test_scratch_is_that_of_one_part():
    """Four subgroups of four parts, 64 chunks; memory holds 40 of them beside gradient and weights of one part."""
    work = Work(16 * PART_ITEMS, 1, 4, 10 * PART_BYTES + 8 * PART_ITEMS, 0.0, 100.0, 1e10)
    assert simulate(OURS, [LOCAL], work).found_share == 40 / 64
    small = replace(work, items=PART_ITEMS, host_bytes=0.625 * PART_BYTES + 8 * PART_ITEMS / 4)
    assert simulate(OURS, [LOCAL], small).found_share == 40 / 64, "a subgroup smaller than a part is one"


@pytest.mark.parametrize(("early_share", "update_s"), [(0.0, 1 + 0.4 + 2), (0.8, 1 + 0.1 + 2), (1.0, 1 + 0.1 + 2)])
def test_what_a_part_completes_is_written_at_once(early_share, update_s):
    """One subgroup of four parts: read in 1 s, updated in 0.4 s, written in 2 s."""
    policy = replace(PAPER, keeps=False, across_steps=False, early_share=early_share)
    work = Work(4 * PART_ITEMS, 1, 1, 0.0, 0.0, 0.0, 10 * PART_ITEMS)
    tier = PlanTier("t", 12 * work.items, 6 * work.items)
    assert simulate(policy, [tier], work).update_s == pytest.approx(update_s)


def test_parts_are_those_of_the_engine():
    assert PART_ITEMS == records.PART_ITEMS


def written(policy, tiers, work=WORK):
    return sum(ways["write"] for ways in simulate(policy, tiers, work).moved_bytes.values())


def test_alternating_order_moves_less():
    sequential = replace(PAPER, order="sequential", working_records=3)
    assert written(PAPER, [LOCAL]) < written(sequential, [LOCAL]) <= 12 * WORK.items


def test_stock_offload_writes_gradients_too_and_reads_all():
    forecast = simulate(ZERO3, [LOCAL, REMOTE], WORK)
    assert forecast.moved_bytes["nvme"] == pytest.approx({"read": 16 * WORK.items, "write": 16 * WORK.items})
    assert forecast.moved_bytes["pfs"] == {"read": 0, "write": 0}
    assert forecast.backward_s == pytest.approx(4 * WORK.items / LOCAL.write_bps, rel=1e-6), "longer than computing"
    late = simulate(replace(ZERO3, gradients="update"), [LOCAL], WORK)
    assert late.backward_s == WORK.backward_s
    assert late.update_s > forecast.update_s


@pytest.mark.parametrize("policy", [ZERO3, MLP, OURS], ids=lambda policy: policy.name)
def test_half_duplex_takes_longer(policy):
    both = replace(LOCAL, full_duplex=True)
    assert simulate(policy, [LOCAL], WORK).update_s > 1.3 * simulate(policy, [both], WORK).update_s


def test_turns_pay_where_a_crowd_loses():
    crowded = replace(LOCAL, at_once=0.5)
    in_turns = simulate(PAPER, [crowded], WORK)
    assert in_turns.update_s == simulate(PAPER, [LOCAL], WORK).update_s
    assert simulate(replace(PAPER, permits=None), [crowded], WORK).update_s > 1.5 * in_turns.update_s


def test_permits_lie_between():
    crowded = PlanTier("t", 8.0, 4.0, at_once=0.4)
    assert [crowded.with_ranks(4, permits).read_bps for permits in (1, 2, 4, None)] == pytest.approx([8, 6.4, 3.2, 3.2])
    assert crowded.with_ranks(1, None) == crowded


def test_a_second_tier_takes_its_part():
    forecast = simulate(OURS, [LOCAL, REMOTE], WORK)
    shares = weights_of(OURS, [LOCAL, REMOTE])
    moved = [ways["write"] for ways in forecast.moved_bytes.values()]
    assert moved[0] / moved[1] == pytest.approx(shares[0] / shares[1], rel=0.1)
    assert forecast.update_s < 0.7 * simulate(OURS, [LOCAL], WORK).update_s


def test_ratios_are_whole_numbers():
    assert weights_of(MLP, [replace(REMOTE, read_bps=8e9, write_bps=8e9), REMOTE]) == [3, 1]
    assert weights_of(replace(MLP, ratio=(2.0, 1.0)), [LOCAL, REMOTE]) == [2, 1]
    assert weights_of(ZERO3, [LOCAL, REMOTE]) == [1, 0]


# ---- its parts ----------------------------------------------------------------------------


def test_a_half_duplex_drive_alternates():
    clock, ends = Clock(), []
    drive = Drive(clock, PlanTier("t", 2.0, 1.0, full_duplex=False))

    def ask():
        for number in range(2):
            for way in ("read", "write"):
                drive.submit(way, 2.0, lambda what=(way, number): ends.append((*what, clock.now_s)))
        yield lambda: len(ends) == 4

    clock.start(ask())
    clock.run()
    assert ends == [("read", 0, 1), ("write", 0, 3), ("read", 1, 4), ("write", 1, 6)]
    assert drive.moved_bytes == {"read": 4, "write": 4}


def test_waiting_for_what_cannot_happen_is_an_error():
    clock = Clock()

    def wait():
        yield 1.0
        yield lambda: False

    clock.start(wait())
    with pytest.raises(RuntimeError, match="1 simulated processes wait"):
        clock.run()
    assert clock.now_s == 1
