"""The state of one moment, held while updates go on: slots, files one after the other, traffic that can wait."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlpo_hpc.cluster.node import Node
from mlpo_hpc.errors import StorageError
from mlpo_hpc.state.cache import Buffer, step_order
from mlpo_hpc.state.layout import lay_out, least_host_bytes
from mlpo_hpc.state.links import Succession, link_files
from mlpo_hpc.storage.base import Slots
from mlpo_hpc.storage.generations import Generations
from mlpo_hpc.storage.pace import Pace
from mlpo_hpc.storage.posix import PosixFile, open_raw
from mlpo_hpc.storage.tier import StorageTier
from tests.containers import MemoryContainer
from tests.unit.test_pipeline import BLOCK, fill, make, step, values


def test_a_slot_that_is_held_is_not_taken_again_before_it_is_given_back_and_released():
    slots = Slots(2)
    taken = slots.take()
    slots.hold(taken)
    slots.give(taken)
    assert len(slots) == 1
    slots.release(taken)
    assert (len(slots), slots.take()) == (2, taken)


def test_a_generation_is_over_when_nothing_of_it_is_in_use():
    emptied = []
    slots = Slots(3, emptied.append)
    first, second = slots.take(), slots.take()
    pinned = slots.pin()
    slots.renew()
    assert slots.take() == 3, "of the next generation"
    slots.give(first)
    slots.hold(second)
    slots.give(second)
    slots.unpin(pinned)
    assert (emptied, len(slots)) == ([], 2)
    slots.release(second)
    assert emptied == [0]
    slots.renew()
    slots.give(3)
    assert emptied == [0, 1]


def test_files_follow_each_other_and_are_closed_when_they_are_not_wanted(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    tier = StorageTier("t", Generations(open_raw(str(tmp_path), BLOCK, 4)))
    view, other, found = (Buffer(BLOCK).view(BLOCK) for _ in range(3))
    view[:], other[:] = b"7" * BLOCK, b"9" * BLOCK
    slot = tier.slots.take()
    tier.writes.move(slot, view, "x", None).wait()
    member = tier.container.member(0)
    assert member.transport.link(str(folder / "sealed"))
    tier.succeed(open_raw(str(tmp_path), BLOCK, 4))
    later = tier.slots.take()
    tier.writes.move(later, other, "x", None).wait()
    tier.reads.move(slot, found, "x", None).wait()
    assert found == view
    member.punch(1, 0)
    tier.slots.give(slot)
    with pytest.raises(KeyError):
        tier.container.member(0)
    tier.close()
    with open(folder / "sealed", "rb") as file:
        assert file.read(BLOCK) == bytes(view)
    assert os.stat(folder / "sealed").st_mode & 0o777 == 0o600


@pytest.fixture
def follow(tmp_path):
    """A tier whose files follow each other, and what makes the last one a part of a checkpoint of this name."""
    tier = StorageTier("t", Generations(open_raw(str(tmp_path), BLOCK, 4)))
    succession = Succession(0, tier, False, lambda: open_raw(str(tmp_path), BLOCK, 4))

    def link(name):
        (tmp_path / name).mkdir(parents=True)
        files = link_files([succession], Node("here", 0, 1, 0, 1), tmp_path / name, "0000000a", "saving failed")
        tier.slots.pin()  # as a seal does
        for file in files.values():
            tier.succeed(file.following)
        return files

    yield succession, link
    tier.close()


def test_a_file_is_named_at_once_where_that_was_not_tried_and_later_by_who_saves(follow):
    _, link = follow
    first, second, elsewhere = (link(name)["t"] for name in ("a/one", "a/two", "b/one"))
    assert [file.path.exists() for file in (first, second, elsewhere)] == [True, False, True]
    for file in (first, second, elsewhere, second):
        file.give_name()
        assert os.path.samestat(os.stat(file.path), os.fstat(file.sealed.transport.fd))


def test_where_files_cannot_be_named_any_more_the_next_save_copies(follow, monkeypatch):
    succession, link = follow
    link("a/one")
    file = link("a/two")["t"]
    monkeypatch.setattr(PosixFile, "link", lambda self, path: False)
    with pytest.raises(StorageError, match="cannot be named there any more"):
        file.give_name()
    assert not succession.proven
    assert link("a/three") == {}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    blocks=st.lists(st.integers(1, 5), min_size=1, max_size=8),
    extra=st.integers(0, 30),
    num_tiers=st.integers(0, 3),
    policy=st.sampled_from(["alternate", "sequential"]),
    before=st.integers(0, 3),
    during=st.integers(1, 3),
    write_back=st.booleans(),
)
def test_a_seal_has_the_state_of_its_moment_whatever_is_updated_meanwhile(
    blocks, extra, num_tiers, policy, before, during, write_back
):
    """A reader takes its time; updates go on, with no more slots than there are: they wait where they must."""
    sizes = [n * BLOCK for n in blocks]
    budget = sum(sizes) if not num_tiers else least_host_bytes(sizes, 0, True) + extra * BLOCK
    pipeline = make(sizes, num_tiers, budget, BLOCK, 0.0003)
    n, steps = len(sizes), 0
    try:
        fill(pipeline, step_order(n, policy, False))
        for _ in range(before):
            step(pipeline, step_order(n, policy, steps % 2 == 1), step_order(n, policy, steps % 2 == 0))
            steps += 1
        free = [len(tier.slots) for tier in pipeline.tiers]
        seal = pipeline.seal(write_back)
        safe, found = [threading.Event() for _ in sizes], {}

        def read():
            for subgroup in range(n):
                if subgroup in seal.memory:
                    found[subgroup] = bytes(seal.memory[subgroup])
                    safe[subgroup].set()
            for subgroup in range(n):
                if subgroup not in seal.memory:
                    parts = []
                    for chunk in seal.chunks(subgroup):
                        buffer = np.zeros(BLOCK, np.uint8)
                        pipeline.tiers[chunk.tier].reads.move(
                            chunk.slot, memoryview(buffer), "x", chunk.checksum
                        ).wait()
                        parts.append(bytes(buffer))
                    found[subgroup] = b"".join(parts)
                    seal.release(subgroup)
                    safe[subgroup].set()
            seal.close()

        reader = threading.Thread(target=read)
        reader.start()
        for subgroup in seal.memory:
            assert safe[subgroup].wait(30)
        for _ in range(during):
            step(pipeline, step_order(n, policy, steps % 2 == 1), step_order(n, policy, steps % 2 == 0))
            steps += 1
        reader.join(30)
        assert not reader.is_alive()
        for subgroup in range(n):
            assert set(found[subgroup]) == {(subgroup + before) % 256}
            assert len(found[subgroup]) == sizes[subgroup]
        pipeline.flush()
        assert values(pipeline) == [(i + steps) % 256 for i in range(n)]
        pipeline.flush()
        used = sum(len(record.chunks) for record in pipeline.table.records)
        if pipeline.tiers and free:
            assert sum(len(tier.slots) for tier in pipeline.tiers) + used == sum(
                tier.container.num_slots for tier in pipeline.tiers
            )
    finally:
        pipeline.close()


def test_there_are_slots_twice_where_there_is_room_for_them():
    sizes = [4 * BLOCK] * 6
    few = lay_out(sizes, BLOCK, [1.0], [2**40])
    many = lay_out(sizes, BLOCK, [1.0], [2**40], seals=True)
    assert many.slots[0] - few.slots[0] == 24
    tight = lay_out(sizes, BLOCK, [1.0], [(few.slots[0] + 3) * BLOCK], seals=True)
    assert tight.slots[0] == few.slots[0] + 3


class Busy(MemoryContainer):
    """Moves nothing before it is told to."""

    def __init__(self):
        super().__init__(4, BLOCK)
        self.go = threading.Event()

    def _write(self, offset, view):
        self.go.wait(30)
        super()._write(offset, view)


def test_traffic_that_can_wait_goes_when_the_lane_is_idle_or_somebody_waits_for_it(monkeypatch):
    monkeypatch.setattr("mlpo_hpc.storage.pace.LEAST_PATIENCE_S", 1000.0)
    container = Busy()
    tier = StorageTier("t", container)
    moved = []

    def background(pace):
        with pace.moving():
            moved.append(pace)

    def started(pace):
        thread = threading.Thread(target=background, args=[pace])
        thread.start()
        return thread

    foreground = tier.writes.move(0, memoryview(np.zeros(BLOCK, np.uint8)), "foreground", None)
    while tier.writes.is_idle():
        time.sleep(0.001)
    patient, urgent = Pace([tier.writes]), Pace([tier.writes])
    waiting = started(patient)
    second = started(urgent)
    assert moved == []
    urgent.hurry()
    second.join(30)
    assert moved == [urgent]
    container.go.set()
    waiting.join(30)
    foreground.wait()
    assert moved == [urgent, patient]
    tier.close()


def test_traffic_that_can_wait_comes_to_an_end_on_a_lane_that_is_never_idle(monkeypatch):
    monkeypatch.setattr("mlpo_hpc.storage.pace.LEAST_PATIENCE_S", 0.01)
    container = Busy()
    tier = StorageTier("t", container)
    foreground = tier.writes.move(0, memoryview(np.zeros(BLOCK, np.uint8)), "foreground", None)
    while tier.writes.is_idle():
        time.sleep(0.001)
    with Pace([tier.writes]).moving():
        assert not tier.writes.is_idle()
    container.go.set()
    foreground.wait()
    tier.close()


def test_a_seal_may_be_given_up_while_what_it_waits_for_is_written():
    """As when the checkpoint's disk is full: nothing stays held, and updates go on."""
    sizes = [3 * BLOCK] * 12
    pipeline = make(sizes, 2, sum(sizes), BLOCK, 0.002)
    try:
        fill(pipeline, range(12))
        for number in range(4):
            seal = pipeline.seal(write_back=True)
            time.sleep(0.004 * number)
            seal.close()
            step(pipeline, step_order(12, "alternate", number % 2 == 1), step_order(12, "alternate", number % 2 == 0))
        assert values(pipeline) == [i + 4 for i in range(12)]
        pipeline.flush()
        assert not any(tier.slots._held for tier in pipeline.tiers)
    finally:
        pipeline.close()


def test_a_step_that_waits_for_slots_does_not_keep_the_save_waiting_that_will_release_them():
    pipeline = make([BLOCK] * 4, 1, BLOCK, BLOCK, 0.0)
    try:
        fill(pipeline, range(4))
        assert not pipeline.is_wanted()
        pipeline.begin(range(4))
        assert pipeline.is_wanted()
        pipeline._writer._unplaced.append((0, 0, None, True))
        assert not pipeline.is_wanted()
        pipeline._writer._unplaced.clear()
        pipeline.get(0)
        assert pipeline.is_wanted()
        pipeline.rhythm.end()  # by an error, say
        assert not pipeline.is_wanted()
    finally:
        pipeline.close()
