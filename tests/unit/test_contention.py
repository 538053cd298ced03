"""Whether turns pay: measured on a stand-in drive, decided, and what they then gain."""

from __future__ import annotations

import threading

import pytest

from mlpo_hpc.state.cache import Pool
from mlpo_hpc.state.pipeline import Pipeline
from mlpo_hpc.state.placement import Placement
from mlpo_hpc.state.table import Record, Table
from mlpo_hpc.storage import contention
from mlpo_hpc.storage.contention import Contention, Crew, Phase, _active, _part, measure
from mlpo_hpc.storage.probe import Probe
from mlpo_hpc.storage.tier import StorageTier
from mlpo_hpc.tokens.base import FreeToken
from mlpo_hpc.tokens.process import Process
from mlpo_hpc.tokens.ticket import TicketToken
from tests.standin import DriveContainer, SharedDrive
from tests.unit.test_tokens import PlainCounters

BPS = 200e6


@pytest.fixture(autouse=True)
def _short_phases(monkeypatch):
    monkeypatch.setattr(contention, "PHASE_S", 0.2)


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
    assert found.typical_bps("off") < 0.85 * found.typical_bps("tier")


def test_no_turns_are_taken_where_permits_let_all_in(tmp_path):
    found = look(tmp_path, 2, permits=2)
    assert found.best_scope() == "off"
    assert list(found.rates_bps) == ["off"]
    assert 0.2 * BPS < found.typical_bps("off") < 0.5 * BPS, "what passes both ways at once, for placement"


def rates(off, direction, tier):
    return Contention({"off": off, "direction": direction, "tier": tier})


@pytest.mark.parametrize(
    ("measured", "scope"),
    [
        (rates([100, 100, 100], [104, 104, 104], [104, 104, 104]), "off"),  # under 5 %: equal
        (rates([100, 100, 100], [110, 112, 111], [112, 110, 114]), "direction"),  # the stricter one adds nothing
        (rates([100, 100, 100], [110, 112, 111], [130, 131, 129]), "tier"),
        (rates([100, 100, 100], [101, 99, 100], [140, 90, 150]), "off"),  # not in every round: noise
        (rates([100, 100, 100], [103, 120, 120], [104, 130, 130]), "off"),  # known after one round
        (rates([100, 101, 99], [90], [101]), "off"),  # the others were not looked at again
        (rates([100, 100, 100], [60, 60, 60], [50, 50, 50]), "off"),  # one alone cannot fill it
    ],
)
def test_turns_must_earn_their_keep(measured, scope):
    assert measured.best_scope() == scope


def test_a_burst_at_the_beginning_does_not_count():
    burst, steady = [0.0] * 8, [0.1 * i for i in range(1, 17)]
    phase = Phase(0.0, [[*burst, *steady], [*burst, *steady]], 100)
    assert phase.steady_bps == pytest.approx(100 * 10)
    assert phase.whole_bps == pytest.approx(24 * 100 / 1.6)


def test_the_slower_way_counts():
    """Readers that end early make no state pass earlier."""
    writes = [0.1 * i for i in range(1, 31)]
    for pace in (0.02, 0.05, 0.09):
        phase = Phase(0.0, [[pace * i for i in range(1, 31)], writes], 100)
        assert phase.steady_bps == pytest.approx(1000)
        assert phase.whole_bps == pytest.approx(1000)


def test_few_pieces_and_none_are_ordinary():
    assert Phase(0.0, [[1.0], [2.0]], 100).steady_bps == 50
    assert Phase(0.0, [[], []], 100).steady_bps == 0


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


RECORD_BYTES, NUM_RECORDS = 2**18, 8


def two_ranks(tmp_path, scope, num_buffers):
    """Pipelines of two ranks on one drive; `scope` as the engine decides it."""
    counters, here = PlainCounters(8), [Process.this(rank, "here") for rank in range(2)]

    def build(number):
        drive = SharedDrive(tmp_path / "drive", number, 2, BPS)
        reading, writing = (TicketToken(f"{i}", counters, 4 * i, 1, number, here, 30) for i in range(2))
        tokens = {"off": (FreeToken(), FreeToken()), "direction": (reading, writing), "tier": (writing, writing)}
        tier = StorageTier("t", DriveContainer(drive, NUM_RECORDS + 2, RECORD_BYTES), tokens[scope])
        table = Table([Record(str(i), RECORD_BYTES) for i in range(NUM_RECORDS)], RECORD_BYTES)
        return Pipeline(table, Pool(num_buffers * RECORD_BYTES), [tier], Placement([1.0]), timeout_s=30), drive

    return build


def train(pipeline, steps, pause=None):
    """Updates with alternating order; `pause(step, position)` before each subgroup."""
    for i in range(NUM_RECORDS):
        pipeline.create(i)
        pipeline.put(i)
    for step in range(steps):
        order = list(range(NUM_RECORDS))[:: 1 if step % 2 else -1]
        pipeline.begin(order)
        for position, i in enumerate(order):
            if pause:
                pause(step, position)
            view = pipeline.get(i)
            assert view[0] == step
            view[0] += 1
            pipeline.put(i)
    pipeline.flush()


@pytest.mark.parametrize("scope", ["off", "tier"])
def test_what_turns_gain_on_such_a_drive(tmp_path, scope):
    """Two ranks update their state over it: with turns no byte passes at the lower rate."""
    build = two_ranks(tmp_path, scope, num_buffers=3)

    def work(number):
        pipeline, drive = build(number)
        train(pipeline, 3)
        taken = sum(figures.taken for figures in pipeline.tiers[0].figures().values())
        pipeline.close()
        return drive.contended(), taken

    results = Crewmates(2).run(work)
    contended = results[-1][0]
    if scope == "tier":
        assert contended == 0
        assert min(taken for _, taken in results) > 3
    else:
        assert contended > 0.3
        assert results[0][1] == 0


@pytest.mark.parametrize("scope", ["direction", "tier"])
@pytest.mark.parametrize("num_buffers", [2, 3])
@pytest.mark.parametrize("position", [0, 3])
def test_a_rank_with_full_buffers_holds_nobody_up(tmp_path, scope, num_buffers, position):
    """One has read ahead as far as it can and stops, with writes behind it; the other ends all its steps."""
    build = two_ranks(tmp_path, scope, num_buffers)
    reached, other_is_done = threading.Event(), threading.Event()

    def pause(step, at):
        if (step, at) == (1, position):
            reached.set()
            assert other_is_done.wait(30), "the other rank waits for what this one holds"

    def work(number):
        pipeline, _ = build(number)
        if number == 0:
            train(pipeline, 3, pause)
        else:
            assert reached.wait(30)
            train(pipeline, 3)
            other_is_done.set()
        pipeline.close()
        return True

    assert Crewmates(2).run(work) == [True, True]
