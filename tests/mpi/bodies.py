"""Bodies of the MPI tests: each takes the world and runs on any number of ranks."""

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
from typing import TYPE_CHECKING

from mlpo_hpc.cluster import launch

if TYPE_CHECKING:
    from mpi4py import MPI


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


def window_tokens(world: MPI.Intracomm, permits: int = 1, timeout_s: float = 60):
    """One token over a window of this node's ranks, and counters beside it that it must protect."""
    from mlpo_hpc.tokens.mpi_window import WindowCounters, node_communicator
    from mlpo_hpc.tokens.ticket import Process, TicketToken

    node_comm = node_communicator(world.rank, world.size, world.size)
    processes = world.allgather(Process.this(world.rank, "here"))
    size = TicketToken.num_counters(world.size)
    counters = WindowCounters(node_comm, size + 3)
    token = TicketToken("writing on nvme", counters, 0, permits, world.rank, processes, timeout_s)
    return token, counters, size


def test_tickets_exclude_and_serve_in_order(world: MPI.Intracomm) -> None:
    """From an I/O thread, as in the engine; the protected counter is written without any atomic operation."""
    token, counters, free = window_tokens(world)
    turns, order = 200, []

    def work() -> None:
        rng = random.Random(world.rank)
        for _ in range(turns):
            token.acquire()
            ticket, served = counters.load(2 + world.rank) - 1, counters.load(1)
            order.append(ticket == served)  # all tickets before ours are back, none after it was served
            value = counters.load(free)
            if rng.random() < 0.05:
                time.sleep(0.0005)
            counters.store(free, value + 1)
            assert token.holders() == [token._processes[world.rank]]
            token.release()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    world.Barrier()
    assert counters.load(free) == turns * world.size, "somebody else was inside"
    assert len(order) == turns
    assert all(order), "first come first served: nobody waits for more than one turn of each other rank"
    assert not token.locked()
    counters.free()
    counters.free()


def test_permits_are_counted(world: MPI.Intracomm) -> None:
    token, counters, free = window_tokens(world, permits=2)
    most = 0
    for _ in range(100):
        with token:
            most = max(most, counters.add(free, 1) + 1)
            time.sleep(0.0002)
            counters.add(free, -1)
    assert max(world.allgather(most)) <= 2
    world.Barrier()
    counters.free()


def test_an_uncontended_turn_is_short(world: MPI.Intracomm) -> None:
    """Only said, not asserted: 50 us is the aim."""
    token, counters, _ = window_tokens(world)
    if world.rank == 0:
        begin = time.perf_counter()
        for _ in range(2000):
            token.acquire()
            token.release()
        print(f"acquire + release: {(time.perf_counter() - begin) / 2000 * 1e6:.1f} us", flush=True)
    world.Barrier()
    assert counters.load(0) == counters.load(1) == 2000, "every ticket came back"
    counters.free()


def test_a_wait_that_takes_too_long_names_the_holder(world: MPI.Intracomm) -> None:
    from mlpo_hpc.errors import StorageTimeout

    token, counters, _ = window_tokens(world, timeout_s=0.3)
    if world.rank == 0:
        token.acquire()
    world.Barrier()
    if world.rank == world.size - 1 and world.size > 1:
        try:
            token.acquire()
        except StorageTimeout as error:
            text = str(error)
        assert f"held by rank 0 (process {token._processes[0].pid}" in text
        assert "writing on nvme" in text
    world.Barrier()
    counters.free()


def test_the_engine_trains_the_same_with_every_backend(world: MPI.Intracomm) -> None:
    """Turns change who moves bytes when, never what is computed."""
    import torch

    import mlpo_hpc

    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    torch.set_num_threads(1)
    folder = world.bcast(tempfile.mkdtemp() if world.rank == 0 else None)
    sums = []
    for backend in ("off", "mpi", "flock"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "steps_per_print": 10**9,
            "zero_optimization": {"stage": 3, "sub_group_size": 1000},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "mlp_offload": {
                "tiers": [{"name": "disk", "dir": folder, "read_bps": 1e8, "write_bps": 1e8}],
                "host_memory": 130_000 + 20_000 * world.size,  # least for the smaller records of more ranks
                "chunk_bytes": 8192,
                "tokens": {"backend": backend, "timeout_s": 60},
            },
        }
        engine = mlpo_hpc.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        for step in range(4):
            x = torch.randn(1, 64, generator=torch.Generator().manual_seed(step * world.size + world.rank))
            engine.backward(engine(x.to(engine.device)).pow(2).mean())
            engine.step()
        flat = torch.cat([t.detach().float().flatten() for t in engine.optimizer.fp16_partitioned_groups_flat])
        sums.append(flat)
        engine.destroy()
    assert all(torch.equal(sums[0], other) for other in sums[1:])
    world.Barrier()
    assert os.listdir(folder) == []
    world.Barrier()
    if world.rank == 0:
        os.rmdir(folder)
    torch.distributed.destroy_process_group()
