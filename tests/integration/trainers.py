"""Training under transformers.Trainer, accelerate and Lightning, all cases in one launch for each rank.

``python -m tests.integration.trainers OUT DIR NAME...``: what each scenario found goes to ``OUT.<rank>``.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, set_z3_leaf_modules

import mlpo_hpc

Found = dict[str, Any]

SUB_GROUP_SIZE = 3000


def section(folder: Path) -> Found:
    """Little memory: most of the state is streamed."""
    tiers = [{"name": n, "dir": str(folder / n), "read_bps": 1e8, "write_bps": 1e8} for n in ("nvme", "pfs")]
    return {"tiers": tiers, "host_memory": 500_000, "chunk_bytes": 8192, "tokens": {"backend": "flock"}}


def ours(config: Found, folder: Path) -> Found:
    zero = {**config["zero_optimization"], "sub_group_size": SUB_GROUP_SIZE}
    return {**config, "zero_optimization": zero, "mlp_offload": section(folder)}


def stock(config: Found) -> Found:
    """The same training by DeepSpeed alone, with CPU offload."""
    zero = {**config["zero_optimization"], "sub_group_size": SUB_GROUP_SIZE, "offload_optimizer": {"device": "cpu"}}
    config = {**config, "zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
    return {key: value for key, value in config.items() if key != "mlp_offload"}


def state_of(engine: Any) -> Found:
    """Weights and optimizer state as exact sums of their bits, learning rates and the count of steps."""
    bits = {}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            moments = [safe_get_full_optimizer_state(param, key) for key in ("exp_avg", "exp_avg_sq")]
            values = [safe_get_full_fp32_param(param), *moments]
            bits[name] = [value.contiguous().view(torch.int32).to(torch.int64).sum().item() for value in values]
    groups = engine.optimizer.optimizer.param_groups
    return {"bits": bits, "lr": [group["lr"] for group in groups], "steps": engine.global_steps}


@contextmanager
def fresh() -> Iterator[None]:
    """Without what trainers keep in the process, and change in its environment."""
    try:
        with patch.dict(os.environ):
            yield
    finally:
        if accelerate := sys.modules.get("accelerate.state"):
            accelerate.AcceleratorState._reset_state(reset_partial_state=True)
            accelerate.GradientState._reset_state()
        if integration := sys.modules.get("transformers.integrations.deepspeed"):
            integration.unset_hf_deepspeed_config()


def refused(act: Callable[[], Any]) -> str:
    """What a call is refused with."""
    with fresh():
        try:
            act()
        except mlpo_hpc.MlpoError as error:
            return str(error)
    return ""


def remove(path: Path) -> None:
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(path)
    torch.distributed.barrier()


# ---- the examples ---------------------------------------------------------------------------


@contextmanager
def example(module: Any, arguments: list[str], by_stock: bool, folder: Path) -> Iterator[None]:
    """An example's program, with a configuration that streams; or the same without us."""
    made = module.ds_config
    change = stock if by_stock else lambda config: ours(config, folder)
    with (
        fresh(),
        patch.object(sys, "argv", [module.__file__, *arguments]),
        patch.object(module, "ds_config", lambda args: change(made(args))),
        patch.object(mlpo_hpc, "offload", nullcontext if by_stock else mlpo_hpc.offload),
    ):
        yield


def trainer_example(folder: Path) -> Found:
    """Straight, by stock, and gone on from a checkpoint; what is on disk; the exported weights."""
    from examples import trainer as module

    found: Found = {}
    small = ["--hidden", "32", "--layers", "2", "--context", "16", "--steps", "6", "--save-steps", "2"]
    for name, by_stock in (("straight", False), ("stock", True), ("resumed", False)):
        out = folder / ("stock" if by_stock else "trainer")
        if name == "resumed":
            remove(out / "checkpoint-6")
            small.append("--resume")
        with example(module, [*small, "--accumulation", "2", "--out", str(out)], by_stock, folder):
            trainer = module.main()
            found[name] = state_of(trainer.deepspeed)
            found[f"{name} losses"] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            found[f"{name} step"] = trainer.state.global_step
            if not by_stock:
                found["read"] = trainer.deepspeed.optimizer.offload_report()["bytes_read"]
            if name == "resumed":
                found |= evaluated(trainer) | exported(trainer, out)
            trainer.deepspeed.destroy()
        found[f"{name} folders"] = sorted(path.name for path in out.iterdir())
    return found


