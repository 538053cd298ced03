"""Run a module on N ranks of this machine, without an MPI launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mlpo_hpc.cluster.network import first_free_port
from tests.zygote import Forked, Zygote

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Outcome:
    """How one rank ended."""

    code: int
    text: str
    """Standard output and error together."""

    def finished(self, record: Path) -> bool:
        """Whether the rank did all its work, by the record that it leaves as its last act, and by its exit code.

        gloo sometimes aborts at interpreter exit when all is done
        (https://github.com/pytorch/pytorch/issues/190489): that alone does not count.
        """
        return record.exists() and self.code in (0, -signal.SIGABRT)


def run_ranks(num_ranks: int, args: list[str], timeout_s: float, env: dict[str, str] | None = None) -> list[Outcome]:
    """Run ``python args...`` on each rank; once one failed the others have 10 s to end by themselves."""
    base = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **(env or {})}
    base = {name: value for name, value in base.items() if value}  # an empty value takes a default away
    base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(first_free_port()), "PYTHONPATH": str(ROOT)}
    base |= {"WORLD_SIZE": str(num_ranks), "LOCAL_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    with ExitStack() as files:
        logs = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(num_ranks)]
        processes = [_start(rank, args, base, log) for rank, log in enumerate(logs)]
        killed = _wait(processes, timeout_s)
        return [_outcome(process, log, process in killed) for process, log in zip(processes, logs, strict=True)]


FORKED = "tests.integration.worker"
"""A module of many launches: its ranks are forked from one process."""
IMPORTED_WITH = ("DS_", "OMP_", "PYTHON", "LD_")
"""What matters to a process before it imports anything."""
_zygotes: dict[str, Zygote] = {}


def _start(rank: int, args: list[str], base: dict[str, str], log: IO[str]) -> subprocess.Popen[bytes] | Forked:
    mine = {**base, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    if args[:2] == ["-m", FORKED]:
        early = {name: value for name, value in mine.items() if name.startswith(IMPORTED_WITH)}
        key = json.dumps(early, sort_keys=True)
        if key not in _zygotes:
            _zygotes[key] = Zygote(FORKED, {**os.environ, **early})
        return Forked(_zygotes[key], args[1:], mine, log)
    return subprocess.Popen([sys.executable, *args], env=mine, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)


def _wait(processes: list[Any], timeout_s: float) -> list[Any]:
    """Wait for all; return those that had to be killed."""
    deadline = time.monotonic() + timeout_s
    failed = False
    while running := [process for process in processes if process.poll() is None]:
        if not failed and any(process.returncode for process in processes):
            failed = True
            deadline = min(deadline, time.monotonic() + 10)
        if time.monotonic() > deadline:
            for process in running:
                process.kill()
                process.wait()
            return running
        time.sleep(0.05)
    return []


def _outcome(process: Any, log: IO[str], killed: bool) -> Outcome:
    log.seek(0)
    return Outcome(process.returncode, log.read() + ("\n[killed by the test]" if killed else ""))
