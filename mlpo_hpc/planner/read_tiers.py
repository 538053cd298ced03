"""Tiers of a plan as users give them: the JSON that ``mlpo probe`` prints, or by hand."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ByteSize, Field, TypeAdapter, ValidationError

from mlpo_hpc.errors import ConfigError
from mlpo_hpc.planner.machine import PlanTier
from mlpo_hpc.storage.filesystem import SHARED

SYNTAX = "NAME=READ/WRITE[,half][,shared][,capacity=SIZE][,total=RATE][,at-once=PART]"
GBPS = 1e9


class Measured(BaseModel):
    """A directory in the output of ``mlpo probe --json``, as far as it is used here."""

    name: str
    read_bps: float = Field(gt=0)
    write_bps: float = Field(gt=0)
    full_duplex: bool
    filesystem: str
    rounds_bps: dict[str, list[float]]

    def tier(self) -> PlanTier:
        """As a tier of a plan."""
        alone, at_once = (statistics.median(self.rounds_bps[f"both {crowd}"]) for crowd in ("alone", "at once"))
        kept = min(1.0, at_once / alone)
        return PlanTier(
            self.name, self.read_bps, self.write_bps, self.full_duplex, kept, shared=self.filesystem in SHARED
        )


class Probed(BaseModel):
    """The output of ``mlpo probe --json``."""

    measured: list[Measured]


def read_probe(text: str) -> list[PlanTier]:
    """Tiers from what ``mlpo probe --json`` printed.

    Raises
    ------
    ConfigError
        If it is something else.
    """
    try:
        return [measured.tier() for measured in Probed.model_validate_json(text).measured]
    except (ValidationError, KeyError, statistics.StatisticsError) as error:
        raise ConfigError(f"this is not what mlpo probe --json prints: {error}") from None


def read_tiers(specs: Sequence[str], probed: Sequence[PlanTier] = ()) -> tuple[PlanTier, ...]:
    """Tiers by hand, and what is to be added to measured ones.

    Parameters
    ----------
    specs : sequence of str
        Each as in `SYNTAX`; without rates for one that was measured. Rates in GB/s.
    probed : sequence of PlanTier
        Those that were measured.

    Raises
    ------
    ConfigError
        If one of them cannot be read.
    """
    tiers = {tier.name: tier for tier in probed}
    for spec in specs:
        head, *marks = spec.split(",")
        name, _, rates = head.partition("=")
        if not rates and name not in tiers:
            raise ConfigError(f"tier {spec!r} has no rates and was not measured; write it as {SYNTAX} (GB/s)")
        base = _by_rates(spec, name, rates) if rates else tiers[name]
        tiers[name] = replace(base, **{key: value for mark in marks for key, value in _mark(spec, mark).items()})
    return tuple(tiers.values())


def _by_rates(spec: str, name: str, rates: str) -> PlanTier:
    match = re.fullmatch(r"([\d.]+)/([\d.]+)", rates)
    if not re.fullmatch(r"[\w.-]+", name) or match is None:
        raise ConfigError(f"tier {spec!r} cannot be read; write it as {SYNTAX} (GB/s), such as nvme=6.9/5.3,half")
    read, write = (_number(spec, text) for text in match.groups())
    return PlanTier(name, GBPS * read, GBPS * write)


def _mark(spec: str, mark: str) -> dict[str, Any]:
    key, _, value = mark.partition("=")
    if mark in ("half", "shared"):
        return {"full_duplex": False} if mark == "half" else {"shared": True}
    if key == "capacity" and value:
        return {"capacity_bytes": read_size(value)}
    if key == "total" and value:
        return {"total_bps": GBPS * _number(spec, value), "shared": True}
    if key == "at-once" and value and _number(spec, value) <= 1:
        return {"at_once": _number(spec, value)}
    raise ConfigError(f"tier {spec!r}: {mark!r} is not understood; write it as {SYNTAX}")


def _number(spec: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ConfigError(f"tier {spec!r}: {text!r} is no number above 0")
    return number


def read_size(text: str) -> int:
    """Bytes, from a text such as ``512GiB``.

    Raises
    ------
    ConfigError
        If it is no size.
    """
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise ConfigError(f"{text!r} is no size, such as 3.84TB or 512GiB") from None
