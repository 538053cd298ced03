"""Measured on one rank: ``python -m tests.integration.measure speed|memory JSON``; writes JSON to ``<out>.RANK``."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import torch

import mlpo_hpc
from mlpo_hpc.cluster import memory as memory_module
from tests.testbed import CappedDisk

Args = dict[str, Any]


def build(args: Args) -> Any:
    """A stack of square layers, made under zero.Init, with little gathered at a time."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": args["sub_group_size"],
            "stage3_max_live_parameters": 10**6,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 10**6,
            "reduce_bucket_size": 2 * 10**6,
        },
    }
    mlpo_hpc.init_distributed()
    with deepspeed.zero.Init(config_dict_or_path=config):
        net = torch.nn.Sequential(*[torch.nn.Linear(args["hidden"], args["hidden"]) for _ in range(args["layers"])])
    tiers = [{"name": f"t{i}", "dir": path} for i, path in enumerate(args["dirs"])]
    section = {"tiers": tiers, "host_memory": args["host_memory"], "tokens": args.get("tokens", {})}
    return mlpo_hpc.initialize(model=net, model_parameters=net.parameters(), config={**config, "mlp_offload": section})[
        0
    ]


def backward(engine: Any, hidden: int) -> None:
    loss = (engine(torch.randn(1, hidden, dtype=torch.bfloat16)).float() ** 2).mean()
    engine.backward(loss)


class Sampler:
    """Samples what the block layer counts for each disk, every few milliseconds."""

    def __init__(self, disks: list[CappedDisk]) -> None:
        self._disks = disks
        self.samples: list[tuple[float, list[int]]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def look(self) -> list[int]:
        """Bytes read and written of each disk."""
        return [count for disk in self._disks for count in disk.moved_bytes().values()]

    def _run(self) -> None:
        while not self._stop.wait(0.005):
            self.samples.append((time.perf_counter(), self.look()))

    def busy_tenths(self, begin_s: float, end_s: float) -> int:
        """Tenths of a time span in which every disk moved bytes in both directions."""
        busy = 0
        for tenth in range(10):
            left, right = (begin_s + (end_s - begin_s) * (tenth + i) / 10 for i in (0, 1))
            inside = [counts for at, counts in self.samples if left <= at <= right]
            busy += bool(inside) and all(b > a for a, b in zip(inside[0], inside[-1], strict=True))
        return busy

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def speed(args: Args) -> Args:
    """Counts of the engine against those of the block layer, and how evenly the tiers work."""
    disks = [CappedDisk(Path(path), device) for path, device in zip(args["dirs"], args["devices"], strict=True)]
    sampler = Sampler(disks)
    engine = build(args)
    pipeline = engine.optimizer._store.pipeline
    pipeline.flush()
    before = sampler.look()
    totals, tenths = [0] * len(before), []
    figures = engine.optimizer._store.figures()
    for _ in range(args["steps"]):
        backward(engine, args["hidden"])
        begin = time.perf_counter()
        engine.step()
        tenths.append(sampler.busy_tenths(begin, time.perf_counter()))
    pipeline.flush()
    moved = [b - a for a, b in zip(before, sampler.look(), strict=True)]
    sampler.close()
    after = engine.optimizer._store.figures()
    totals = [
        after["tiers"][name][way].nbytes - figures["tiers"][name][way].nbytes
        for name in after["tiers"]
        for way in ("read", "write")
    ]
    report = engine.optimizer.offload_report()
    engine.destroy()
    return {"counted": totals, "moved": moved, "tenths": tenths, "report": report}


def turns(args: Args) -> Args:
    """Bytes that pass the tiers each way, and the time they take, over some updates without training between."""
    engine = build(args)
    seconds, moved = [], []
    for _ in range(args["steps"] + 1):
        backward(engine, args["hidden"])
        torch.distributed.barrier()
        begin = time.perf_counter()
        engine.step()
        engine.optimizer._store.pipeline.flush()
        torch.distributed.barrier()
        seconds.append(time.perf_counter() - begin)
        report = engine.optimizer.offload_report()
        moved.append({name: [tier["bytes_read"], tier["bytes_written"]] for name, tier in report["tiers"].items()})
    tokens = {
        name: tier["tokens"] | {"taken": tier["tokens_taken"], "wait_s": tier["wait_s"]}
        for name, tier in report["tiers"].items()
    }
    engine.destroy()
    return {"seconds": seconds[1:], "moved": moved[1:], "tokens": tokens}


def memory(args: Args) -> Args:
    """Peak resident memory of a whole run, start-up included."""
    with patch.object(memory_module, "available_bytes", lambda: 100 * 10**6):  # a node without any to spare
        engine = build(args)
    for _ in range(args["steps"]):
        backward(engine, args["hidden"])
        engine.step()
    pool = engine.optimizer._store.pipeline.pool
    local = sum(engine.optimizer._state.numels)
    found = {
        "peak_pool": pool.peak_bytes,
        "share": pool.budget_bytes,
        "local": local,
        "subgroups": len(engine.optimizer.fp16_groups),
    }
    engine.destroy()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {**found, "peak_rss": int(status["VmHWM"].split()[0]) * 1024}


def main() -> None:
    torch.set_num_threads(1)
    scenario, text = sys.argv[1:]
    args = json.loads(text)
    result = globals()[scenario](args)
    Path(f"{args['out']}.{os.environ['RANK']}").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
