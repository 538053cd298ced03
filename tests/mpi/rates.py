"""How fast each transport moves the slots of one container, against a plain reader and writer of the same disk.

    .ci/mpirun N PYTHON -m tests.mpi.rates [BYTES_PER_S [SECONDS]]

Cold files on a disk with a cap of its own (root), all ranks at once, with the threads of a tier's
lanes, all ways interleaved; prints medians and spread in units of what the plain ones get.
"""

from __future__ import annotations

import mmap
import os
import statistics
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mlpo_hpc.cluster.node import start_mpi
from mlpo_hpc.state.node_file import Slots
from mlpo_hpc.storage.base import Container
from mlpo_hpc.storage.lane import THREADS_PER_LANE
from tests import testbed
from tests.mpi.files import opened

SLOT_BYTES = 16 * 2**20
SECONDS = 2.0
"""For each load; with more ranks the end, when some are done before others, weighs more."""
ROUNDS = 3
LOADS = {"read": (True, False), "write": (False, True), "both": (True, True)}


def move(container: Container, slots: range, writes: bool, done_at: list[float]) -> None:
    """Move slots with the threads of one lane."""
    jobs = list(slots)

    def work() -> None:
        with mmap.mmap(-1, SLOT_BYTES) as memory, memoryview(memory) as view:
            while jobs:
                slot = jobs.pop()
                (container.write if writes else container.read)(slot, view)

    threads = [threading.Thread(target=work) for _ in range(THREADS_PER_LANE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done_at.append(time.monotonic())


def rate(world: Any, container: Container, load: tuple[bool, bool]) -> float:
    """Bytes per second of all ranks, of the slower way; the first half of the slots is read, the other written."""
    half = container.num_slots // 2
    ends: list[float] = []
    ways = [(range(half), False), (range(half, 2 * half), True)]
    threads = [
        threading.Thread(target=move, args=(container, slots, writes, ends))
        for (slots, writes), active in zip(ways, load, strict=True)
        if active
    ]
    drop_all(world, container)
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, last = min(world.allgather(begin)), max(world.allgather(max(ends)))
    return world.size * half * SLOT_BYTES / (last - first)


def drop_all(world: Any, container: Container) -> None:
    """No page of any file is in memory, no write is under way."""
    world.Barrier()
    if world.rank == 0:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    world.Barrier()


def main() -> None:
    world = start_mpi()
    cap_bps = int(float(sys.argv[1])) if sys.argv[1:] else 200_000_000
    seconds = float(sys.argv[2]) if sys.argv[2:] else SECONDS
    num_slots = 2 * max(2, round(cap_bps * seconds / SLOT_BYTES / world.size))
    folder = world.bcast(tempfile.mkdtemp() if world.rank == 0 else None)
    with ExitStack() as endings:
        if world.rank == 0:
            size = 4 * world.size * num_slots * SLOT_BYTES
            disk = endings.enter_context(testbed.capped_disk(Path(folder), "capped", size))
        world.Barrier()
        measure(world, os.path.join(folder, "capped"), num_slots, lambda: disk.cap(cap_bps))
        world.Barrier()
    if world.rank == 0:
        os.rmdir(folder)


def measure(world: Any, folder: str, num_slots: int, cap: Any) -> None:
    kinds = {"plain": ("raw", "posix"), "hdf5 posix": ("hdf5", "posix"), "hdf5 mpiio": ("hdf5", "mpiio")}
    with ExitStack() as files:
        containers = {
            name: files.enter_context(
                opened(world, folder, Slots(SLOT_BYTES, num_slots), container=container, transport=transport)
            )[0]
            for name, (container, transport) in kinds.items()
        }
        for container in containers.values():  # the first write into a block is another matter
            move(container, range(num_slots), True, [])
        world.Barrier()
        if world.rank == 0:
            cap()
            print("MPI:", sys.modules["mpi4py.MPI"].Get_library_version().splitlines()[0][:40], flush=True)
        found: dict[tuple[str, str], list[float]] = {}
        for _ in range(ROUNDS):
            for load, ways in LOADS.items():
                for name, container in containers.items():
                    found.setdefault((load, name), []).append(rate(world, container, ways))
        if world.rank == 0:
            for load in LOADS:
                plain = statistics.median(found[load, "plain"])
                texts = [f"plain {plain / 1e6:.0f} MB/s"]
                for name in list(kinds)[1:]:
                    ratios = sorted(bps / plain for bps in found[load, name])
                    texts.append(f"{name} {statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})")
                print(f"{world.size} ranks, {load:5}: {', '.join(texts)}", flush=True)


if __name__ == "__main__":
    main()
