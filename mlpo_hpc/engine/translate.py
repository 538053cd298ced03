"""A DeepSpeed configuration of today -> what DeepSpeed and the offload engine need.

Nothing here imports DeepSpeed: what cannot work is refused before it is built.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlpo_hpc.config import SECTION, OffloadConfig, Tier, load, read_ds_config
from mlpo_hpc.errors import ConfigError, UnsupportedError
from mlpo_hpc.telemetry.log import warn

AUTO = "auto"  # trainers replace it before DeepSpeed sees it

ADAM_TYPES = ("adam", "adamw")
NO_MICS = (None, -1, 0, AUTO)

# Keys of DeepSpeed's Adam sections that torch's AdamW does not know, with the only value that it has.
DEEPSPEED_ADAM_KEYS: dict[str, tuple[Any, ...]] = {
    "bias_correction": (True,),
    "fp32_optimizer_states": (True, None),
    "set_grad_none": (True, False),
    "adam_w_mode": (True, False),
    "adamw_mode": (True, False),
}


@dataclass(frozen=True)
class Translation:
    """A configuration taken apart."""

    ds_config: dict[str, Any]
    """For DeepSpeed: optimizer state "on the CPU", no section of ours."""
    offload: OffloadConfig
    """For the offload engine."""
    sub_group_size: int | None
    """As given by the user; None: chosen from the budget."""


def translate(ds_config: Mapping[str, Any] | str | os.PathLike[str]) -> Translation:
    """Take a DeepSpeed configuration apart.

    Raises
    ------
    ConfigError
        If our section is wrong.
    UnsupportedError
        If it asks for what the offload engine cannot do.
    """
    offload = load(ds_config)
    config = read_ds_config(ds_config)
    config.pop(SECTION, None)
    zero = config.get("zero_optimization")
    refuse_misfits(config)
    assert isinstance(zero, dict)
    offload = _offload_optimizer(zero, offload)
    size = zero.pop("sub_group_size", None)
    given = None if size in (None, AUTO) else _positive(size)
    if given is not None:
        zero["sub_group_size"] = given
    _optimizer_section(config)
    config["zero_force_ds_cpu_optimizer"] = False
    return Translation(config, offload, given)


def refuse_misfits(config: Mapping[str, Any]) -> None:
    """Raise `UnsupportedError` for what does not fit, with the way out."""
    zero = config.get("zero_optimization")
    stage = zero.get("stage") if isinstance(zero, Mapping) else None
    if stage != 3:
        raise UnsupportedError(
            f"the offload engine works with ZeRO stage 3; set zero_optimization.stage to 3 (it is {stage})"
        )
    assert isinstance(zero, Mapping)
    offload = _section(zero, "offload_optimizer")
    param = _section(zero, "offload_param")
    kind = str(_section(config, "optimizer").get("type", "")).lower()
    bit16 = [_section(config, name) for name in ("bf16", "bfloat16", "fp16")]
    misfits = {
        "ZenFlow updates outside the step: remove zero_optimization.zenflow": zero.get("zenflow") is not None,
        "SuperOffload is another engine: remove offload_optimizer.super_offload": offload.get("super_offload"),
        "offload_optimizer.ratio below 1 keeps state on the GPU: remove it": offload.get("ratio", 1) not in (1, AUTO),
        "offload_param.device 'nvme' is not supported: use 'cpu'": param.get("device") == "nvme",
        "MiCS is not supported: remove zero_optimization.mics_shard_size": zero.get("mics_shard_size") not in NO_MICS,
        "Muon needs whole matrices: use AdamW or another torch optimizer": "muon" in kind,
        "torch_autocast is not supported: use bf16 or fp16": _section(config, "torch_autocast").get("enabled"),
        "16-bit master weights and states are not supported: remove that key": any(map(_keeps_bit16_masters, bit16)),
        "DeepCompile writes gradients by itself: disable compile.deepcompile": _section(config, "compile").get(
            "deepcompile"
        ),
        "the hybrid engine is not supported: disable hybrid_engine": _section(config, "hybrid_engine").get("enabled"),
    }
    texts = [text for text, misfit in misfits.items() if misfit]
    if texts:
        raise UnsupportedError("; ".join(texts))


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    return value if isinstance(value, Mapping) else {}


def _keeps_bit16_masters(section: Mapping[str, Any]) -> bool:
    return any(bool(value) and ("master_weights" in key or "optimizer_states" in key) for key, value in section.items())


def _offload_optimizer(zero: dict[str, Any], offload: OffloadConfig) -> OffloadConfig:
    """Towards DeepSpeed the state is on the CPU; an NVMe path becomes a tier of ours."""
    section = dict(_section(zero, "offload_optimizer"))
    zero.pop("cpu_offload", None)  # the old spelling of what is said here
    if section.get("device") == "nvme" and offload.tiers is None:
        offload = offload.model_copy(update={"tiers": [_nvme_tier(section)]})
    elif section.get("device") == "nvme":
        warn("offload_optimizer.nvme_path is not used: mlp_offload.tiers says where the state goes")
    keep = {key: section[key] for key in ("pin_memory",) if key in section}
    zero["offload_optimizer"] = {"device": "cpu", **keep}
    return offload


def _nvme_tier(section: Mapping[str, Any]) -> Tier:
    path = section.get("nvme_path")
    if not path or path == AUTO:
        raise ConfigError("offload_optimizer.device is 'nvme', but nvme_path is not given")
    # DeepSpeed makes this directory itself, so a configuration that works today may rely on it.
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"offload_optimizer.nvme_path {path} cannot be made: {error}") from error
    return Tier(name="nvme", dir=str(path))


def _positive(size: Any) -> int:
    number = int(float(size))
    if number <= 0:
        raise ConfigError(f"zero_optimization.sub_group_size must be positive, it is {size}")
    return number


def _optimizer_section(config: dict[str, Any]) -> None:
    """An Adam section builds torch's fused AdamW: same meaning, nothing to compile, releases the GIL."""
    section = _section(config, "optimizer")
    if str(section.get("type", "")).lower() not in ADAM_TYPES:
        return
    params = dict(_section(section, "params"))
    adam_w = bool(params.get("adam_w_mode", params.get("adamw_mode", True)))
    for key, allowed in DEEPSPEED_ADAM_KEYS.items():
        if key in params and params.pop(key) not in allowed:
            raise UnsupportedError(f"optimizer.params.{key} can only be {allowed[0]} with torch's AdamW")
    if not params.get("torch_adam"):
        params.setdefault("weight_decay", 0.0)  # DeepSpeed's default; torch's AdamW has 0.01
    params["torch_adam"] = True
    params["adam_w_mode"] = adam_w
    if not params.get("foreach"):
        params["fused"] = True
    config["optimizer"] = {**section, "params": params}
