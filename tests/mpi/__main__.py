"""Run the MPI tests on this rank: ``mpirun -n N python -m tests.mpi [bodies|files|exports]``.

The same bodies on 1, 2 and 4 ranks. Each has its own timeout, for deadlock is how such code
fails; a rank that fails or hangs ends the world.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from pathlib import Path

import torch  # noqa: F401  before MPI starts, as in training scripts: what it registers for the exit is then done last

from mlpo_hpc.cluster.node import start_mpi
from tests.mpi import bodies, exports, files

TIMEOUT_S = 120
RECORDS = "MPI_TEST_RECORDS"
"""Folder in which each rank leaves a file as its last act."""


def main() -> None:
    faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)  # also what comes before and after the bodies may hang
    world = start_mpi()
    if world.rank == 0:
        library = sys.modules["mpi4py.MPI"].Get_library_version().split()
        print("MPI:", *library[:4], flush=True)
    everything = (bodies, files, exports)
    modules = [module for module in everything if not sys.argv[1:] or module.__name__.endswith(sys.argv[1])]
    tests = [body for module in modules for name, body in vars(module).items() if name.startswith("test_")]
    for body in tests:
        begin = time.monotonic()
        faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)
        body(world)
        world.Barrier()
        if world.rank == 0:
            print(f"{body.__name__} on {world.size} ranks: passed in {time.monotonic() - begin:.1f} s", flush=True)
    faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)
    if world.rank == 0:
        print(f"{len(tests)} passed, 0 failed", flush=True)
    left = files.leave_without_destroy(world) if files in modules else None
    sys.stdout.flush()
    if records := os.environ.get(RECORDS):
        (Path(records) / f"finished.{world.rank}").touch()
    globals()["left"] = left  # to the interpreter's end


if __name__ == "__main__":
    main()
