"""Traffic that can wait: it looks seldom, and goes on as soon as it is told."""

from __future__ import annotations

import threading
from contextlib import closing, contextmanager

import pytest

from mlpo_hpc.state.rhythm import Rhythm
from mlpo_hpc.storage import pace
from mlpo_hpc.storage.pace import Pace
from tests.unit.test_pipeline import BLOCK, fill, make

WAIT_S = 30.0
NEVER_S = 1e6


class Lane:
    """A device of which nothing, or something, is asked."""

    def __init__(self):
        self.idle = True

    def is_idle(self):
        return self.idle

    @contextmanager
    def turn(self):
        yield


@pytest.fixture(autouse=True)
def _only_what_is_told(monkeypatch):
    """Neither looks nor patience: whoever is not woken waits for ever."""
    for name in ("NEWS_S", "LEAST_PATIENCE_S", "MOST_PATIENCE_S"):
        monkeypatch.setattr(pace, name, NEVER_S)


class Waiting:
    """A thread that wants to move something while an update goes on, and begins to wait for its end."""

    def __init__(self, rhythm):
        self.rhythm = rhythm
        self.looks = 0
        self.listens = threading.Event()
        self.pace = Pace([Lane()], self._is_wanted, rhythm.news)
        self.pace.before_others = self.listens.set
        self._thread = threading.Thread(target=self._move, daemon=True)
        self._thread.start()
        assert self.listens.wait(WAIT_S)
        while not rhythm.news._waiters:
            assert self._thread.is_alive()

    def _move(self):
        with self.pace.moving():
            pass

    def _is_wanted(self, lead_s):
        self.looks += 1
        return self.rhythm.is_stepping or self.rhythm.is_near(lead_s)

    def has_moved(self):
        return ends(self._thread)


def ends(thread):
    thread.join(WAIT_S)
    return not thread.is_alive()


def test_it_goes_on_when_an_update_has_ended_and_looked_twice_until_then():
    rhythm = Rhythm()
    rhythm.begin()
    waiting = Waiting(rhythm)
    assert waiting.looks == 2, "once more when the end would not be missed any more"
    rhythm.end()
    assert waiting.has_moved()
    assert waiting.looks == 3


def test_it_goes_on_in_the_middle_of_an_update_when_somebody_waits_for_it():
    rhythm = Rhythm()
    rhythm.begin()
    waiting = Waiting(rhythm)
    waiting.pace.hurry()
    assert waiting.has_moved()
    waiting = Waiting(rhythm)
    with waiting.pace.awaited():
        assert waiting.has_moved()


def test_the_end_of_an_update_is_not_missed_between_a_look_and_listening():
    rhythm = Rhythm()
    rhythm.begin()
    paced = Pace([Lane()], lambda _: rhythm.is_stepping, rhythm.news)
    paced.before_others = rhythm.end
    thread = threading.Thread(target=paced.wait, daemon=True)
    thread.start()
    assert ends(thread)


def test_lanes_that_are_busy_are_looked_at_again():
    lane = Lane()
    lane.idle = False
    paced = Pace([lane])
    thread = threading.Thread(target=paced.wait, daemon=True)
    thread.start()
    thread.join(5 * pace.LAST_POLL_S)
    assert thread.is_alive()
    lane.idle = True
    assert ends(thread)


def started(paced):
    """A thread that waits until it may go on, and listens."""
    thread = threading.Thread(target=paced.wait, daemon=True)
    thread.start()
    while not paced._news._waiters:
        assert thread.is_alive()
    return thread


@pytest.fixture
def pipeline():
    """In an update."""
    with closing(make([BLOCK] * 4, 1, BLOCK, BLOCK, 0.0)) as made:
        fill(made, range(4))
        made.begin(range(4))
        yield made


def test_an_update_of_a_pipeline_has_the_tiers_until_it_ends(pipeline):
    thread = started(pipeline.pace([Lane()]))
    pipeline.rhythm.end()
    assert ends(thread)


def test_an_update_that_comes_to_lack_slots_lets_those_go_on_who_hold_them(pipeline):
    """In the middle of it, or from its start, when it was only expected before."""
    thread = started(pipeline.pace([Lane()]))
    (tier,) = pipeline.tiers
    with pipeline._watch:
        while len(tier.slots):
            tier.slots.take()
    pipeline.get(0)
    pipeline.put(0)
    assert pipeline._writer.lacks_slots
    assert ends(thread)
    pipeline.rhythm.end()
    pipeline.rhythm.is_near = lambda lead_s: True
    thread = started(pipeline.pace([Lane()]))
    pipeline.rhythm.begin()
    assert ends(thread)
