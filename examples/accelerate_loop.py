"""A training loop of one's own with accelerate, the optimizer state offloaded.

    python examples/accelerate_loop.py --steps 20 --tier nvme=/local/scratch
    mpirun -n 2 python examples/accelerate_loop.py --steps 20 --tier nvme=/local/scratch --tier pfs=$SCRATCH/mlpo
    accelerate launch --use_deepspeed --num_processes 2 examples/accelerate_loop.py --tier nvme=/local/scratch

The model is made on the spot and learns to sort. The state of the training is saved under --out when it ends; with
--resume it goes on from there.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs, set_seed
from torch.utils.data import DataLoader, TensorDataset

import mlpo_hpc


def ds_config(args: argparse.Namespace) -> dict[str, Any]:
    """There is no `offload_optimizer`: that is what mlpo_hpc is for."""
    section: dict[str, Any] = {"host_memory": args.host_memory} if args.host_memory else {}
    if args.tier:
        section["tiers"] = [dict(zip(("name", "dir"), tier.split("=", 1), strict=True)) for tier in args.tier]
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": args.accumulation,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        "mlp_offload": section,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=20, help="optimizer steps")
    add("--hidden", type=int, default=512, help="width of the model")
    add("--accumulation", type=int, default=1, help="micro-steps per optimizer step")
    add("--tier", action="append", metavar="NAME=DIR", help="a storage tier; give it several times")
    add("--host-memory", metavar="BYTES", help="for buffers and cache together, per node, such as 200GB")
    add("--out", type=Path, default=Path("runs/accelerate_loop"), help="where the state of the training is saved")
    add("--resume", action="store_true", help="go on from there")
    return parser.parse_args()


def make_model(hidden: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(16, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, hidden), torch.nn.GELU(),
        torch.nn.Linear(hidden, 16),
    )  # fmt: skip


def main() -> tuple[Any, list[float]]:
    """Train; return the engine and the loss of each micro-step of this rank."""
    args = parse()
    mlpo_hpc.init_distributed()  # first: whatever started this process, all see one world
    config = ds_config(args)
    # accelerate knows the backends of accelerators only; on CPUs each rank would take itself for the only one.
    backend = None if torch.accelerator.is_available() else "gloo"
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        kwargs_handlers=[InitProcessGroupKwargs(backend=backend)],
    )
    set_seed(1)
    numbers = torch.randn(4096, 16)
    data = DataLoader(TensorDataset(numbers, numbers.sort().values), batch_size=8, shuffle=True)
    model = make_model(args.hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # accelerate steps a schedule once for each rank.
    warm_up = 5 * accelerator.num_processes
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=warm_up)
    with mlpo_hpc.offload(config):
        model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    if args.resume:
        accelerator.load_state(str(args.out))
    losses = []
    done = model.global_steps * args.accumulation  # restored with the rest
    for numbers, wanted in accelerator.skip_first_batches(data, done):
        if done >= args.steps * args.accumulation:
            break
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(numbers.bfloat16()).float(), wanted)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        done += 1
        losses.append(loss.item())
        accelerator.print(f"micro-step {done}: loss {loss.item():.4f}, learning rate {schedule.get_last_lr()[0]:.2e}")
    accelerator.save_state(str(args.out))
    return model, losses


if __name__ == "__main__":
    main()[0].destroy()
