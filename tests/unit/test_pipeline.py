"""The pipeline against an oracle: random sizes, budgets, orders and delays; failures; liveness."""

from __future__ import annotations

import mmap
import threading
import time
import weakref
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlpo_hpc.errors import CorruptState, MlpoError, StorageError, StorageTimeout, TierFull
from mlpo_hpc.state import cache
from mlpo_hpc.state.cache import Pool, keep_suffix, step_order
from mlpo_hpc.state.layout import lay_out, least_host_bytes
from mlpo_hpc.state.pipeline import Phase, Pipeline
from mlpo_hpc.state.placement import Placement
from mlpo_hpc.state.table import Record, Table
from mlpo_hpc.storage.tier import StorageTier
from mlpo_hpc.tokens.base import Turn
from tests.containers import MemoryContainer

BLOCK = 4096


def make(
    sizes, num_tiers=2, budget=None, chunk=BLOCK, delay_s=0.0, reserve=0, prefetch=None, timeout_s=60.0, begin=None
):
    """A pipeline over stand-in tiers, laid out as for real for the largest sizes; records may begin smaller."""
    layout = lay_out(sizes, chunk, [1.0] * num_tiers, [2**40] * num_tiers) if num_tiers else None
    tiers = [
        StorageTier(f"t{i}", MemoryContainer(layout.slots[i], layout.chunk_bytes, delay_s, seed=i))
        for i in range(num_tiers)
    ]
    begin = begin or sizes
    records = [Record(f"subgroup {i}", begin[i], most_bytes=size) for i, size in enumerate(sizes)]
    table = Table(records, layout.chunk_bytes if layout else chunk)
    pool = Pool(budget or least_host_bytes(sizes, 0, have_tiers=bool(num_tiers)))
    pipeline = Pipeline(table, pool, tiers, Placement([1.0] * num_tiers), reserve, prefetch, timeout_s)
    made.append(pipeline)
    return pipeline


made: list[Pipeline] = []


@pytest.fixture(autouse=True)
def nothing_is_left_for_the_next_test():
    """A test that fails before it closes its pipeline would leave threads that the next one counts."""
    yield
    while made:
        with suppress(StorageError):  # what a test made fail is raised by its own close
            made.pop().close()


def fill(pipeline, order):
    """First state: each record is full of its subgroup's number."""
    pipeline.plan(list(reversed(order)))
    for subgroup in reversed(order):
        view = pipeline.create(subgroup)
        np.frombuffer(view, np.uint8)[:] = subgroup % 251
        pipeline.put(subgroup)


def step(pipeline, order, following=None, sizes=None, early_blocks=0, in_peace=False):
    """One update: every byte grows by one; records may get other sizes. In peace: I/O ends before the next turn."""
    pipeline.begin(order, following)
    for subgroup in order:
        array = np.frombuffer(pipeline.get(subgroup), np.uint8)
        assert (array == array[0]).all(), f"record {subgroup} is a mixture"
        value = array[0]
        size = len(array) if sizes is None else sizes[subgroup]
        early, common = early_blocks * BLOCK, min(len(array), size)
        early = min(early, common)
        array[:early] += 1
        pipeline.put_parts(subgroup, [slice(0, early)])
        if sizes is not None:
            array = np.frombuffer(pipeline.resize(subgroup, size), np.uint8)
            assert (array[early:common] == value).all(), "what both sizes have in common stays"
        array[early:] = value + 1
        pipeline.put(subgroup)
        if in_peace:
            pipeline.flush()


