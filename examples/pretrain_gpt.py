"""Pre-train a GPT on text, its optimizer state offloaded to several tiers of storage at once.

Runs alone, under mpirun, srun or torchrun:

    python examples/pretrain_gpt.py --size tiny --steps 20
    mpirun -n 2 python examples/pretrain_gpt.py --tier nvme=/local/scratch --tier pfs=$SCRATCH/mlpo
    torchrun --nproc-per-node 4 examples/pretrain_gpt.py --size 7b --host-memory 200GB

With --checkpoint it can be stopped at any time, by USR2, TERM or a stop file: it saves and exits with 85.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.nn import functional

import mlpo_hpc
from mlpo_hpc.config import read_ds_config
from mlpo_hpc.telemetry.picture import draw_run
from mlpo_hpc.telemetry.progress import StepProgress

VOCABULARY = 256  # bytes
SAVE_TIMES = "save_times.json"  # beside the checkpoints: how long the last one took


@dataclass(frozen=True)
class Shape:
    """A decoder's size."""

    layers: int
    hidden: int
    heads: int


SIZES = {
    "tiny": Shape(4, 256, 4),  # 3 M parameters
    "demo": Shape(8, 768, 12),  # 57 M
    "125m": Shape(12, 768, 12),
    "350m": Shape(24, 1024, 16),
    "1.3b": Shape(24, 2048, 16),
    "7b": Shape(32, 4096, 32),
    "13b": Shape(40, 5120, 40),
    "30b": Shape(48, 7168, 56),
    "70b": Shape(86, 8192, 64),
}


class Linear(nn.Linear):
    """Multiplies in `compute_dtype`, whatever the type of its weights."""

    compute_dtype = torch.float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        return functional.linear(x, self.weight.to(self.compute_dtype), bias)


