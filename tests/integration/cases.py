"""The cases of the exactness gate: what varies, and the models and configurations it means."""

from __future__ import annotations

from typing import Any

import torch

SUB_GROUP_SIZE = 2000
STEPS = 10

FACTORS: dict[str, list[Any]] = {
    "ranks": [1, 2],
    "dtype": ["bf16", "fp32", "fp16"],
    "accumulation": [1, 4],
    "accumulate_in": [None, "fp32"],
    "clipping": [0.0, 0.05],
    "feature": ["plain", "frozen", "never_used", "two_groups", "offload_param", "zero_init"],
    "optimizer": ["adamw_fused", "adamw", "adamw_amsgrad", "sgd_momentum", "section_adam"],
    "order": ["alternate", "sequential"],
    "budget": ["minimum", "third", "all"],
    "tiers": [1, 2, 3],
    "placement": ["adaptive", "proportional", "static"],
    "prefetch": ["auto", 0, 1],
    "format": ["auto", "fp32"],
    "part_items": [2**20, 128],
    "tokens": ["flock", "off"],
    "files": ["raw", "hdf5"],
}

CORE = ["ranks", "dtype", "accumulation", "clipping", "feature", "order", "budget"]
"""Factors of which `make test-all` runs the whole product; the others vary at random with them."""

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
STATE_KEYS = {"adamw_amsgrad": ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"], "sgd_momentum": ["momentum_buffer"]}


class Net(torch.nn.Module):
    """Layers of odd sizes; `idle` fills whole subgroups and is never used."""

    def __init__(self, feature: str) -> None:
        super().__init__()
        sizes = [(37, 61), (61, 53), (53, 67), (67, 59), (59, 43), (43, 71), (71, 61), (61, 37)]
        self.layers = torch.nn.ModuleList([torch.nn.Linear(a, b) for a, b in sizes])
        self.idle = torch.nn.Linear(89, 71) if feature == "never_used" else None
        if feature == "frozen":
            self.layers[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x


def build(case: dict[str, Any]) -> Net:
    """The same model for the same case."""
    torch.manual_seed(7)
    if case["feature"] != "zero_init":
        return Net(case["feature"])
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=ds_config(case)):
        return Net(case["feature"])


def optimizer(case: dict[str, Any], model: Net) -> torch.optim.Optimizer | None:
    """The client optimizer; None where the configuration has an `optimizer` section."""
    params: Any = [p for p in model.parameters() if p.requires_grad]
    if case["feature"] == "two_groups":
        params = [
            {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1, "lr": 1e-2},
            {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0, "lr": 2e-2},
        ]
    kind = case["optimizer"]
    if kind == "sgd_momentum":
        return torch.optim.SGD(params, lr=1e-2, momentum=0.9)
    if kind == "section_adam":
        return None
    return torch.optim.AdamW(params, lr=1e-2, fused=kind == "adamw_fused", amsgrad=kind == "adamw_amsgrad")


def ds_config(case: dict[str, Any]) -> dict[str, Any]:
    """What both sides get; stock adds where its optimizer state is."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": case["accumulation"],
        "gradient_clipping": case["clipping"],
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": SUB_GROUP_SIZE,
            "stage3_param_persistence_threshold": 40,
            "reduce_bucket_size": 6000,
        },
    }
    if case["feature"] == "offload_param":
        config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    if case["dtype"] == "bf16":
        config["bf16"] = {"enabled": True}
    if case["dtype"] == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 3, "hysteresis": 1}
    if case["accumulate_in"]:
        config["data_types"] = {"grad_accum_dtype": case["accumulate_in"]}
    if case["optimizer"] == "section_adam":
        config["optimizer"] = {"type": "Adam", "params": {"lr": 1e-2, "betas": [0.9, 0.98], "weight_decay": 0.05}}
    return config


def stock_config(case: dict[str, Any]) -> dict[str, Any]:
    """Stock ZeRO-3 with CPU offload and the same torch optimizer."""
    config = ds_config(case)
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    config["zero_force_ds_cpu_optimizer"] = False
    if "optimizer" in config:
        config["optimizer"]["params"] |= {"torch_adam": True, "fused": True}
    return config


def our_config(case: dict[str, Any], dirs: list[str], host_bytes: int) -> dict[str, Any]:
    """The same with a section of ours."""
    config = ds_config(case)
    tiers = [
        {"name": f"tier{i}", "dir": path, "read_bps": 3e8 / (i + 1), "write_bps": 2e8 / (i + 1)}
        for i, path in enumerate(dirs[: case["tiers"]])
    ]
    if case["files"] == "hdf5":
        # Under an MPI launcher or on one rank; else its bytes go by posix.
        tiers[-1] |= {"container": "hdf5", "transport": "mpiio"}
    static = {"static": [3, 2, 1][: len(tiers)]}
    config["mlp_offload"] = {
        "tiers": tiers,
        "host_memory": host_bytes,
        "order": case["order"],
        "placement": static if case["placement"] == "static" else case["placement"],
        "prefetch": case["prefetch"],
        "state_format": case["format"],
        "chunk_bytes": 8192,
        "tokens": {"backend": case["tokens"]},
    }
    return config