def evaluated(trainer: Any) -> Found:
    """Evaluation afterwards, outside of any context, by the engine that is there."""
    from examples.trainer import Text

    loss = trainer.evaluate(torch.utils.data.Subset(Text(16), range(8)))["eval_loss"]
    return {"evaluated": loss, "still ours": hasattr(trainer.deepspeed.optimizer, "offload_report")}


def exported(trainer: Any, out: Path) -> Found:
    """`mlpo ckpt export` of the newest checkpoint, loaded by transformers, against what the trainer saved itself."""
    from click.testing import CliRunner
    from safetensors.torch import load_file
    from transformers import LlamaForCausalLM

    from examples.trainer import Text
    from mlpo_hpc.cli import main

    trainer_state = out / "checkpoint-6"
    if torch.distributed.get_rank() != 0:
        return {}
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    with patch.dict(os.environ, alone, clear=True):  # as on a login node
        command = ["ckpt", "export", str(trainer_state), str(out / "exported"), "--to", "safetensors"]
        result = CliRunner().invoke(main, command)
    if result.exit_code != 0:
        return {"export": result.output}
    one, other = load_file(trainer_state / "model.safetensors"), load_file(out / "exported/model.safetensors")
    same = sorted(one) == sorted(other) and all(torch.equal(one[name], other[name]) for name in one)
    shutil.copy(trainer_state / "config.json", out / "exported")
    sys.modules["transformers.integrations.deepspeed"].unset_hf_deepspeed_config()
    text = Text(16).pieces[:8]
    losses = []
    for path in (trainer_state, out / "exported"):
        model = LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        losses.append(model(input_ids=text, labels=text).loss.item())
    return {"export": "done", "export equal": same, "export losses": losses}


def accelerate_example(folder: Path) -> Found:
    """Straight, by stock, and in two halves."""
    from examples import accelerate_loop as module

    found: Found = {}
    runs = [("straight", False, ["--steps", "5"]), ("stock", True, ["--steps", "5"])]
    runs += [("first", False, ["--steps", "3"]), ("second", False, ["--steps", "5", "--resume"])]
    for name, by_stock, arguments in runs:
        out = folder / {"straight": "whole", "stock": "whole_stock"}.get(name, "halves")
        arguments += ["--hidden", "64", "--accumulation", "2", "--out", str(out)]
        with example(module, arguments, by_stock, folder):
            engine, losses = module.main()
            found[name], found[f"{name} losses"] = state_of(engine), losses
            if not by_stock:
                found["read"] = engine.optimizer.offload_report()["bytes_read"]
            engine.destroy()
    return found


# ---- the programs of docs/trainers.md -------------------------------------------------------


def documented_trainer(folder: Path) -> Found:
    return run_documented("TrainingArguments", folder)


def documented_accelerate(folder: Path) -> Found:
    return run_documented("Accelerator(", folder)


def documented_lightning(folder: Path) -> Found:
    import lightning.pytorch.strategies as strategies

    with patch.object(strategies, "DeepSpeedStrategy", strategy_on_cpus):
        return run_documented("lightning.Trainer", folder)


def run_documented(word: str, folder: Path) -> Found:
    """The program with that word, as it stands; on the tiers of the tests."""
    from mlpo_hpc.engine.stage3 import OffloadStage3

    blocks = (Path(__file__).parents[2] / "docs/trainers.md").read_text().split("```python\n")[1:]
    (program,) = [code for block in blocks if word in (code := block.split("```")[0])]
    there = folder / word.strip("(")
    there.mkdir(exist_ok=True)
    steps: list[int] = []
    destroy = OffloadStage3.destroy

    def note(self: Any) -> None:
        steps.append(self.offload_report()["step"])
        destroy(self)

    tiers = json.dumps(section(folder)["tiers"])
    with (
        fresh(),
        chdir(there),
        patch.dict(os.environ, MLPO_HPC_TIERS=tiers),
        patch.object(OffloadStage3, "destroy", note),
    ):
        exec(compile(program, word, "exec"), {"__name__": "__main__"})
    return {"steps": steps, "left": sorted(path.name for path in there.iterdir())}


# ---- what is caught -------------------------------------------------------------------------