class Norm(nn.LayerNorm):
    """Layer norm in the type of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1, self.norm2 = Norm(shape.hidden), Norm(shape.hidden)
        self.qkv, self.out = Linear(shape.hidden, 3 * shape.hidden), Linear(shape.hidden, shape.hidden)
        self.up, self.down = Linear(shape.hidden, 4 * shape.hidden), Linear(4 * shape.hidden, shape.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        split = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, hidden // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A plain decoder over bytes; returns the mean loss in nats."""

    def __init__(self, shape: Shape, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, shape.hidden)
        self.places = nn.Embedding(context, shape.hidden)
        self.blocks = nn.ModuleList([Block(shape) for _ in range(shape.layers)])
        self.norm = Norm(shape.hidden)
        self.head = Linear(shape.hidden, VOCABULARY, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Predict each byte from those before it. `text`: (batch, context + 1) byte values."""
        inputs, targets = text[:, :-1], text[:, 1:]
        x = self.bytes(inputs) + self.places(torch.arange(inputs.shape[1], device=inputs.device))
        x = x.to(Linear.compute_dtype)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1))


def initialise(model: Gpt, layers: int) -> None:
    """Small normal weights, smaller where they add to the residual stream."""
    for name, parameter in model.named_parameters():
        residual = name.endswith(("out.weight", "down.weight"))
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
            if parameter.ndim > 1 and torch.distributed.get_rank() == 0:
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * layers) if residual else 1))


def read_text(paths: list[Path], limit_bytes: int) -> torch.Tensor:
    """Bytes of the given files and folders, in order of their names."""
    files = sorted(f for path in paths for f in (path.rglob("*.py") if path.is_dir() else [path]) if f.is_file())
    text = bytearray()
    for file in files:
        text += file.read_bytes()
        if len(text) >= limit_bytes:
            break
    if not text:
        raise SystemExit(f"no text found in {[str(path) for path in paths]}")
    return torch.frombuffer(text, dtype=torch.uint8)


def sample(text: torch.Tensor, batch: int, context: int, generator: torch.Generator) -> torch.Tensor:
    """Random pieces of the text, as (batch, context + 1) int64."""
    starts = torch.randint(len(text) - context - 1, (batch,), generator=generator)
    return torch.stack([text[start : start + context + 1] for start in starts]).long()


def pick_compute_dtype(name: str, dtype: str) -> torch.dtype:
    """`auto`: the type of the weights, but fp32 on CPUs without units for it, which are far faster that way."""
    if name != "auto":
        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    if get_accelerator().device_name() != "cpu":
        return wanted
    flags = Path("/proc/cpuinfo").read_text().split()
    units = {"bf16": {"amx_bf16", "avx512_bf16", "bf16"}, "fp16": {"avx512_fp16", "amx_fp16"}, "fp32": set(flags)}
    return wanted if units[dtype] & set(flags) else torch.float32


def ds_config(args: argparse.Namespace) -> dict[str, Any]:
    """The DeepSpeed configuration of this run; `--config` replaces it."""
    if args.config:
        return read_ds_config(args.config)
    section: dict[str, Any] = {}
    if args.host_memory:
        section["host_memory"] = args.host_memory
    if args.tier:
        kept = {"container": "hdf5", "keep": True} if args.keep else {}
        section["tiers"] = [dict(zip(("name", "dir"), tier.split("=", 1), strict=True)) | kept for tier in args.tier]
    return {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": args.accumulation,
        "gradient_clipping": args.clip,
        "steps_per_print": 10**9,
        args.dtype: {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr / 5, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": args.lr, "warmup_num_steps": 5, "warmup_type": "linear"},
        },
        "zero_optimization": {"stage": 3},
        "mlp_offload": section,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--size", choices=SIZES, default="demo", help="model shape (default: demo, 57 M parameters)")
    add("--steps", type=int, default=30, help="optimizer steps")
    add("--context", type=int, default=256, help="bytes of text that a prediction may look back")
    add("--micro-batch", type=int, default=2, help="pieces of text a rank and micro-step")
    add("--accumulation", type=int, default=1, help="micro-steps per optimizer step")
    add("--clip", type=float, default=1.0, help="largest norm of the gradient; 0: no clipping")
    add("--lr", type=float, default=4e-4, help="learning rate after 5 steps of warm-up")
    add("--dtype", choices=["bf16", "fp16", "fp32"], default="bf16", help="type of weights and gradients")
    add("--compute-dtype", choices=["auto", "bf16", "fp16", "fp32"], default="auto", help="type to multiply in")
    add("--data", type=Path, nargs="+", help="files, or folders of .py files (default: Python's standard library)")
    add("--tier", action="append", metavar="NAME=DIR", help="a storage tier; give it several times")
    add(
        "--keep",
        action="store_true",
        help="leave the state files of all tiers behind; examples/read_moments.py reads them",
    )
    add("--host-memory", metavar="BYTES", help="for buffers and cache together, per node, such as 200GB")
    add("--config", metavar="FILE", help="a DeepSpeed configuration of your own (JSON), instead of the above")
    add("--checkpoint", type=Path, metavar="DIR", help="save there when it ends; go on from there if it holds one")
    add("--save-every", type=int, metavar="STEPS", help="save there after so many steps, too")
    add("--lead", type=float, metavar="SECONDS", help="from the stop signal to the time limit: is it enough to save?")
    add("--out", type=Path, default=Path("runs/pretrain_gpt"), help="folder for the picture and the figures")
    add("--seed", type=int, default=1)
    args = parser.parse_args()
    if any("=" not in tier for tier in args.tier or ()):
        parser.error("--tier wants NAME=DIR")
    if args.keep and not args.tier:
        parser.error("--keep needs --tier: it says where the files stay")
    if args.config and (args.tier or args.host_memory):
        parser.error("--config says where the state goes: leave out --tier and --host-memory")
    return args


def save(engine: Any, directory: Path, step: int, longest_step_s: float) -> None:
    """Save a checkpoint, and beside it how long that took."""
    begin = time.perf_counter()
    engine.save_checkpoint(str(directory), client_state={"step": step})
    times = {"save_s": time.perf_counter() - begin, "step_s": longest_step_s}
    if torch.distributed.get_rank() == 0:
        unfinished = directory / f"{SAVE_TIMES}.partial"
        unfinished.write_text(json.dumps(times))
        unfinished.rename(directory / SAVE_TIMES)


def check_lead(directory: Path, lead_s: float) -> None:
    """Say if the stop signal comes too late: the step at hand is finished before the checkpoint is saved."""
    times = json.loads((directory / SAVE_TIMES).read_text())
    needed_s = times["step_s"] + times["save_s"]
    if needed_s > lead_s:
        print(
            f"the stop signal comes {lead_s:.0f} s before the time limit, but the last checkpoint took "
            f"{times['save_s']:.1f} s after steps of up to {times['step_s']:.1f} s: the next one may not be finished. "
            f"Give the job --signal=B:USR1@{math.ceil(2 * needed_s)} or more",
            flush=True,
        )


def main() -> None:
    args = parse()
    stop = mlpo_hpc.StopRequest() if args.checkpoint else None  # what cannot save ends by TERM as ever
    mlpo_hpc.init_distributed()
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    shape, config = SIZES[args.size], ds_config(args)
    dtype = next((name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled")), "fp32")
    Linear.compute_dtype = pick_compute_dtype(args.compute_dtype, dtype)
    plain = {key: value for key, value in config.items() if key != "mlp_offload"}
    torch.manual_seed(args.seed)
    with deepspeed.zero.Init(config_dict_or_path=plain):
        model = Gpt(shape, args.context)
    initialise(model, shape.layers)
    engine, *_ = mlpo_hpc.initialize(model=model, model_parameters=model.parameters(), config=config)
    begin = 0
    path, state = engine.load_checkpoint(str(args.checkpoint)) if args.checkpoint else (None, None)
    if path is not None:
        begin = state["step"]
        if rank == 0:
            print(f"resumed from {args.checkpoint} at step {begin}", flush=True)
            if args.lead and (args.checkpoint / SAVE_TIMES).exists():
                check_lead(args.checkpoint, args.lead)

    text = read_text(args.data or [Path(sysconfig.get_paths()["stdlib"])], limit_bytes=32 * 2**20)
    batch, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    text_tokens = batch * args.context * accumulation * world_size
    if rank == 0:
        count = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
        print(
            f"{count / 1e6:.1f} M parameters on {world_size} ranks, {text_tokens} text tokens a step, "
            f"{dtype} weights multiplied in {Linear.compute_dtype}",
            flush=True,
        )
    progress, done = StepProgress(args.steps, begin, quiet=rank > 0), begin
    for step in range(begin, args.steps):
        total = torch.zeros((), device=engine.device)
        for micro in range(accumulation):
            # What a rank sees depends on the step alone, so that a resumed run sees the same.
            seed = ((args.seed * 10**6 + step) * accumulation + micro) * world_size + rank
            pieces = sample(text, batch, args.context, torch.Generator().manual_seed(seed))
            loss = engine(pieces.to(engine.device))
            engine.backward(loss)
            engine.step()
            total += loss.detach() / (accumulation * world_size)
        torch.distributed.all_reduce(total)
        progress.step(total.item(), text_tokens, engine.optimizer.offload_report())
        engine.optimizer.record_loss(total.item(), text_tokens)  # for mlpo report
        done, stopping = step + 1, stop is not None and stop.requested()
        if args.checkpoint and (stopping or done == args.steps or done % (args.save_every or args.steps) == 0):
            save(engine, args.checkpoint, done, max(entry["iteration_s"] for entry in progress.history))
        if stopping:
            break
    progress.summary()
    if rank == 0 and progress.history:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "steps.json").write_text(json.dumps(progress.history, indent=1))
        draw_run(progress.history, args.out / "run.png", f"{args.size}, {world_size} ranks")
        print(f"picture: {args.out / 'run.png'}, figures: {args.out / 'steps.json'}", flush=True)
    engine.destroy()
    leave(mlpo_hpc.REQUEUE_EXIT_CODE if done < args.steps else 0)


def give_up(error: mlpo_hpc.MlpoError) -> None:
    """Say what is wrong, once, and end all ranks: the message says it, a traceback would bury it."""
    if not error.on_all_ranks or os.environ.get("RANK", "0") == "0":
        print(f"\n{error}", file=sys.stderr, flush=True)
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        time.sleep(1)  # launchers drop what they have not forwarded yet when they are told to abort
        mpi.COMM_WORLD.Abort(1)
    os._exit(1)


def leave(exit_code: int) -> None:
    """End this process without the interpreter's own teardown.

    gloo's threads sometimes abort there although all work is done:
    https://github.com/pytorch/pytorch/issues/190489
    """
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        mpi.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    try:
        main()
    except mlpo_hpc.MlpoError as failure:
        give_up(failure)
