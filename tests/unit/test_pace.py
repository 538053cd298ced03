"""Traffic that can wait: it looks seldom, and goes on as soon as it is told."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from unittest.mock import Mock

import pytest

from mlpo_hpc.state.placement import Placement
from mlpo_hpc.state.rhythm import Rhythm
from mlpo_hpc.state.table import Record, Table
from mlpo_hpc.state.watch import Watch
from mlpo_hpc.state.write_behind import WriteBehind
from mlpo_hpc.storage import pace
from mlpo_hpc.storage.pace import Pace

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
        self._thread.join(WAIT_S)
        return not self._thread.is_alive()


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
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_lanes_that_are_busy_are_looked_at_again():
    lane = Lane()
    lane.idle = False
    paced = Pace([lane])
    thread = threading.Thread(target=paced.wait, daemon=True)
    thread.start()
    thread.join(5 * pace.LAST_POLL_S)
    assert thread.is_alive()
    lane.idle = True
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_an_update_that_lacks_slots_lets_those_know_who_hold_them():
    told = Mock()
    table = Table([Record("r", 4096)], 4096)
    tier = Mock(slots=[])
    writer = WriteBehind(table, [tier], Placement([1.0]), Watch(WAIT_S, str), Mock(), told)
    resident = Mock(asked=set(), unwritten=0, written={}, in_use=False)
    writer.write(0, resident, [0])
    assert writer.lacks_slots
    told.assert_called_once_with()