def trainer_mistakes(folder: Path) -> Found:
    """A context at the wrong place, DeepSpeed dropped, copies."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from examples.trainer import Text

    shape = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "mlp_offload": section(folder)}

    def make(use_cpu: bool = True, **changes: Any) -> Any:
        arguments = TrainingArguments(
            output_dir=str(folder / "mistakes"), max_steps=1, per_device_train_batch_size=1, use_cpu=use_cpu,
            deepspeed=config, report_to="none", disable_tqdm=True, save_strategy="no", max_grad_norm=0.0, **changes,
        )  # fmt: skip
        model = LlamaForCausalLM(LlamaConfig(num_attention_heads=1, **shape))
        return Trainer(model=model, args=arguments, train_dataset=Text(8))

    def around_constructor() -> None:
        with mlpo_hpc.offload(config):
            make()

    def train(use_cpu: bool = True) -> None:
        with mlpo_hpc.offload(config):
            make(use_cpu).train()

    found = {"constructor": refused(around_constructor), "copies": refused(lambda: train(use_cpu=False))}
    with patch.dict(os.environ, ACCELERATE_USE_CPU="true"):
        found["dropped"] = refused(train)
    return found


def accelerate_mistakes(folder: Path) -> Found:
    """The same of accelerate; what it is like under a launcher that a trainer does not know."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "mlp_offload": section(folder)}

    def train(**arguments: Any) -> None:
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(model.parameters())
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=dict(config)), **arguments)
        with mlpo_hpc.offload(config):
            model, optimizer = accelerator.prepare(model, optimizer)
            accelerator.backward(model(torch.ones(1, 8)).sum())
            optimizer.step()

    return {"copies": refused(train), "dropped": refused(lambda: train(cpu=True))}


# ---- models and optimizers ------------------------------------------------------------------


class Expert(torch.nn.Linear):
    """A frozen matrix and a trained low-rank difference, as LoRA has it."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden, hidden, bias=False)
        self.weight.requires_grad_(False)
        self.down = torch.nn.Linear(hidden, 8, bias=False)
        self.up = torch.nn.Linear(8, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.up(self.down(x))


class Experts(torch.nn.Module):
    """One expert for each input; ranks use different ones, so each must be gathered with all (a leaf of ZeRO-3)."""

    def __init__(self, hidden: int, count: int = 4) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList([Expert(hidden) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        which = x.detach().float().sum(1).mul(10).long().abs() % 3  # the last one is never used
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if (which == number).any():
                out[which == number] = expert(x[which == number])
        return out


def mixture(hidden: int = 48) -> torch.nn.Module:
    torch.manual_seed(5)
    layers = [torch.nn.Linear(hidden, hidden), Experts(hidden), torch.nn.Linear(hidden, hidden), Experts(hidden)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(hidden, hidden))
    set_z3_leaf_modules(model, [Experts])
    return model


def groups_of(model: torch.nn.Module) -> list[Found]:
    trained = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trained if param.ndim > 1], "weight_decay": 0.1, "lr": 1e-2},
        {"params": [param for param in trained if param.ndim == 1], "weight_decay": 0.0, "lr": 2e-2},
    ]


# ---- Lightning ------------------------------------------------------------------------------


def lightning_fit(folder: Path) -> Found:
    """Straight, by stock, and gone on from a checkpoint."""
    found: Found = {}
    for name, by_stock in (("straight", False), ("stock", True), ("resumed", False)):
        out = folder / f"lightning_{name}"
        resume = folder / "lightning_straight/step=4.ckpt" if name == "resumed" else None
        with fresh():
            trainer = fit(folder, out, by_stock, resume)
            engine = trainer.strategy.deepspeed_engine
            found[name] = state_of(engine)
            found[f"{name} step"] = trainer.global_step
            found[f"{name} folders"] = sorted(path.name for path in out.iterdir())
            engine.destroy()
    return found


def fit(folder: Path, out: Path, by_stock: bool, resume: Path | None) -> Any:
    import lightning.pytorch as lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    plain = {"zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 3}}
    config = stock(plain) if by_stock else ours(plain, folder)
    saving = ModelCheckpoint(
        dirpath=out, every_n_train_steps=2, save_top_k=2, monitor="step", mode="max", filename="{step}"
    )
    trainer = lightning.Trainer(
        accelerator="cpu", devices=torch.distributed.get_world_size(), strategy=strategy_on_cpus(config), max_steps=6,
        precision="bf16-true", accumulate_grad_batches=2, gradient_clip_val=0.5, callbacks=[saving], logger=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    with nullcontext() if by_stock else mlpo_hpc.offload(config):
        trainer.fit(lightning_module(), Pieces(), ckpt_path=resume)
    return trainer


def strategy_on_cpus(config: Found) -> Any:
    """Lightning's strategy refuses whatever is not CUDA; the rest of it does not mind."""
    import lightning.pytorch.strategies.deepspeed as module
    from lightning.pytorch.accelerators import CPUAccelerator

    class OnCpus(module.DeepSpeedStrategy):
        def setup_environment(self) -> None:
            with patch.object(module, "CUDAAccelerator", CPUAccelerator):
                super().setup_environment()

        def setup_distributed(self) -> None:
            with patch.object(module, "_validate_device_index_selection", lambda _: None):
                super().setup_distributed()

        @property
        def root_device(self) -> torch.device:
            return torch.device("cpu", int(os.environ["LOCAL_RANK"]))

    return OnCpus(config=config, process_group_backend="gloo")


