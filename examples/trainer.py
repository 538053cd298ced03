"""Train a small Llama with transformers.Trainer, its optimizer state offloaded.

    python examples/trainer.py --steps 20 --tier nvme=/local/scratch
    mpirun -n 2 python examples/trainer.py --steps 20 --tier nvme=/local/scratch --tier pfs=$SCRATCH/mlpo
    srun python examples/trainer.py --steps 20 --tier nvme=/local/scratch --resume

The model is made on the spot, the text is Python's own standard library. Checkpoints are kept, and the trained model is
saved, under --out; with --resume it goes on from the newest of them.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

import mlpo_hpc


class Text(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Pieces of `context` bytes, each to be predicted from those before it."""

    def __init__(self, context: int, limit_bytes: int = 2**20) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = bytearray(b"".join(file.read_bytes() for file in files)[:limit_bytes])
        text = torch.frombuffer(text[: len(text) // context * context], dtype=torch.uint8)
        self.pieces = text.view(-1, context).long()

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def ds_config(args: argparse.Namespace) -> dict[str, Any]:
    """What is "auto" the trainer fills in; there is no `offload_optimizer`: that is what mlpo_hpc is for."""
    section: dict[str, Any] = {"host_memory": args.host_memory} if args.host_memory else {}
    if args.tier:
        section["tiers"] = [dict(zip(("name", "dir"), tier.split("=", 1), strict=True)) for tier in args.tier]
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        "mlp_offload": section,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=20, help="optimizer steps")
    add("--save-steps", type=int, default=10, help="steps between two checkpoints")
    add("--hidden", type=int, default=256, help="width of the model")
    add("--layers", type=int, default=4)
    add("--context", type=int, default=128, help="bytes of text in a piece")
    add("--accumulation", type=int, default=1, help="micro-steps per optimizer step")
    add("--tier", action="append", metavar="NAME=DIR", help="a storage tier; give it several times")
    add("--host-memory", metavar="BYTES", help="for buffers and cache together, per node, such as 200GB")
    add("--out", type=Path, default=Path("runs/trainer"), help="folder for checkpoints and the trained model")
    add("--resume", action="store_true", help="go on from the newest checkpoint there")
    return parser.parse_args()


def main() -> Trainer:
    args = parse()
    mlpo_hpc.init_distributed()  # first: whatever started this process, all see one world
    config = ds_config(args)
    arguments = TrainingArguments(
        output_dir=str(args.out),
        max_steps=args.steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=args.accumulation,
        learning_rate=1e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5,
        bf16=True,
        use_cpu=not torch.accelerator.is_available(),  # on CPUs each rank would take itself for the only one
        deepspeed=config,
        save_steps=args.save_steps,
        save_total_limit=2,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
    )
    set_seed(1)
    heads = max(1, args.hidden // 64)
    model = LlamaForCausalLM(  # after TrainingArguments each rank makes its own part only, by deepspeed.zero.Init
        LlamaConfig(
            vocab_size=256,
            hidden_size=args.hidden,
            intermediate_size=4 * args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
        )
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Text(args.context))
    newest = get_last_checkpoint(str(args.out)) if args.resume and args.out.exists() else None
    with mlpo_hpc.offload(config):
        trainer.train(resume_from_checkpoint=newest)
    trainer.save_model(str(args.out / "model"))
    return trainer


if __name__ == "__main__":
    engine = main().deepspeed
    print(engine.optimizer.offload_report(), flush=True)
    engine.destroy()
