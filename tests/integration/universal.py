"""Train the same by stock DeepSpeed and by us, and save both: ``python -m tests.integration.universal save|load JSON``.

``save`` leaves ``FOLDER/NAME/stock/one`` and ``FOLDER/NAME/ours/one`` for each case.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

import mlpo_hpc
from tests.integration import cases
from tests.integration.gate import any_type_and_nothing_to_compile, host_bytes, train, trainable

STEPS = 5


def client_state() -> dict[str, Any]:
    return {"epoch": 3, "sampler": {"seen": (1, 2.5, None), "order": torch.arange(11)}}


def stock(case: dict[str, Any], **changes: Any) -> Any:
    model = cases.build(case)
    return deepspeed.initialize(
        model=model, optimizer=cases.optimizer(case, model), config=cases.stock_config(case) | changes,
        model_parameters=trainable(model),
    )[0]  # fmt: skip


def ours(case: dict[str, Any], dirs: list[str], numels: list[int]) -> Any:
    model = cases.build(case)
    config = cases.our_config(case, dirs, host_bytes(case, numels, torch.distributed.get_world_size()))
    return mlpo_hpc.initialize(
        model=model, optimizer=cases.optimizer(case, model), config=config, model_parameters=trainable(model)
    )[0]


def save(case: dict[str, Any], folder: str, dirs: list[str]) -> None:
    """Two checkpoints of the same state."""
    engine = stock(case)
    train(engine, case, STEPS)
    engine.save_checkpoint(f"{folder}/stock", "one", client_state())
    numels = [int(n) for n in engine.optimizer.fp16_partitioned_groups_flat_numel]
    engine.destroy()
    engine = ours(case, dirs, numels)
    train(engine, case, STEPS)
    engine.save_checkpoint(f"{folder}/ours", "one", client_state())
    engine.destroy()


def main() -> None:
    torch.set_num_threads(1)
    args = json.loads(sys.argv[2])
    with any_type_and_nothing_to_compile():
        backend = get_accelerator().communication_backend_name()
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False)
        for name, case in args["cases"].items():
            globals()[sys.argv[1]](case, f"{args['folder']}/{name}", args["dirs"])
    Path(f"{args['out']}.{torch.distributed.get_rank()}").touch()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