class Pieces:
    """Batches by their number, which a checkpoint can hold."""

    def __init__(self) -> None:
        self.next = 0

    def __len__(self) -> int:
        return 100

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.next < len(self):
            self.next += 1
            seed = 10 * self.next + torch.distributed.get_rank()
            yield torch.randn(2, 48, generator=torch.Generator().manual_seed(seed))

    def state_dict(self) -> Found:
        return {"next": self.next}

    def load_state_dict(self, state: Found) -> None:
        self.next = state["next"]


def lightning_module() -> Any:
    import lightning.pytorch as lightning

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = mixture()

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return (self.net(batch).float() ** 2).mean()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(groups_of(self))
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Net()


def accelerate_features(folder: Path) -> Found:
    """Experts, low-rank training, groups and a schedule by group; also what is handed out afterwards."""
    return {
        "ours": mixture_by_accelerate(folder, by_stock=False),
        "stock": mixture_by_accelerate(folder, by_stock=True),
    }


def mixture_by_accelerate(folder: Path, by_stock: bool) -> Found:
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs
    from deepspeed.runtime.zero import GatheredParameters
    from safetensors.torch import load_file

    plain = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    }
    config = stock(plain) if by_stock else ours(plain, folder)
    with fresh():
        accelerator = Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
            kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
        )
        model = mixture()
        optimizer = torch.optim.AdamW(groups_of(model))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-2, 2e-2], total_steps=20)
        with nullcontext() if by_stock else mlpo_hpc.offload(config):
            engine, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        generator = torch.Generator().manual_seed(torch.distributed.get_rank())
        for _ in range(6):
            with accelerator.accumulate(engine):
                x = torch.randn(2, 48, generator=generator).bfloat16()
                accelerator.backward((engine(x).float() ** 2).mean())
                optimizer.step()
                schedule.step()
        found = state_of(engine)
        found["norm"] = float(engine.get_global_grad_norm())
        found["unwrapped"] = accelerator.unwrap_model(engine) is model
        out = folder / f"saved_{by_stock}"
        accelerator.save_model(engine, str(out))
        accelerator.wait_for_everyone()
        saved = load_file(out / "model.safetensors")
        same = []
        for name, param in model.named_parameters():
            with GatheredParameters(param):
                same.append(torch.equal(param.detach(), saved[name]))
        found["saved"] = all(same) and len(same) == len(saved)
        engine.destroy()
    return found


def main() -> None:
    torch.set_num_threads(1)
    out, folder, *names = sys.argv[1:]
    mlpo_hpc.init_distributed()
    found = {}
    for name in names:
        try:
            begin = time.perf_counter()
            gc.freeze()  # DeepSpeed collects at each initialisation: not through all that was imported
            found[name] = globals()[name](Path(folder))
            print(f"{name}: {time.perf_counter() - begin:.1f} s", flush=True)
        except Exception:
            found[name] = {"error": traceback.format_exc()}
            print(found[name]["error"], flush=True)
            break  # the other ranks may wait in a collective
    Path(f"{out}.{os.environ['RANK']}").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
