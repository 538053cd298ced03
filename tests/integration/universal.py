"""Universal checkpoints on one rank: ``python -m tests.integration.universal save|load ARGUMENTS``, in JSON.

``save`` trains each case by stock DeepSpeed and by us, and saves ``FOLDER/NAME/stock/one`` and ``.../ours/one``;
``load`` lets stock DeepSpeed load the universal checkpoint ``FOLDER/NAME/ours/one_universal``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

import mlpo_hpc
from tests.integration import cases
from tests.integration.gate import any_type_and_nothing_to_compile, host_bytes, train, trainable

STEPS = 5
SCHEDULER = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 9}}}
Case = dict[str, Any]


def client_state() -> dict[str, Any]:
    return {"epoch": 3, "sampler": {"seen": (1, 2.5, None), "order": torch.arange(11)}}


def build(case: Case) -> torch.nn.Module:
    """With buffers and a tied weight."""
    model = cases.build(case)
    model.again = model.layers[0]
    model.register_buffer("halves", torch.arange(3.0) / 2)
    model.register_buffer("passing", torch.arange(2), persistent=False)
    return model


def stock(case: Case, **changes: Any) -> Any:
    model = build(case)
    config = cases.stock_config(case) | SCHEDULER | changes
    return deepspeed.initialize(
        model=model, optimizer=cases.optimizer(case, model), config=config, model_parameters=trainable(model)
    )[0]


def ours(case: Case, dirs: list[str], numels: list[int]) -> Any:
    model = build(case)
    config = cases.our_config(case, dirs, host_bytes(case, numels, torch.distributed.get_world_size())) | SCHEDULER
    return mlpo_hpc.initialize(
        model=model, optimizer=cases.optimizer(case, model), config=config, model_parameters=trainable(model)
    )[0]


def state(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Master weights and state of Adam, whole."""
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            yield f"{name} fp32", safe_get_full_fp32_param(param)
            for key in ("exp_avg", "exp_avg_sq"):
                yield f"{name} {key}", safe_get_full_optimizer_state(param, key)


def save(case: Case, folder: str, dirs: list[str]) -> None:
    engine = stock(case)
    train(engine, case, STEPS)
    engine.save_checkpoint(f"{folder}/stock", "one", client_state())
    numels = [int(n) for n in engine.optimizer.fp16_partitioned_groups_flat_numel]
    truth = dict(state(engine)) if case["optimizer"] in ("adamw", "adamw_fused") else {}
    engine.destroy()
    if torch.distributed.get_rank() == 0:
        torch.save(truth, f"{folder}/truth.pt")
    engine = ours(case, dirs, numels)
    train(engine, case, STEPS)
    engine.save_checkpoint(f"{folder}/ours", "one", client_state())
    engine.destroy()


def load(case: Case, folder: str, dirs: list[str]) -> None:
    """By the newest tag. To go on would show DeepSpeed's own faults: one step count for all, one group's settings."""
    engine = stock(case, checkpoint={"load_universal": True})
    path, client = engine.load_checkpoint(f"{folder}/ours")
    assert "one_universal" in str(path)
    truth, found = torch.load(f"{folder}/truth.pt"), dict(state(engine))
    assert set(found) == set(truth)
    for name, tensor in found.items():
        assert torch.equal(tensor.detach(), truth[name].detach()), name
    applied = STEPS - engine.skipped_steps
    assert {value["step"].item() for value in engine.optimizer.optimizer.state.values()} == {applied}
    assert (engine.global_steps, engine.skipped_steps > 0) == (STEPS, case["dtype"] == "fp16")
    assert engine.lr_scheduler.last_batch_iteration == applied - 1
    assert engine.optimizer.loss_scaler.dynamic == (case["dtype"] == "fp16")
    assert engine.optimizer.loss_scaler.cur_scale == (2.0**21 if case["dtype"] == "fp16" else 1)
    assert client["sampler"]["seen"] == (1, 2.5, None)
    assert torch.equal(client["sampler"]["order"], torch.arange(11))
    engine.destroy()


def main() -> None:
    torch.set_num_threads(1)
    args = json.loads(sys.argv[2])
    with any_type_and_nothing_to_compile():
        backend = get_accelerator().communication_backend_name()
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False)
        for name, case in args["cases"].items():
            {"save": save, "load": load}[sys.argv[1]](case, f"{args['folder']}/{name}", args["dirs"])
    Path(f"{args['out']}.{torch.distributed.get_rank()}").touch()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
