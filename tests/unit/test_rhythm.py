"""When the next update is expected."""

from __future__ import annotations

import pytest

from mlpo_hpc.state.rhythm import LEAST_LEAD_S, Rhythm


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


def passes(rhythm, clock, number, pass_s):
    for _ in range(number):
        clock.now_s += 0.5  # forward
        rhythm.backward()
        clock.now_s += pass_s


def train(rhythm, clock, number, pass_s, update_s=1.4):
    passes(rhythm, clock, number, pass_s)
    rhythm.begin()
    clock.now_s += update_s
    rhythm.end()


def near_at(rhythm, clock, lead_s, step_s=0.01, most_s=60.0):
    """Seconds from now at which it becomes near, and at which it is not any more; None if it never is."""
    begin_s, near = clock.now_s, []
    while clock.now_s < begin_s + most_s:
        if rhythm.is_near(lead_s):
            near.append(clock.now_s - begin_s)
        clock.now_s += step_s
    return (near[0], near[-1]) if near else None


def test_nothing_is_expected_before_an_update_was_seen():
    clock = Clock()
    rhythm = Rhythm(clock)
    passes(rhythm, clock, 4, 2.0)
    assert near_at(rhythm, clock, 9.0) is None


@pytest.mark.parametrize(
    ("lasted_s", "lead_s", "first_s", "last_s"),
    [
        ([2.0], 0.0, 2.0 - LEAST_LEAD_S, 4.0 + LEAST_LEAD_S),
        ([2.0], 0.5, 1.5, 4.5),
        ([2.0, 1.0, 3.0], 0.0, 1.0 - LEAST_LEAD_S, 6.0 + LEAST_LEAD_S),
        ([1.0, 2.0, 2.0, 2.0], 0.0, 2.0 - LEAST_LEAD_S, 4.0 + LEAST_LEAD_S),  # it became slower
        ([20.0], 0.5, 19.0, 41.0),
        ([0.1], 0.0, 0.05, 0.25),  # a short one is not left alone as a whole
        ([0.1], 9.0, 0.05, 0.25),
    ],
)
@pytest.mark.parametrize("number", [1, 4])
def test_it_is_near_before_the_usual_pass_ends_and_some_time_after(number, lasted_s, lead_s, first_s, last_s):
    clock = Clock()
    rhythm = Rhythm(clock)
    for pass_s in lasted_s:
        train(rhythm, clock, number, pass_s)
    assert near_at(rhythm, clock, lead_s) is None, "in what comes between an update and the next passes"
    passes(rhythm, clock, number - 1, 1.0)
    assert number == 1 or near_at(rhythm, clock, lead_s) is None, "while micro-batches are still to come"
    rhythm.backward()
    assert near_at(rhythm, clock, lead_s) == pytest.approx((first_s, last_s), abs=0.02)


def test_a_step_that_was_left_out_counts_as_one():
    clock = Clock()
    rhythm = Rhythm(clock)
    train(rhythm, clock, 4, 2.0)
    passes(rhythm, clock, 4, 2.0)
    rhythm.end()  # an overflow: no update
    passes(rhythm, clock, 3, 2.0)
    assert not rhythm.is_near(0.1)
    passes(rhythm, clock, 1, 2.0)
    assert rhythm.is_near(0.1)


def test_a_change_of_the_number_of_passes_is_followed():
    clock = Clock()
    rhythm = Rhythm(clock)
    train(rhythm, clock, 4, 2.0)
    train(rhythm, clock, 2, 2.0)
    passes(rhythm, clock, 2, 2.0)
    assert rhythm.is_near(0.1)


def test_it_tells_whether_an_update_goes_on_and_ending_twice_is_once():
    rhythm = Rhythm(Clock())
    assert not rhythm.is_stepping
    rhythm.begin()
    assert rhythm.is_stepping
    rhythm.end()
    rhythm.end()
    assert not rhythm.is_stepping
