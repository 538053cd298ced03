"""Being asked to stop: by signals once and often, by a file, and on two ranks of which one is asked."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest
import torch

import mlpo_hpc
from mlpo_hpc.cluster import signals, verdict
from mlpo_hpc.config import load
from mlpo_hpc.errors import MlpoError
from tests.ranks import ROOT, run_ranks

PRELUDE = "import ctypes, os, signal, sys, threading\nfrom mlpo_hpc import StopRequest\n"


def child(code):
    """A process of its own: what goes wrong with signals ends it."""
    command = [sys.executable, "-c", PRELUDE + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)


@pytest.mark.parametrize("number", signals.SIGNALS)
@pytest.mark.parametrize("times", [0, 1, 3])
def test_signals_are_noted_and_more_of_them_do_no_harm(number, times):
    done = child(f"""
stop = StopRequest()
for _ in range({times}):
    os.kill(os.getpid(), {int(number)})
print(stop.requested(), stop.requested(), stop.reason)
""")
    name = signal.Signals(number).name
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == (["True", "True", name] if times else ["False", "False"])


def test_after_closing_the_signal_does_what_it_did_before():
    code = "stop = StopRequest()\nstop.close()\nstop.close()\nos.kill(os.getpid(), signal.SIGTERM)"
    assert child(code).returncode == -signal.SIGTERM


def test_the_handler_that_was_there_is_called_and_put_back(monkeypatch):
    called = []
    mine = lambda number, frame: called.append(number)  # noqa: E731
    before = signal.signal(signal.SIGUSR2, mine)
    try:
        with mlpo_hpc.StopRequest() as stop:
            signal.raise_signal(signal.SIGUSR2)
            signal.raise_signal(signal.SIGUSR2)
            assert stop.requested()
        assert called == [signal.SIGUSR2, signal.SIGUSR2]
        assert signal.getsignal(signal.SIGUSR2) is mine
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_handler_that_came_later_stays():
    later = lambda number, frame: None  # noqa: E731
    before = signal.getsignal(signal.SIGUSR2)
    try:
        with mlpo_hpc.StopRequest():
            signal.signal(signal.SIGUSR2, later)
        assert signal.getsignal(signal.SIGUSR2) is later
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_forked_workers_end_by_term_as_ever_and_outlive_usr2():
    """`multiprocessing` ends its workers with TERM and waits: one that only noted it would be waited for for ever."""
    done = child("""
from multiprocessing import get_context
fork = get_context("fork")
stop = StopRequest()
ready = fork.Event()

def work():
    os.kill(os.getpid(), signal.SIGUSR2)
    ready.set()
    signal.pause()

worker = fork.Process(target=work)
worker.start()
assert ready.wait(30)
worker.terminate()
worker.join(30)
print(worker.exitcode, stop.requested())
""")
    assert done.stdout.split() == [str(-signal.SIGTERM), "False"], done.stderr


def test_a_call_of_c_that_waits_is_not_broken_off():
    done = child("""
stop = StopRequest()
reading, writing = os.pipe()
main = threading.get_ident()

def disturb():
    signal.pthread_kill(main, signal.SIGUSR2)
    threading.Timer(0.3, os.write, (writing, b"x")).start()

threading.Timer(0.3, disturb).start()
print(ctypes.CDLL(None).read(reading, ctypes.create_string_buffer(1), 1), stop.requested())
""")
    assert done.stdout.split() == ["1", "True"], "EINTR would be -1: " + done.stderr


def test_only_the_main_thread_can_take_signals():
    errors = []

    def make():
        try:
            mlpo_hpc.StopRequest()
        except MlpoError as error:
            errors.append(str(error))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "make it there" in errors[0]


@pytest.mark.parametrize("named_by", ["argument", "environment"])
def test_a_stop_file_is_seen_when_it_appears(named_by, tmp_path, monkeypatch):
    now_s, file = [100.0], tmp_path / "stop"
    monkeypatch.setattr(signals.time, "monotonic", lambda: now_s[0])
    monkeypatch.setenv("MLPO_HPC_STOP_FILE", str(file if named_by == "environment" else tmp_path / "other"))
    with mlpo_hpc.StopRequest(file if named_by == "argument" else None) as stop:
        assert not stop.requested()
        file.touch()
        now_s[0] += 0.9
        assert not stop.requested(), "a second has not passed since it was looked for"
        now_s[0] += 0.2
        assert stop.requested()
        file.unlink()
        assert stop.requested(), "yes remains yes"
        assert stop.reason == f"the file {file}"


def test_the_variable_of_the_stop_file_is_no_key_of_the_configuration(monkeypatch):
    before = load({})
    monkeypatch.setenv("MLPO_HPC_STOP_FILE", "/somewhere/stop")
    assert load({}) == before


def test_a_stop_file_that_cannot_be_looked_at_is_told_once_and_signals_still_work(caplog):
    with mlpo_hpc.StopRequest("x" * 5000) as stop, caplog.at_level("WARNING", "mlpo_hpc"):
        assert not stop.requested()
        stop._looked_s -= 10
        assert not stop.requested()
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested()
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "the stop file cannot be looked at and is left alone"
    ]


@pytest.mark.parametrize(
    ("backends", "device"), [("cpu:gloo,cuda:gloo", "cpu"), ("cuda:nccl", "cuda"), ("cpu:gloo,cuda:nccl", "cpu")]
)
def test_it_is_agreed_where_the_backend_can_reduce(backends, device, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: backends)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert verdict._reducing_device().type == device


RANK = """
import os, signal, sys
import torch.distributed as dist
from pathlib import Path
from mlpo_hpc import StopRequest

stop = StopRequest(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(1, 20):
    if step == 7 and rank == 1 and sys.argv[1] == "signal":
        os.kill(os.getpid(), signal.SIGUSR2)
    if step == 5 and rank == 0 and sys.argv[1] == "file":
        Path(sys.argv[2]).touch()
        stop._looked_s -= 10
    if stop.requested():
        break
Path(sys.argv[3], f"rank.{rank}").write_text(f"{step} {stop.reason}")
dist.barrier()
os._exit(0)
"""


@pytest.mark.parametrize(("asked_by", "expected"), [("signal", "7 SIGUSR2"), ("file", "5 the file {}")])
def test_one_rank_is_asked_and_both_stop_at_the_same_step(asked_by, expected, tmp_path):
    file = tmp_path / "stop"
    outcomes = run_ranks(2, ["-c", RANK, asked_by, str(file), str(tmp_path)], timeout_s=120)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert [(tmp_path / f"rank.{rank}").read_text() for rank in range(2)] == [expected.format(file)] * 2


def test_the_package_s_lazy_name_and_no_other():
    assert "StopRequest" in mlpo_hpc.__all__
    assert mlpo_hpc.StopRequest is signals.StopRequest
    with pytest.raises(AttributeError, match="has no attribute 'Stop'"):
        mlpo_hpc.Stop  # noqa: B018
