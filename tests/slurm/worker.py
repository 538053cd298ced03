"""One rank under srun: where it finds itself, and with whom it shares a token and a disk."""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

import mlpo_hpc
from mlpo_hpc.cluster.node import find_node
from mlpo_hpc.tokens.open import Resource, open_tokens, pick_backend


def look(scratch: Path) -> dict[str, object]:
    node = find_node()
    backend, reason = pick_backend(node)
    with ExitStack() as endings:
        writing = open_tokens(backend, [Resource("nvme", "nvme", 1)], node, 60, endings)[0][1]
        if node.node_rank == 0:
            writing.acquire()  # on both nodes at once: each has its own
        dist.barrier()
        locked = writing.locked()
        holders = [process.world_rank for process in writing.holders()]
        dist.barrier()
        if node.node_rank == 0:
            writing.release()
            (scratch / node.host).touch()
        dist.barrier()
        seen = sorted(path.name for path in scratch.glob("n*"))
        dist.barrier()
        if node.node_rank == 0:
            (scratch / node.host).unlink()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {
        "host": node.host,
        "node": [node.node_rank, node.node_size],
        "backend": backend,
        "reason": reason,
        "locked": locked,
        "holders": holders,
        "seen": seen,
        "environ": {name: os.environ[name] for name in names},
    }


def main() -> None:
    scratch, out = map(Path, sys.argv[1:])
    mlpo_hpc.init_distributed()
    (out / f"rank.{dist.get_rank()}").write_text(json.dumps(look(scratch)))
    dist.barrier()
    dist.destroy_process_group()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        mpi.Finalize()
    os._exit(0)


if __name__ == "__main__":
    main()
