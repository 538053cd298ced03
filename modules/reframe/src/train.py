"""Train a small model whose state fits into host memory by half only: python train.py LOCAL_DIR SHARED_DIR."""

import os
import sys

import torch

import mlpo_hpc

WIDTH = 1024
STEPS = 10

mlpo_hpc.init_distributed()
world_rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
config = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "mlp_offload": {
        "tiers": [{"name": "local", "dir": sys.argv[1]}, {"name": "shared", "dir": sys.argv[2]}],
        "host_memory": 24_000_000 * int(os.environ["LOCAL_WORLD_SIZE"]),
        "chunk_bytes": "1MiB",
    },
}
# Four layers a rank: 42 MB of state each, on however many ranks.
model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(4 * world_size)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
engine, *_ = mlpo_hpc.initialize(model=model, optimizer=optimizer, config=config)

torch.manual_seed(world_rank)
rows = torch.randn(4, WIDTH, device=engine.device, dtype=torch.bfloat16)
for step in range(1, STEPS + 1):
    loss = (engine(rows) - rows).float().pow(2).mean()
    engine.backward(loss)
    engine.step()
    report = engine.optimizer.offload_report()
    if world_rank == 0:
        moved = ", ".join(f"{name} {tier['bytes_written']} bytes" for name, tier in report["tiers"].items())
        print(f"step {step}: loss {loss.item():.4f}, update {report['update_s']:.3f} s, {moved}", flush=True)
engine.destroy()
