"""Run a module on N ranks of this machine, without an MPI launcher."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from mlpo_hpc.cluster.launch import free_port

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Outcome:
    """How one rank ended."""

    code: int
    text: str
    """Standard output and error together."""


def run_ranks(num_ranks: int, args: list[str], timeout_s: float, env: dict[str, str] | None = None) -> list[Outcome]:
    """Run ``python args...`` on each rank; when one fails the others are ended 10 s later."""
    base = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **(env or {})}
    base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
    base |= {"WORLD_SIZE": str(num_ranks), "LOCAL_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    processes = []
    for rank in range(num_ranks):
        mine = {**base, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, *args]
        processes.append(
            subprocess.Popen(command, env=mine, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
        )
    return [Outcome(p.returncode, text) for p, text in zip(processes, _collect(processes, timeout_s), strict=True)]


def _collect(processes: list[subprocess.Popen[str]], timeout_s: float) -> list[str]:
    deadline = time.monotonic() + timeout_s
    texts = []
    for process in processes:
        try:
            text, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            for other in processes:
                other.kill()
            text, _ = process.communicate()
            text += f"\n[killed after {timeout_s} s]"
        if process.returncode:
            deadline = min(deadline, time.monotonic() + 10)
        texts.append(text)
    return texts
