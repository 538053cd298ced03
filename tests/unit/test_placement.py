"""Placement, layout, order and cache: pure functions."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlpo_hpc.state.cache import Pool, keep_suffix, step_order
from mlpo_hpc.state.codec.fp32 import record_bytes
from mlpo_hpc.state.layout import choose_subgroup_size, count_subgroups, lay_out, least_host_bytes, pick_chunk_bytes
from mlpo_hpc.state.placement import MOST_KEPT_STEPS, Adaptive, choose, divide_slots
from mlpo_hpc.state.table import cuts
from mlpo_hpc.telemetry import metrics

weights_st = st.lists(st.floats(0.01, 100), min_size=1, max_size=5)


@given(weights=weights_st, count=st.integers(1, 300))
def test_chunks_follow_the_weights(weights, count):
    placed = [0] * len(weights)
    for _ in range(count):
        tier = choose(weights, placed, [10**6] * len(weights), 100)
        placed[tier] += 100
    for tier, weight in enumerate(weights):
        fair = 100 * count * weight / sum(weights)
        assert abs(placed[tier] - fair) <= 100 * len(weights)


def test_the_paper_s_two_to_one():
    placed, got = [0, 0], []
    for _ in range(6):
        tier = choose([2, 1], placed, [9, 9], 1)
        placed[tier] += 1
        got.append(tier)
    assert got.count(0) == 4
    assert choose([2, 1], [0, 0], [0, 9], 1) == 1, "a full tier is passed over"
    assert choose([2, 1], [0, 0], [0, 0], 1) is None
    assert choose([1, 0], [10, 0], [9, 9], 1) == 0, "weight 0: only when no other has room"


class Tier:
    """What placement asks a tier for."""

    def __init__(self, bps):
        self.bps = bps
        self.steps = 0
        self.new = False
        self.writes = SimpleNamespace(meter=SimpleNamespace(backlog_bytes=0))

    def begin_step(self, is_new):
        self.steps += 1
        self.new = is_new

    def recent_bps(self):
        return self.bps


def shares(placement, tiers, count=300):
    placement.begin()
    picked = [placement.pick([10**6] * len(tiers), 100) for _ in range(count)]
    return [picked.count(number) / count for number in range(len(tiers))]


def test_adaptive_placement_follows_what_the_tiers_give():
    tiers = [Tier(None), Tier(None), Tier(None)]
    placement = Adaptive([200.0, 100.0, 100.0], tiers)
    assert shares(placement, tiers) == pytest.approx([0.5, 0.25, 0.25], abs=0.01), "as measured, to begin with"
    for tier, bps in zip(tiers, (100.0, 200.0, 100.0), strict=True):
        tier.bps = bps
    assert shares(placement, tiers) == pytest.approx([0.25, 0.5, 0.25], abs=0.01)
    tiers[1].bps = 50.0  # in the middle of a step: what it was given already counts at its new rate
    assert [placement.pick([9, 9, 9], 100) for _ in range(10)].count(1) == 0
    assert [tier.steps for tier in tiers] == [2, 2, 2], "each step is told to them"


def test_adaptive_placement_reckons_with_what_is_still_queued():
    tiers = [Tier(100.0), Tier(100.0)]
    placement = Adaptive([1.0, 1.0], tiers)
    tiers[0].writes.meter.backlog_bytes = 500
    placement.begin()
    assert [placement.pick([9, 9], 100) for _ in range(6)] == [1, 1, 1, 1, 1, 0]
    assert placement.pick([9, 0], 100) == 0, "a full tier is passed over"
    assert placement.pick([0, 0], 100) is None


def test_what_moves_beside_a_save_does_not_change_the_shares_until_a_step_without_it_has_been():
    tiers = [Tier(200.0), Tier(100.0)]
    placement = Adaptive([1.0, 1.0], tiers)
    placement.begin()
    tiers[0].writes.meter.backlog_bytes = 500  # of the save
    for bps in (100.0, 50.0, 400.0):
        placement.begin(beside_save=True)
        assert placement.weights == [200.0, 100.0]
        assert placement.pick([9, 9], 100) == 0, "what is queued is soon gone"
        tiers[0].bps = bps
    assert not any(tier.new for tier in tiers)
    placement.begin()
    assert placement.weights == [200.0, 100.0]
    assert all(tier.new for tier in tiers), "from here on they are looked at anew"
    tiers[0].bps = 150.0
    placement.begin()
    assert placement.weights == [150.0, 100.0]
    assert not any(tier.new for tier in tiers)
    placement.begin(beside_save=True)
    assert placement.weights == pytest.approx([(200 + 200 + 150 + 150) / 4, 100.0]), "of several steps"


def test_after_a_save_what_is_not_known_yet_is_as_before_it():
    """Few chunks a step, or a save that ended just when it was to be looked again."""
    tiers = [Tier(100.0), Tier(10.0)]
    placement = Adaptive([100.0, 100.0], tiers)
    placement.begin()
    placement.begin(beside_save=True)
    for tier in tiers:
        tier.bps = None
    for _ in range(3):
        placement.begin()
        assert placement.weights == [100.0, 10.0]
    for _ in range(2 * MOST_KEPT_STEPS):
        placement.begin(beside_save=True)
        assert placement.weights == [100.0, 10.0]
    tiers[0].bps, tiers[1].bps = 60.0, 10.0
    placement.begin(beside_save=True)
    assert placement.weights == [60.0, 10.0]
    placement.begin()  # before any more was moved
    for tier in tiers:
        tier.bps = None
    assert placement.weights == [60.0, 10.0]


def test_where_every_step_is_beside_a_save_it_is_looked_again_now_and_then():
    tiers = [Tier(200.0), Tier(100.0)]
    placement = Adaptive([1.0, 1.0], tiers)
    placement.begin(beside_save=True)
    tiers[0].bps = 50.0
    found = []
    for _ in range(2 * MOST_KEPT_STEPS):
        placement.begin(beside_save=True)
        found.append(placement.weights[0])
    assert found == [200.0] * (MOST_KEPT_STEPS - 1) + [50.0] * (MOST_KEPT_STEPS + 1)


def test_a_rate_is_that_of_two_steps_while_there_were_any_to_move(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    meter = metrics.Meter()

    def serve(wait_s, move_s):
        with meter.serving(1000):
            now[0] += wait_s
            with meter.moving(1000):
                now[0] += move_s
        now[0] += 10.0  # nothing to do

    def step(wait_s, count=metrics.LEAST_CHUNKS):
        meter.begin_step()
        for _ in range(count):
            serve(wait_s, 1.0)
        return meter.recent_bps()

    assert step(0.0, 1) is None, "too few to tell"
    assert step(0.0) == pytest.approx(1000.0)
    assert step(0.0) == pytest.approx(1000.0)
    assert step(1.0) == pytest.approx(1000.0 * 2 / 3), "waiting for a turn is time too"
    assert step(1.0) == pytest.approx(500.0), "what was before the last step does not count any more"
    for _ in range(metrics.LEAST_CHUNKS - 2):
        assert step(0.0, 1) > 500.0, "with few chunks a step it takes more of them"
    meter.begin_step(is_new=True)
    assert meter.recent_bps() is None, "nothing before it counts"
    meter.asked(70_000_000)
    assert meter.backlog_bytes == 70_000_000 - 1000 * (5 * metrics.LEAST_CHUNKS - 1)


@given(count=st.integers(1, 10**6), weights=weights_st, data=st.data())
def test_slots_are_divided_within_the_limits(count, weights, data):
    limits = data.draw(st.lists(st.integers(0, 10**6), min_size=len(weights), max_size=len(weights)))
    slots = divide_slots(count, weights, limits)
    if sum(limits) < count:
        assert slots is None
        return
    assert sum(slots) >= count
    assert all(0 <= have <= limit for have, limit in zip(slots, limits, strict=True))
    assert sum(slots) <= count + len(weights) ** 2


@given(sizes=st.lists(st.integers(1, 10**9), min_size=1, max_size=40), capacity=st.integers(0, 10**10))
def test_what_is_kept_is_the_longest_tail_that_fits(sizes, capacity):
    order = list(range(len(sizes)))
    kept = keep_suffix(order, sizes, capacity)
    assert kept == set(order[len(order) - len(kept) :])
    assert sum(sizes[s] for s in kept) <= capacity
    if len(kept) < len(order):
        assert sum(sizes[s] for s in kept) + sizes[order[-1 - len(kept)]] > capacity


def test_orders():
    assert step_order(4, "alternate", False) == [0, 1, 2, 3]
    assert step_order(4, "alternate", True) == [3, 2, 1, 0]
    assert step_order(4, "sequential", True) == [0, 1, 2, 3]


@given(requests=st.lists(st.tuples(st.integers(1, 20), st.booleans()), max_size=60), budget=st.integers(1, 60))
def test_the_pool_never_exceeds_its_budget(requests, budget):
    pool = Pool(budget)
    held = []
    for nbytes, give_back in requests:
        fits = sum(held) + nbytes <= budget
        assert pool.take(nbytes) == fits, "it says no only if what is in use does not leave room"
        if fits:
            held.append(nbytes)
        if give_back and held:
            pool.give(held.pop(0))
        assert pool.used_bytes == sum(held) == budget - pool.free_bytes
    assert pool.peak_bytes <= budget


def test_what_a_buffer_discards_takes_no_memory_any_more():
    buffer = Pool(0).reserve(8 * 4096)
    view = buffer.view(8 * 4096)
    view[:] = b"x" * len(view)
    buffer.discard(slice(4096, 3 * 4096))
    assert bytes(view) == b"x" * 4096 + bytes(2 * 4096) + b"x" * 5 * 4096


@given(numel=st.integers(1, 10**7), vectors=st.integers(1, 5))
def test_records_are_exact_but_for_alignment(numel, vectors):
    nbytes = record_bytes(numel, vectors)
    assert nbytes % 4096 == 0
    assert 0 <= nbytes - 4 * numel * vectors < 4096 + 64 * vectors


@given(nbytes=st.integers(1, 1000), chunk=st.integers(1, 100))
def test_cuts_cover_a_record_once(nbytes, chunk):
    pieces = cuts(nbytes, chunk)
    assert pieces[0].start == 0
    assert pieces[-1].stop == nbytes
    assert all(a.stop == b.start for a, b in itertools.pairwise(pieces))
    assert len(pieces) == math.ceil(nbytes / chunk)


@given(sizes=st.lists(st.integers(1, 500), min_size=1, max_size=30), chunk=st.integers(1, 64), tiers=st.integers(1, 3))
def test_a_layout_has_room_for_all_and_for_copies_in_flight(sizes, chunk, tiers):
    sizes = [size * 4096 for size in sizes]
    layout = lay_out(sizes, chunk * 4096, [1.0] * tiers, [2**50] * tiers)
    chunks = [len(cuts(size, layout.chunk_bytes)) for size in sizes]
    assert sum(layout.slots) >= sum(chunks) + 2 * max(chunks)
    assert layout.chunk_bytes <= chunk * 4096


def test_chunks_are_small_enough_to_share_and_large_enough_for_bandwidth():
    assert pick_chunk_bytes([64 * 2**20], 64 * 2**20) == 4 * 2**20
    assert pick_chunk_bytes([2**20], 64 * 2**20) == 2**20
    assert pick_chunk_bytes([1600 * 2**20], 64 * 2**20) == 64 * 2**20
    assert pick_chunk_bytes([600 * 2**20], 5000) == 4096


def test_the_smallest_budget_is_at_most_two_of_the_largest_state_and_gradient():
    sizes, gradient = [record_bytes(n, 3) for n in (1000, 5000, 200)], 4 * 5000
    assert least_host_bytes(sizes, gradient, have_tiers=True) <= 2 * (max(sizes) + gradient + 4096)
    assert least_host_bytes(sizes, gradient, have_tiers=False) >= sum(sizes) + gradient


def subgroups_of_deepspeed(numels, size):
    """The loop of DeepSpeed's `_create_fp16_sub_groups`."""
    if size >= sum(numels):
        return 1
    count, held = 0, 0
    for index, numel in enumerate(numels):
        held += numel
        if held >= size or index == len(numels) - 1:
            count, held = count + 1, 0
    return count


@given(
    groups=st.lists(st.lists(st.integers(1, 10**5), min_size=1, max_size=60), min_size=1, max_size=3),
    share=st.integers(10**3, 10**9),
)
def test_the_chosen_subgroup_size_makes_sixteen_where_parameters_allow(groups, share):
    size = choose_subgroup_size(groups, share)
    assert size >= 1
    count = sum(subgroups_of_deepspeed(group, size) for group in groups)
    assert count == count_subgroups(groups, size)
    assert count >= min(16, sum(map(len, groups)))


def test_a_bad_table_size_is_refused():
    with pytest.raises(ValueError, match="multiple"):
        from tests.containers import MemoryContainer

        MemoryContainer(1, 100)
