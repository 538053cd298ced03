"""When the next update is expected."""

from __future__ import annotations

import pytest

from mlpo_hpc.state.rhythm import LEAST_LEAD_S, Rhythm


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


def train(rhythm, clock, betweens_s, update_s=1.4):
    """Some updates, with so long before each; the last one has just ended."""
    for between_s in (0.0, *betweens_s):
        clock.now_s += between_s
        rhythm.begin()
        clock.now_s += update_s
        rhythm.end()


def test_nothing_is_expected_before_a_time_between_two_updates_is_known():
    clock = Clock()
    rhythm = Rhythm(clock)
    assert not rhythm.is_near(9.0)
    train(rhythm, clock, [])
    for _ in range(50):
        clock.now_s += 0.1
        assert not rhythm.is_near(9.0)


@pytest.mark.parametrize(
    ("betweens_s", "lead_s", "first_s", "last_s"),
    [
        ([2.0], 0.0, 2.0 - LEAST_LEAD_S, 2.0 + LEAST_LEAD_S),
        ([2.0], 0.5, 1.5, 2.5),
        ([2.0, 60.0, 2.1], 0.0, 2.0 - LEAST_LEAD_S, 2.0 + LEAST_LEAD_S),  # an evaluation came between
        ([2.0, 3.0, 3.0, 3.0], 0.0, 3.0 - LEAST_LEAD_S, 3.0 + LEAST_LEAD_S),  # it became slower
        ([60.0], 0.5, 57.0, 63.0),
    ],
)
def test_it_is_near_for_some_time_around_the_shortest_of_the_last_times(betweens_s, lead_s, first_s, last_s):
    clock = Clock()
    rhythm = Rhythm(clock)
    train(rhythm, clock, betweens_s)
    ended_s = clock.now_s
    for offset_s, near in [(0.0, False), (first_s - 0.01, False), (first_s + 0.01, True), (last_s - 0.01, True)]:
        clock.now_s = ended_s + offset_s
        assert rhythm.is_near(lead_s) is near
    clock.now_s = ended_s + last_s + 0.01
    assert not rhythm.is_near(lead_s), "it did not come: others may go on"


def test_while_an_update_goes_on_the_next_one_is_not_near_and_ending_twice_is_once():
    clock = Clock()
    rhythm = Rhythm(clock)
    train(rhythm, clock, [2.0])
    clock.now_s += 2.0
    assert rhythm.is_near(0.0)
    rhythm.begin()
    assert rhythm.is_stepping
    assert not rhythm.is_near(0.0)
    rhythm.end()
    clock.now_s += 2.0
    rhythm.end()
    assert not rhythm.is_stepping
    assert rhythm.is_near(0.0)
