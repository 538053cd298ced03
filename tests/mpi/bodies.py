"""Bodies of the MPI tests: each takes the world and runs on any number of ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from mlpo_hpc.cluster import launch

if TYPE_CHECKING:
    from mpi4py import MPI

ROOT = Path(__file__).parent.parent.parent


def test_ranks_of_the_launcher_are_those_of_mpi(world: MPI.Intracomm) -> None:
    assert launch.prepare() in ("Open MPI", "MPICH", "single")
    assert int(os.environ["RANK"]) == world.rank
    assert int(os.environ["WORLD_SIZE"]) == world.size
    meeting = world.allgather((os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]))
    assert len(set(meeting)) == 1


def test_the_training_world_gathers_and_agrees(world: MPI.Intracomm) -> None:
    import torch.distributed as dist

    from mlpo_hpc.cluster.node import find_node
    from mlpo_hpc.cluster.verdict import gather, raise_together
    from mlpo_hpc.errors import ConfigError

    dist.init_process_group("gloo")
    assert gather(world.rank) == list(range(world.size))
    node = find_node()
    assert (node.world_rank, node.world_size) == (world.rank, world.size)
    assert 0 <= node.node_rank < node.node_size <= world.size
    last = world.size - 1
    try:
        raise_together(ConfigError("no tier") if world.rank == last else None)
    except ConfigError as error:
        text = str(error)
    assert f"rank {last} on" in text
    assert set(world.allgather(text)) == {text}
    dist.destroy_process_group()


def test_an_uncaught_exception_ends_the_world(world: MPI.Intracomm) -> None:
    """In a world of its own, started by rank 0: the others of that world wait for ever."""
    if world.rank:
        return
    code = (
        "from mlpo_hpc.cluster.node import start_mpi\n"
        "world = start_mpi()\n"
        "if world.rank == world.size - 1: raise RuntimeError('rank is gone')\n"
        "world.Barrier()\n"
    )
    clean = {
        key: value for key, value in os.environ.items() if not key.startswith(("OMPI_COMM", "PMI", "PMIX", "PRTE"))
    }
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(code)
        command = [str(ROOT / ".ci/mpirun"), "2", sys.executable, str(script)]
        done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode != 0
    assert "rank is gone" in done.stdout + done.stderr
