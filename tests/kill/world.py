"""A world of ranks on this machine, forked from a process that has imported everything, and killed at a moment."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from mlpo_hpc.cluster.network import first_free_port
from tests.kill.moments import PHASES, Moment, Note, Watch

SURVIVORS_S = 30.0
"""Within which the other ranks must end by themselves."""
LIFE_S = 300.0
FORK = multiprocessing.get_context("fork")

Program = Callable[[int], None]


@dataclass(frozen=True)
class Death:
    """How a world ended.

    Parameters
    ----------
    codes : list of int
        Exit codes; -9 of those that were killed.
    notes : list of Note
        Where each rank was at its end.
    at : Note, optional
        Where the rank was whose operations are counted, at the kill: others may have gone on.
    survived_s : float
        How long the last of the others took to end.
    text : str
        What all ranks printed.
    """

    codes: list[int]
    notes: list[Note]
    at: Note | None
    survived_s: float
    text: str


def live(program: Program, num_ranks: int, log: Path, moment: Moment | None = None, operation: int = 0) -> Death:
    """Run a program on all ranks; kill some when one of them is before an operation of its phase."""
    notes = FORK.RawArray(Note, num_ranks)
    hear, tell = os.pipe()
    port = first_free_port()
    ranks = []
    for rank in range(num_ranks):
        watch = Watch(notes[rank], moment if moment and moment.rank == rank else None, operation, tell)
        process = FORK.Process(target=_be, args=(program, rank, num_ranks, port, log, watch), daemon=True)
        process.start()
        ranks.append(process)
    survived_s, at = 0.0, None
    if hear in wait([hear, *(process.sentinel for process in ranks)], LIFE_S):
        assert moment is not None
        time.sleep(moment.delay_s)
        for victim in moment.victims:
            ranks[victim].kill()
        at = Note.from_buffer_copy(notes[moment.rank])
        survived_s = _wait_for(ranks, SURVIVORS_S)
    else:
        _wait_for(ranks, LIFE_S if moment is None else SURVIVORS_S)
    os.close(hear)
    os.close(tell)
    return Death([process.exitcode for process in ranks], list(notes), at, survived_s, log.read_text())


def _wait_for(ranks: list[Any], timeout_s: float) -> float:
    """Wait for all; who does not end by himself is made to tell where he is, and gets exit code -6."""
    begin = time.monotonic()
    for process in ranks:
        process.join(max(0.0, begin + timeout_s - time.monotonic()))
    took_s = time.monotonic() - begin
    for process in ranks:
        if process.is_alive():
            os.kill(process.pid, signal.SIGABRT)
            process.join()
    return took_s


def _be(program: Program, rank: int, num_ranks: int, port: int, log: Path, watch: Watch) -> None:
    """The life of a rank: as if it had been started by a launcher."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    faulthandler.enable(file=sys.stderr)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    os.environ |= {"LOCAL_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    watch.install()
    program(rank)


def phase_of(note: Note) -> str:
    """Where a rank was."""
    return PHASES[note.phase]
