"""Profiles of computing centres: facts in ``sites.toml``, found by environment variables."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from mlpo_hpc.config import Striping
from mlpo_hpc.errors import ConfigError

SITE = "MLPO_HPC_SITE"
Purpose = Literal["state", "wide"]


@dataclass(frozen=True)
class Site:
    """What a centre tells its users.

    Parameters
    ----------
    name, filesystem, scheduler, source : str
        As in ``sites.toml``.
    when : mapping
        Environment variables and the patterns that their values match there.
    state, wide : Striping
        For files that one node writes, and for one file that many nodes write.
    """

    name: str
    filesystem: str
    scheduler: str
    source: str
    when: Mapping[str, str]
    state: Striping
    wide: Striping

    def striping(self, purpose: Purpose) -> Striping:
        """For one of the two purposes."""
        return self.state if purpose == "state" else self.wide


@cache
def sites() -> dict[str, Site]:
    """All profiles, by name."""
    text = files("mlpo_hpc.cluster").joinpath("sites.toml").read_text()
    return {name: _site(name, entry) for name, entry in tomllib.loads(text).items()}


def _site(name: str, entry: dict[str, Any]) -> Site:
    facts = {key: entry[key] for key in ("filesystem", "scheduler", "source", "when")}
    return Site(name, **facts, state=_striping(entry["state"]), wide=_striping(entry["wide"]))


def _striping(value: Any) -> Striping:
    return Striping() if value == "inherit" else Striping.model_validate({"policy": "explicit", **value})


def find_site(environ: Mapping[str, str]) -> Site | None:
    """The profile of the centre that this process runs at, if there is one.

    Raises
    ------
    ConfigError
        If ``MLPO_HPC_SITE`` names none.
    """
    if SITE in environ:
        if environ[SITE] not in sites():
            raise ConfigError(f"{SITE}={environ[SITE]} is no profile; there are {', '.join(sites())}")
        return sites()[environ[SITE]]
    for site in sites().values():
        if all(re.fullmatch(pattern, environ.get(name, "")) for name, pattern in site.when.items()):
            return site
    return None
