"""Whether turns pay: measured on a stand-in drive, decided, and what they then gain."""

from __future__ import annotations

import threading

import pytest

from mlpo_hpc.state.cache import Pool
from mlpo_hpc.state.pipeline import Pipeline
from mlpo_hpc.state.table import Record, Table
from mlpo_hpc.storage.contention import Contention, Crew, _active, _part, measure
from mlpo_hpc.storage.probe import Probe
from mlpo_hpc.storage.tier import StorageTier
from mlpo_hpc.tokens.base import FreeToken
from mlpo_hpc.tokens.process import Process
from mlpo_hpc.tokens.ticket import TicketToken
from tests.standin import DriveContainer, SharedDrive
from tests.unit.test_tokens import PlainCounters

BPS = 200e6


class Crewmates:
    """Ranks as threads of this process."""

    def __init__(self, size, permits=1):
        self.size, self.permits = size, permits
        self._barrier = threading.Barrier(size, timeout=60)
        self._values = [None] * size

    def crew(self, number):
        def gather(value):
            self._values[number] = value
            self._barrier.wait()
            values = list(self._values)
            self._barrier.wait()
            return values

        return Crew(number, self.size, self.permits, gather)

    def run(self, work):
        results = [None] * self.size
        threads = [
            threading.Thread(target=lambda n=n: results.__setitem__(n, work(n)), daemon=True) for n in range(self.size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        return results


def look(tmp_path, size, permits=1, loss=0.4):
    mates = Crewmates(size, permits)

    def work(number):
        drive = SharedDrive(tmp_path / "drive", number, size, BPS, loss)
        with Probe(DriveContainer(drive, 4, 2**20)) as probe:
            probe.fill()
            return measure(probe, mates.crew(number))

    results = mates.run(work)
    assert all(found == results[0] for found in results), "all ranks see the same figures"
    return results[0]


def test_turns_are_taken_where_ranks_get_in_each_others_way(tmp_path):
    found = look(tmp_path, 2)
    assert found.best_scope() == "tier", found
    assert 0.4 < found.efficiency("off") < 0.85, "placement reckons with what is left"
    assert found.efficiency("tier") == 1


def test_no_turns_are_taken_where_permits_let_all_in(tmp_path):
    assert look(tmp_path, 2, permits=2).best_scope() == "off"


def rates(off, direction, tier):
    return Contention({"off": off, "direction": direction, "tier": tier})


@pytest.mark.parametrize(
    ("measured", "scope"),
    [
        (rates([100, 100, 100], [104, 104, 104], [104, 104, 104]), "off"),  # under 5 %: equal
        (rates([100, 100, 100], [110, 112, 111], [112, 110, 114]), "direction"),  # the stricter one adds nothing
        (rates([100, 100, 100], [110, 112, 111], [130, 131, 129]), "tier"),
        (rates([100, 100, 100], [101, 99, 100], [140, 90, 150]), "off"),  # not in every round: noise
        (rates([100, 100, 100], [60, 60, 60], [50, 50, 50]), "off"),  # one alone cannot fill it
    ],
)
def test_turns_must_earn_their_keep(measured, scope):
    assert measured.best_scope() == scope


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("permits", [1, 2])
def test_every_chunk_falls_to_one_rank_of_those_whose_turn_it_is(size, permits):
    crew = Crew(0, size, permits, lambda value: [value])
    for scope in ("off", "direction", "tier"):
        for turn in range(4):
            for ranks in _active(crew, scope, turn):
                assert sum(_part(12, ranks, number) for number in range(size)) == 12
                assert scope == "off" or len(ranks) == permits
    readers, writers = _active(crew, "direction", 1)
    assert size <= permits or readers != writers


@pytest.mark.parametrize("scope", ["off", "tier"])
def test_what_turns_gain_on_such_a_drive(tmp_path, scope):
    """Two ranks update their state over it: with turns no byte passes at the lower rate."""
    mates = Crewmates(2)
    counters, here = PlainCounters(4), [Process.this(rank, "here") for rank in range(2)]
    record_bytes, num_records = 2**20, 8

    def work(number):
        drive = SharedDrive(tmp_path / "drive", number, 2, BPS)
        token = TicketToken("drive", counters, 0, 1, number, here) if scope == "tier" else FreeToken()
        tier = StorageTier("t", DriveContainer(drive, 24, record_bytes), (token, token))
        table = Table([Record(str(i), record_bytes) for i in range(num_records)], record_bytes)
        pipeline = Pipeline(table, Pool(3 * record_bytes), [tier], [1.0])
        for i in range(num_records):
            pipeline.create(i)
            pipeline.put(i)
        for step in range(3):
            order = list(range(num_records))[:: 1 if step % 2 else -1]
            pipeline.begin(order)
            for i in order:
                pipeline.get(i)[:4] = b"done"
                pipeline.put(i)
        pipeline.flush()
        taken = sum(figures.taken for figures in tier.figures().values())
        pipeline.close()
        return drive.contended(), taken

    results = mates.run(work)
    contended = results[-1][0]
    if scope == "tier":
        assert contended == 0
        assert min(taken for _, taken in results) > 3
    else:
        assert contended > 0.3
        assert results[0][1] == 0
