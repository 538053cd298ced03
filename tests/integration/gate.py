"""The exactness gate on one rank: each case trained by stock DeepSpeed and by us, bit for bit.

Run on every rank: ``python -m tests.integration.gate CASES.json RESULTS.json DIR...``
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

import mlpo_hpc
from mlpo_hpc.engine import records
from mlpo_hpc.engine.inject import _nothing_to_compile
from mlpo_hpc.state.codec.fp32 import record_bytes
from mlpo_hpc.state.layout import least_host_bytes
from mlpo_hpc.storage.base import round_up
from tests.integration import cases

Outcome = dict[str, Any]


def train(engine: Any, case: dict[str, Any], steps: int = cases.STEPS, first_step: int = 0) -> list[float]:
    """Train on data that depends on rank and step alone; return the losses."""
    losses = []
    rank = torch.distributed.get_rank()
    for step in range(first_step, first_step + steps):
        for micro in range(case["accumulation"]):
            generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
            x = torch.randn(4, 37, generator=generator).to(engine.device, cases.DTYPES[case["dtype"]])
            loss = (engine(x).float() ** 2).mean() * 10
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def outcome(engine: Any, case: dict[str, Any], losses: list[float]) -> Outcome:
    """Losses, weights and optimizer state, whole."""
    found: Outcome = {"losses": torch.tensor(losses, dtype=torch.float64)}
    keys = cases.STATE_KEYS.get(case["optimizer"], ["exp_avg", "exp_avg_sq"])
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters(param):
            found[f"{name} 16-bit"] = param.detach().clone()
        if param.requires_grad:
            found[f"{name} master"] = safe_get_full_fp32_param(param)
            for key in keys:
                found[f"{name} {key}"] = safe_get_full_optimizer_state(param, key)
    found["skipped"] = torch.tensor(engine.skipped_steps)
    return found


def run_stock(case: dict[str, Any]) -> tuple[Outcome, list[int]]:
    """Stock DeepSpeed; also the sizes of its subgroups."""
    model = cases.build(case)
    config = cases.stock_config(case)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=cases.optimizer(case, model), config=config, model_parameters=trainable(model)
    )
    result = outcome(engine, case, train(engine, case))
    sizes = [int(n) for n in engine.optimizer.fp16_partitioned_groups_flat_numel]
    engine.destroy()
    return result, sizes


def trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def host_bytes(case: dict[str, Any], numels: list[int], world_size: int) -> int:
    """Bytes a node for this case's budget."""
    vectors = {"adamw_amsgrad": 4, "sgd_momentum": 2}.get(case["optimizer"], 3)
    sizes = [record_bytes(n, vectors) for n in numels]
    items = min(max(numels), case["part_items"]) if in_parts(case) else max(numels)
    scratch = 2 * round_up(4 * items)  # a gradient and, with codec split, master weights
    least = least_host_bytes(sizes, scratch, have_tiers=True)
    everything = sum(sizes) + scratch
    share = {"minimum": least, "third": max(least, everything // 3), "all": everything}[case["budget"]]
    return share * world_size


def in_parts(case: dict[str, Any]) -> bool:
    """Whether this case's optimizer is known to update parts as it does the whole."""
    return case["optimizer"] in ("adamw_fused", "section_adam")


def run_ours(case: dict[str, Any], dirs: list[str], numels: list[int]) -> tuple[Outcome, dict[str, Any]]:
    model = cases.build(case)
    config = cases.our_config(case, dirs, host_bytes(case, numels, torch.distributed.get_world_size()))
    with patch.object(records, "PART_ITEMS", case["part_items"]):
        engine, *_ = mlpo_hpc.initialize(
            model=model, optimizer=cases.optimizer(case, model), config=config, model_parameters=trainable(model)
        )
    most_items = max(numels)
    assert engine.optimizer._state.records.part_items == (
        min(most_items, case["part_items"]) if in_parts(case) else most_items
    )
    losses = train(engine, case)
    pool = engine.optimizer._store.pipeline.pool
    totals = engine.optimizer._store.figures()
    facts = {
        "bytes_read": sum(tier["read"].nbytes for tier in totals["tiers"].values()),
        "misses": totals["misses"],
        "peak_bytes": pool.peak_bytes,
        "budget_bytes": pool.budget_bytes,
        "codec": engine.optimizer._state.records.codec,
        "files": [str(tier.container) for tier in engine.optimizer._store.pipeline.tiers],
    }
    result = outcome(engine, case, losses)
    engine.destroy()
    return result, facts


def compare(stock: Outcome, ours: Outcome) -> list[str]:
    """What differs, by name."""
    names = sorted(set(stock) | set(ours))
    return [name for name in names if name not in stock or name not in ours or not torch.equal(stock[name], ours[name])]


def run_case(case: dict[str, Any], dirs: list[str]) -> dict[str, Any]:
    """Train both; what differs, and figures of ours."""
    stock, numels = run_stock(case)
    ours, facts = run_ours(case, dirs, numels)
    moved = bool((stock["layers.0.weight master"] - ours["layers.0.weight master"]).isfinite().all())
    return {"differs": compare(stock, ours), "finite": moved, "skipped": int(stock["skipped"]), **facts}


@contextmanager
def any_type_and_nothing_to_compile() -> Iterator[None]:
    """torch computes fp16 on any CPU, DeepSpeed asks for fast units."""
    with _nothing_to_compile(deepspeed.ops), patch.object(get_accelerator(), "is_fp16_supported", lambda: True):
        yield


def main() -> None:
    torch.set_num_threads(1)
    case_file, result_file, *dirs = sys.argv[1:]
    with any_type_and_nothing_to_compile():
        backend = get_accelerator().communication_backend_name()
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False)
        results = [run_case(case, dirs) for case in json.loads(Path(case_file).read_text())]
    Path(f"{result_file}.{torch.distributed.get_rank()}").write_text(json.dumps(results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