def values(pipeline):
    """Each record's byte, read between steps."""
    found = []
    for subgroup in range(len(pipeline.table)):
        array = np.frombuffer(pipeline.get(subgroup), np.uint8)
        assert (array == array[0]).all()
        found.append(int(array[0]))
        pipeline.put(subgroup, dirty=False)
    return found


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    blocks=st.lists(st.integers(1, 5), min_size=1, max_size=9),
    extra=st.integers(0, 40),
    num_tiers=st.integers(1, 3),
    chunk_blocks=st.integers(1, 4),
    policy=st.sampled_from(["alternate", "sequential"]),
    prefetch=st.sampled_from([None, 0, 1, 2]),
    skips=st.lists(st.booleans(), min_size=4, max_size=4),
    looks=st.lists(st.integers(0, 8), max_size=4),
    shrinks=st.lists(st.integers(0, 4), min_size=9, max_size=9),
    early_blocks=st.integers(0, 4),
)
def test_no_state_is_lost_whatever_the_sizes_orders_and_budgets(
    blocks, extra, num_tiers, chunk_blocks, policy, prefetch, skips, looks, shrinks, early_blocks
):
    sizes = [n * BLOCK for n in blocks]
    budget = least_host_bytes(sizes, 0, True) + extra * BLOCK
    reserve = 0 if policy == "alternate" else 2 * max(sizes)
    smaller = [max(1, n - less) * BLOCK for n, less in zip(blocks, shrinks, strict=False)]
    pipeline = make(sizes, num_tiers, budget, chunk_blocks * BLOCK, 0.0005, reserve, prefetch, begin=smaller)
    n, flipped, steps = len(sizes), False, 0
    try:
        fill(pipeline, step_order(n, policy, flipped))
        for skipped in skips:
            for look in looks:  # as safe_get_* does between steps
                subgroup = look % n
                assert pipeline.get(subgroup)[0] == (subgroup + steps) % 256
                pipeline.put(subgroup, dirty=False)
            if not skipped:  # an overflow skip touches nothing
                now = sizes if steps % 2 else smaller
                step(
                    pipeline,
                    step_order(n, policy, flipped),
                    step_order(n, policy, not flipped),
                    now,
                    early_blocks,
                )
                flipped, steps = not flipped, steps + 1
        assert values(pipeline) == [(s + steps) % 256 for s in range(n)]
        assert pipeline.pool.peak_bytes <= budget
        pipeline.flush()
        assert pipeline.resident_bytes() == pipeline.pool.used_bytes
        assert sum(tier.container.changed_in_flight for tier in pipeline.tiers) == 0
    finally:
        pipeline.close()


def test_alternating_order_finds_what_the_last_step_kept_and_moves_nothing_of_it():
    sizes = [BLOCK] * 10
    pipeline = make(sizes, budget=4 * BLOCK)
    fill(pipeline, list(range(10)))
    for number in range(1, 5):
        before = pipeline.counts.hits, sum(t.container.counts["read"] for t in pipeline.tiers)
        written = sum(t.container.counts["write"] for t in pipeline.tiers)
        order = step_order(10, "alternate", number % 2 == 0)
        step(pipeline, order)
        pipeline.flush()
        assert pipeline.counts.hits - before[0] == 4
        assert sum(t.container.counts["read"] for t in pipeline.tiers) - before[1] == 6
        assert sum(t.container.counts["write"] for t in pipeline.tiers) - written == 6
    pipeline.close()


def test_host_memory_alone_is_ordinary():
    sizes = [BLOCK, 3 * BLOCK, 2 * BLOCK]
    pipeline = make(sizes, num_tiers=0)
    fill(pipeline, [0, 1, 2])
    step(pipeline, [0, 1, 2])
    step(pipeline, [2, 1, 0])
    assert values(pipeline) == [2, 3, 4]
    assert pipeline.counts.misses == 0
    pipeline.close()


def test_a_change_between_steps_is_seen_by_the_next_step_although_it_was_prefetched_before():
    pipeline = make([BLOCK] * 6, budget=6 * BLOCK)
    fill(pipeline, list(range(6)))
    step(pipeline, list(range(6)))
    for subgroup in range(6):
        np.frombuffer(pipeline.get(subgroup), np.uint8)[:] = 100 + subgroup
        pipeline.put(subgroup, dirty=True)
    step(pipeline, list(reversed(range(6))))
    assert values(pipeline) == [101, 102, 103, 104, 105, 106]
    pipeline.close()


def test_prefetch_never_takes_the_last_buffer():
    """With memory for two, the step ends although everything is read ahead as far as memory goes."""
    pipeline = make([BLOCK] * 20, budget=2 * BLOCK, delay_s=0.002)
    fill(pipeline, list(range(20)))
    step(pipeline, list(range(20)))
    step(pipeline, list(range(20)))  # the same order again: its head is not in host memory
    assert pipeline.pool.peak_bytes <= 2 * BLOCK
    pipeline.close()


def test_memory_too_small_for_a_whole_record_more_is_used_by_chunks():
    """Four chunks a record, memory for two records and a half: the half is found in the next step too.

    In peace, for a chunk of the half may have to leave for one that is still being written, and come back.
    """
    sizes = [4 * BLOCK] * 8
    pipeline = make(sizes, budget=10 * BLOCK)
    fill(pipeline, list(range(8)))
    step(pipeline, step_order(8, "alternate", True), in_peace=True)
    for number in range(1, 4):
        order = step_order(8, "alternate", number % 2 == 0)
        before = sum(tier.container.counts["read"] for tier in pipeline.tiers)
        assert pipeline.resident_bytes() == 10 * BLOCK
        step(pipeline, order, in_peace=True)
        assert sum(tier.container.counts["read"] for tier in pipeline.tiers) - before == 32 - 10
    pipeline.close()


