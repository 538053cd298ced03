"""Tokens in one process: exclusion, order, permits, timeouts, and a rank's shared turn."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mlpo_hpc.errors import MlpoError, StorageTimeout
from mlpo_hpc.tokens import ticket
from mlpo_hpc.tokens.base import FreeToken, Turn
from mlpo_hpc.tokens.flock import FlockToken
from mlpo_hpc.tokens.local import LocalToken, local_token
from mlpo_hpc.tokens.process import Process, start_ticks
from mlpo_hpc.tokens.ticket import Counters, TicketToken


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


def test_one_token_a_device_and_direction():
    assert local_token(("/a", 5), "reading", 1, 1.0) is local_token(("/a", 5), "reading", 1, 9.0)
    assert local_token(("/a", 5), "reading", 1, 1.0) is not local_token(("/a", 5), "writing", 1, 1.0)
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


def flock_tokens(tmp_path, permits, ranks):
    """Tokens of ranks of this process on files that are removed at once, as in the engine."""
    folder = tmp_path / "locks"
    folder.mkdir()
    paths = [str(folder / str(number)) for number in range(permits)]
    tokens = [FlockToken("reading on pfs", paths, rank, [Process.this(3, "n1")]) for rank in range(ranks)]
    shutil.rmtree(folder)
    return tokens


@pytest.mark.parametrize("permits", [1, 2])
def test_flock_excludes_between_open_files_and_dies_with_its_process(permits, tmp_path):
    tokens = flock_tokens(tmp_path, permits, permits + 1)
    for token in tokens[:permits]:
        token.acquire()
    assert tokens[-1].locked()
    assert not tokens[-1].wanted()
    assert f"held by rank 3 (process {os.getpid()} on n1)" in tokens[-1].who()
    got = threading.Event()
    waiter = threading.Thread(target=lambda: (tokens[-1].acquire(), got.set()), daemon=True)
    waiter.start()
    assert not got.wait(0.1)
    assert tokens[0].wanted()
    tokens[tokens[-1]._mine].free()  # as the kernel does when the process ends
    assert got.wait(5)
    tokens[-1].release()
    with pytest.raises(RuntimeError, match="not held"):
        tokens[-1].release()
    for token in tokens:
        token.free()
        token.free()


def test_a_forked_child_does_not_keep_a_lock(tmp_path):
    token, other = flock_tokens(tmp_path, 1, 2)
    token.acquire()
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    token.free()  # our process lets go of the file; the child had a copy
    assert other.acquire() < 20
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    other.release()
    other.free()


HOLDER = """
import sys, time
from mlpo_hpc.tokens.flock import FlockToken
token = FlockToken("writing on nvme", [sys.argv[1]], 0, [])
token.acquire()
print("held", flush=True)
time.sleep(60)
"""


def test_with_flock_the_next_waiter_goes_on_when_the_holder_is_killed(tmp_path):
    path = str(tmp_path / "lock")
    process = subprocess.Popen([sys.executable, "-c", HOLDER, path], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    mine = FlockToken("writing on nvme", [path], 1, [Process(5, "n1", process.pid, 0)])
    assert mine.who() == f"held by rank 5 (process {process.pid} on n1)"
    threading.Timer(0.2, process.kill).start()
    assert 0.1 < mine.acquire() < 30
    process.wait()
    process.stdout.close()
    mine.release()
    mine.free()


class PlainCounters(Counters):
    """Counters of one process."""

    def __init__(self, count):
        self.words = [0] * count
        self.lock = threading.Lock()

    def add(self, index, value):
        with self.lock:
            self.words[index] += value
            return self.words[index] - value

    def load(self, index):
        return self.words[index]

    def store(self, index, value):
        self.words[index] = value


class Tickets(RuleBasedStateMachine):
    """The ticket logic against a queue: whoever asked first is served first, never too many at once."""

    def __init__(self):
        super().__init__()
        self.counters = PlainCounters(2 + 6)
        here = [Process.this(rank, "here") for rank in range(6)]
        self.permits = 2
        self.tokens = [TicketToken("x", self.counters, 0, 2, rank, here) for rank in range(6)]
        self.tickets, self.queue, self.inside = {}, [], []

    @rule(rank=st.integers(0, 5))
    def ask(self, rank):
        if rank not in self.tickets:
            self.tickets[rank] = self.counters.add(0, 1)
            self.queue.append(rank)

    @rule(index=st.integers(0, 1))
    def release(self, index):
        if index < len(self.inside):
            rank = self.inside.pop(index)
            self.tokens[rank].release()
            del self.tickets[rank]

    @invariant()
    def the_first_in_the_queue_are_served(self):
        served = [rank for rank in self.queue if self.tokens[rank]._is_served(self.tickets[rank])]
        room = self.permits - len(self.inside)
        assert served == self.queue[:room]
        for rank in served:
            self.queue.remove(rank)
            self.inside.append(rank)
            self.counters.store(2 + rank, self.tickets[rank] + 1)
        token = self.tokens[0]
        assert [p.world_rank for p in token.holders()] == sorted(self.inside)
        assert token.locked() == (len(self.inside) >= self.permits)
        assert token.wanted() == bool(self.queue)


TestTickets = Tickets.TestCase


def test_a_dead_rank_is_named_not_waited_for():
    process = subprocess.Popen(["sleep", "60"])
    dead = Process(7, "n1", process.pid, start_ticks(process.pid))
    assert dead.is_alive()
    here = [dead, Process.this(1, "n1")]
    counters = PlainCounters(4)
    TicketToken("reading on pfs", counters, 0, 1, 0, here).acquire()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not dead.is_alive(), "a zombie holds nothing back"
    with pytest.raises(MlpoError, match=rf"rank 7 \(process {process.pid} on n1\) died.*reading on pfs"):
        TicketToken("reading on pfs", counters, 0, 1, 1, here).acquire()
    process.wait()


def test_a_waiter_sleeps_longer_the_longer_it_waits(monkeypatch):
    """About 130 looks in the first 0.8 s, then one each 50 ms: little of a core, and never late by much."""
    now, sleeps = [0.0], []
    counters, here = PlainCounters(4), [Process.this(rank, "here") for rank in range(2)]
    holder, waiter = (TicketToken("x", counters, 0, 1, rank, here) for rank in range(2))
    holder.acquire()

    def sleep(seconds):
        sleeps.append((now[0], seconds))
        now[0] += seconds + 60e-6  # a wake-up takes its time
        if now[0] > 1:
            holder.release()

    monkeypatch.setattr(ticket.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(ticket.time, "sleep", sleep)
    assert waiter.acquire() == pytest.approx(1, abs=0.06)
    assert all(seconds <= max(50e-6, waited / 16) + 1e-9 and seconds <= 50e-3 for waited, seconds in sleeps)
    assert len(sleeps) < 160


def test_off_is_always_free():
    token = FreeToken()
    with token:
        assert token.acquire() == 0.0
        assert not token.locked()
        assert not token.wanted()
