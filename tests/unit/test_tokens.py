"""Tokens in one process: exclusion, order, permits, timeouts, and a rank's shared turn."""

from __future__ import annotations

import random
import threading
import time

import pytest

from mlpo_hpc.errors import StorageTimeout
from mlpo_hpc.tokens.base import FreeToken, Turn
from mlpo_hpc.tokens.local import LocalToken, local_token


@pytest.mark.parametrize("permits", [1, 2, 3])
def test_never_more_holders_than_permits_and_first_come_first_served(permits):
    token = LocalToken("test", permits)
    inside, most, asked, served = 0, 0, [], []
    lock = threading.Lock()

    def work(number):
        nonlocal inside, most
        rng = random.Random(number)
        for turn in range(20):
            with lock:
                # Asking and noting it in one go, so that the oracle knows the order.
                waiter = threading.Thread(target=lambda: None)
                waiter.start()
                waiter.join()
            time.sleep(rng.random() * 0.0005)
            with lock:
                asked.append((number, turn))
            with token:
                with lock:
                    inside += 1
                    most = max(most, inside)
                    served.append((number, turn))
                time.sleep(rng.random() * 0.0005)
                with lock:
                    inside -= 1

    threads = [threading.Thread(target=work, args=(n,)) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most <= permits
    assert len(served) == 100
    assert not token.locked()


def test_waiters_are_served_in_order():
    token = LocalToken("test")
    token.acquire()
    served: list[int] = []
    threads = []
    for number in range(5):
        thread = threading.Thread(target=lambda n=number: (token.acquire(), served.append(n), token.release()))
        thread.start()
        while len(token._waiting) <= number:
            time.sleep(0.001)
        threads.append(thread)
    assert token.locked()
    assert token.wanted()
    token.release()
    for thread in threads:
        thread.join()
    assert served == [0, 1, 2, 3, 4]
    assert not token.wanted()


def test_a_wait_that_takes_too_long_is_an_error_and_leaves_the_queue():
    token = LocalToken("reading on nvme", timeout_s=0.05)
    token.acquire()
    with pytest.raises(StorageTimeout, match="reading on nvme"):
        token.acquire()
    token.release()
    assert token.acquire() == 0.0


def test_one_token_a_directory_and_direction():
    assert local_token("/a", "reading", 1, 1.0) is local_token("/a", "reading", 1, 9.0)
    assert local_token("/a", "reading", 1, 1.0) is not local_token("/a", "writing", 1, 1.0)
    with pytest.raises(ValueError, match="permit"):
        LocalToken("x", 0)


def test_threads_of_a_rank_share_its_turn_and_give_it_up_when_others_wait():
    token = LocalToken("test")
    turn = Turn(token, max_chunks=2)
    for _ in range(5):  # nobody waits: no limit
        turn.enter()
    other = threading.Thread(target=lambda: (token.acquire(), got.set()))
    got, entered = threading.Event(), threading.Event()
    other.start()
    while not token.wanted():
        time.sleep(0.001)
    late = threading.Thread(target=lambda: (turn.enter(), entered.set()))
    late.start()
    assert not entered.wait(0.05), "enough chunks in this turn, and somebody waits"
    for _ in range(5):
        turn.leave()
    assert got.wait(5)
    token.release()
    assert entered.wait(5)
    turn.leave()
    late.join()
    assert not token.locked()


def test_off_is_always_free():
    token = FreeToken()
    with token:
        assert token.acquire() == 0.0
        assert not token.locked()
        assert not token.wanted()