def test_the_next_step_s_head_is_read_while_this_one_ends():
    """No fill: with one order again and again, the working buffers hold its head before the step begins."""
    pipeline = make([BLOCK] * 12, budget=4 * BLOCK, reserve=3 * BLOCK)
    order = list(range(12))
    fill(pipeline, order)
    for _ in range(3):
        step(pipeline, order, order)
        pipeline.flush()
        found = [s for s, resident in pipeline._residents.items() if resident.phase is Phase.HOST]
        assert sorted(found) == [0, 1, 2, 11]
    pipeline.close()


def test_waiting_for_writes_that_do_not_exist_returns_at_once():
    """https://github.com/deepspeedai/DeepSpeed/issues/7703"""
    pipeline = make([BLOCK] * 3)
    pipeline.flush()
    fill(pipeline, [0, 1, 2])
    pipeline.flush()
    pipeline.flush()
    assert Phase.WRITING not in {resident.phase for resident in pipeline._residents.values()}
    pipeline.close()
    pipeline.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("mlpo-")]


@pytest.mark.parametrize("way", ["read", "write"])
def test_a_failed_transfer_is_raised_in_the_main_thread_and_stays(way):
    pipeline = make([BLOCK] * 8, budget=3 * BLOCK)
    fill(pipeline, list(range(8)))
    error = StorageError("the drive is on fire")
    for tier in pipeline.tiers:
        tier.container.fail_at[way] = (tier.container.counts[way] + 2, error)
    with pytest.raises(StorageError, match="on fire"):
        for _ in range(3):
            step(pipeline, list(range(8)))
    with pytest.raises(StorageError, match="on fire"):
        pipeline.check()
    with pytest.raises(StorageError, match="on fire"):
        pipeline.get(0)
    pipeline.close()


def test_altered_state_is_found_at_the_next_read_and_named():
    pipeline = make([BLOCK] * 6, budget=2 * BLOCK)
    fill(pipeline, list(range(6)))
    pipeline.flush()
    stored = pipeline.tiers[0].container.stored
    slot = min(stored)
    stored[slot] = b"\x01" + stored[slot][1:]
    with pytest.raises(CorruptState, match=rf"subgroup \d read from slot {slot}"):
        step(pipeline, list(reversed(range(6))))
        step(pipeline, list(range(6)))
    pipeline.close()


def test_a_silent_tier_ends_the_wait_with_its_name():
    class Silent(MemoryContainer):
        def _read(self, offset, view):
            released.wait(20)

    released = threading.Event()
    pipeline = make([BLOCK] * 4, budget=2 * BLOCK, timeout_s=0.3)
    fill(pipeline, list(range(4)))
    pipeline.flush()
    for tier in pipeline.tiers:
        tier.container.__class__ = Silent
    with pytest.raises(StorageTimeout, match="subgroup"):
        step(pipeline, [3, 2, 1, 0])
    released.set()
    pipeline.close()


def test_use_after_close_and_double_use_are_errors():
    pipeline = make([BLOCK] * 3)
    fill(pipeline, [0, 1, 2])
    pipeline.get(1)
    with pytest.raises(RuntimeError, match="in use"):
        pipeline.get(1)
    pipeline.close()
    with pytest.raises(MlpoError, match="closed"):
        pipeline.get(0)


def test_closing_with_transfers_in_flight_leaves_no_thread():
    pipeline = make([BLOCK] * 12, budget=3 * BLOCK, delay_s=0.02)
    fill(pipeline, list(range(12)))
    pipeline.begin(list(range(12)))
    pipeline.get(0)
    pipeline.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("mlpo-")]


def test_a_file_that_cannot_be_closed_is_said_and_the_others_are_closed():
    pipeline = make([BLOCK] * 3)
    closed = []

    def fail():
        raise StorageError("closing the state file failed")

    pipeline.tiers[0].container.close = lambda: closed.append(0)
    pipeline.tiers[1].container.close = fail
    with pytest.raises(StorageError, match="closing"):
        pipeline.close()
    assert closed == [0]
    assert not [t for t in threading.enumerate() if t.name.startswith("mlpo-")]


