"""What is planned: the configuration as training would read it, and the state that it makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlpo_hpc.config import OffloadConfig, Tier, load
from mlpo_hpc.doctor.finding import Finding, split_advice
from mlpo_hpc.engine.translate import translate
from mlpo_hpc.errors import ConfigError, MlpoError
from mlpo_hpc.storage.place import default_tiers

FP32_ITEM_BYTES = 12
"""Master weight and two moments of a parameter, for Adam."""
SPLIT_ITEM_BYTES = 10


@dataclass(frozen=True)
class Plan:
    """A configuration, taken apart.

    Parameters
    ----------
    config : OffloadConfig
        For the offload engine.
    tiers : sequence of Tier
        That it would use; those of the embedded default too.
    item_bytes : int
        State of a parameter.
    findings : sequence of Finding
        ``configuration``, and what is wrong with the tiers as a whole.
    path : str, optional
        Of the file, if one was given.
    """

    config: OffloadConfig
    tiers: tuple[Tier, ...]
    item_bytes: int
    findings: tuple[Finding, ...]
    path: str | None = None

    @property
    def needs_mpi(self) -> bool:
        """Whether ranks of one node are to take turns by MPI."""
        return self.config.tokens.backend in ("auto", "mpi")


def read_plan(path: str | None) -> Plan:
    """Read a DeepSpeed configuration with its overrides; without one, the overrides alone.

    A faulty one is a finding, and the rest is looked at as if it were empty.
    """
    try:
        ds_config: dict[str, Any] = {}
        if path is None:
            config = load({})
        else:
            translation = translate(path)
            config, ds_config = translation.offload, translation.ds_config
    except MlpoError as error:
        finding = Finding(
            check="configuration", verdict="fail", seen=str(error), advice="correct it: training would not start"
        )
        return Plan(OffloadConfig(), (), FP32_ITEM_BYTES, (finding,), path)
    seen = f"{path}: {_describe(config)}" if path else _describe(config)
    found = [Finding(check="configuration", verdict="ok" if path else "skipped", seen=seen, advice=_advice(path))]
    try:
        tiers = _tiers(config, path)
    except ConfigError as error:
        reason, advice = split_advice(str(error))
        tiers = ()
        found.append(Finding(check="tier", verdict="fail", seen=reason, advice=advice))
    return Plan(config, tiers, item_bytes(config, ds_config), tuple(found), path)


def _describe(config: OffloadConfig) -> str:
    names = ", ".join(tier.name for tier in config.tiers or ())
    if config.tiers is None:
        return "no tiers configured"
    return f"tiers {names}" if names else "host memory only"


def _advice(path: str | None) -> str:
    return "" if path else "give the one that training will use: --config ds_config.json"


def _tiers(config: OffloadConfig, path: str | None) -> tuple[Tier, ...]:
    """Without a file nothing is known about tiers that are not in the environment."""
    if config.tiers is not None:
        return tuple(config.tiers)
    return tuple(default_tiers()) if path else ()


def item_bytes(config: OffloadConfig, ds_config: Mapping[str, Any]) -> int:
    """Bytes that the state of one parameter takes, for Adam.

    Parameters
    ----------
    config : OffloadConfig
        Of the offload engine.
    ds_config : mapping
        Of DeepSpeed.
    """
    sections = [ds_config.get(name) for name in ("bf16", "bfloat16")]
    is_bf16 = any(isinstance(section, Mapping) and section.get("enabled") for section in sections)
    keeps = any(tier.keep for tier in config.tiers or ())
    splits = config.state_format == "split" or (config.state_format == "auto" and not keeps)
    return SPLIT_ITEM_BYTES if is_bf16 and splits else FP32_ITEM_BYTES
