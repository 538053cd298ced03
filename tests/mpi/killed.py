"""Two ranks share a token; the one that holds it is killed, as by the kernel when memory runs out."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from mlpo_hpc.cluster.node import start_mpi
from tests.mpi.__main__ import RECORDS
from tests.mpi.bodies import window_tokens

HOLDING, SURVIVED = "holding", "survived"


def wait_for(path: Path, timeout_s: float = 60.0) -> float:
    """When a file was made."""
    deadline = time.monotonic() + timeout_s
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return path.stat().st_mtime


def main() -> None:
    world = start_mpi()
    records = Path(os.environ[RECORDS])
    token, _, _ = window_tokens(world, timeout_s=600)
    if world.rank == 0:
        token.acquire()
    world.Barrier()
    if world.rank == 0:
        time.sleep(0.5)  # the other one waits by now
        (records / HOLDING).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    with token:
        (records / SURVIVED).touch()


if __name__ == "__main__":
    main()