def test_slots_are_never_shared_and_never_lost():
    pipeline = make([2 * BLOCK] * 7, budget=4 * BLOCK)
    fill(pipeline, list(range(7)))
    for number in range(6):
        step(pipeline, step_order(7, "alternate", number % 2 == 1))
    pipeline.flush()
    used = [(c.tier, c.slot) for record in pipeline.table.records for c in record.chunks]
    assert len(set(used)) == len(used)
    for index, tier in enumerate(pipeline.tiers):
        held = sum(t == index for t, _ in used)
        assert held + len(tier.slots) == tier.container.num_slots
    pipeline.close()


def test_residents_end_in_host_memory_or_nowhere():
    pipeline = make([BLOCK] * 9, budget=3 * BLOCK)
    fill(pipeline, list(range(9)))
    step(pipeline, list(range(9)))
    pipeline.flush()
    assert {resident.phase for resident in pipeline._residents.values()} == {Phase.HOST}
    assert set(pipeline._residents) == keep_suffix(list(range(9)), [BLOCK] * 9, 3 * BLOCK)
    pipeline.close()


def test_tiers_without_room_are_refused_at_layout():
    with pytest.raises(TierFull, match="room"):
        lay_out([10 * BLOCK], BLOCK, [1.0, 1.0], [5 * BLOCK, 5 * BLOCK])


def test_tokens_are_taken_by_io_threads_alone_and_held_only_while_bytes_move(monkeypatch):
    """Buffer, slot and budget are in hand before; nothing else is waited for under a token."""
    holding: set[int] = set()  # threads inside a turn
    stock_enter, stock_leave, stock_take = Turn.enter, Turn.leave, cache.Pool.take

    def enter(self):
        assert threading.current_thread().name.startswith("mlpo-")
        holding.add(threading.get_ident())
        return stock_enter(self)

    def leave(self):
        holding.discard(threading.get_ident())
        stock_leave(self)

    def take(self, nbytes):
        assert threading.get_ident() not in holding, "memory is asked for under a token"
        return stock_take(self, nbytes)

    monkeypatch.setattr(Turn, "enter", enter)
    monkeypatch.setattr(Turn, "leave", leave)
    monkeypatch.setattr(cache.Pool, "take", take)
    moved = []

    class Container(MemoryContainer):
        def _note(self, way):
            moved.append(threading.get_ident() in holding)
            super()._note(way)

    tiers = [StorageTier("t0", Container(20, BLOCK))]
    records = [Record(f"subgroup {i}", BLOCK) for i in range(8)]
    pipeline = Pipeline(Table(records, BLOCK), Pool(3 * BLOCK), tiers, Placement([1.0]))
    fill(pipeline, list(range(8)))
    step(pipeline, list(range(8)))
    step(pipeline, list(reversed(range(8))))
    pipeline.flush()
    assert len(moved) > 20
    assert all(moved)
    pipeline.close()


def test_memory_really_goes_back_although_sizes_differ(monkeypatch):
    """The budget counts what is mapped: an idle I/O thread must not keep its last buffer."""
    live = weakref.WeakSet()

    class Counted(mmap.mmap):
        def __new__(cls, *args, **kwargs):
            made = super().__new__(cls, *args, **kwargs)
            live.add(made)
            return made

    monkeypatch.setattr(cache.mmap, "mmap", Counted)
    sizes = [n * BLOCK for n in (1, 9, 2, 8, 3, 7, 4, 6, 5)]
    pipeline = make(sizes, num_tiers=1, budget=20 * BLOCK, chunk=32 * BLOCK)
    fill(pipeline, list(range(9)))
    for number in range(4):
        step(pipeline, step_order(9, "alternate", number % 2 == 1))
    pipeline.flush()
    deadline = time.monotonic() + 5  # the thread that reported last may still be on its way to the queue
    while sum(map(len, live)) > 20 * BLOCK and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sum(map(len, live)) <= 20 * BLOCK
    pipeline.close()


def test_memory_that_cannot_be_had_in_an_io_thread_is_heard_in_the_main_thread(monkeypatch):
    pipeline = make([BLOCK, 2 * BLOCK, 3 * BLOCK] * 4, budget=6 * BLOCK, delay_s=0.002)
    fill(pipeline, list(range(12)))

    def refuse(nbytes):
        if threading.current_thread() is threading.main_thread():
            return allocate(nbytes)
        raise MemoryError("no more memory")

    allocate = cache.Buffer
    monkeypatch.setattr(cache, "Buffer", refuse)
    with pytest.raises(MemoryError, match="no more"):
        for number in range(4):
            step(pipeline, step_order(12, "alternate", number % 2 == 1))
    pipeline.close()
