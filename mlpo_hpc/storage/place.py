"""Where each configured tier really is, and whether it can be used."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from mlpo_hpc.config import OffloadConfig, Tier, auto_dir, expand
from mlpo_hpc.errors import ConfigError, StorageError, here, storage_error
from mlpo_hpc.storage.filesystem import FileSystem, describe
from mlpo_hpc.telemetry.log import say, warn

BATCH_JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "COBALT_JOBID")

PROPOSED_TIERS = """"mlp_offload": {"tiers": [
      {"name": "nvme", "dir": "auto", "kind": "node_local"},
      {"name": "pfs", "dir": "${SCRATCH}/mlpo", "kind": "shared"}]}"""


@dataclass(frozen=True)
class Place:
    """A tier's directory on this host, looked at."""

    tier: Tier
    path: str
    filesystem: FileSystem
    shared: bool

    @property
    def device_key(self) -> tuple[str, object]:
        """Equal for two ranks that fill the same file system."""
        return (self.filesystem.mount_point, "shared" if self.shared else self.filesystem.device)

    @property
    def directory_key(self) -> tuple[str, int]:
        """Equal for two ranks of one host that use the same directory."""
        return (self.path if self.shared else "", os.stat(self.path).st_ino)


def find_places(config: OffloadConfig) -> list[Place]:
    """Find the directory of every tier and look whether it can be used.

    Raises
    ------
    ConfigError
        With one line for each tier that cannot.
    """
    places, faults = [], []
    for tier in config.tiers if config.tiers is not None else default_tiers():
        try:
            places.append(_find(tier))
        except (ConfigError, StorageError) as error:
            faults.append(f"tier {tier.name!r}: {error}")
    if faults:
        raise ConfigError("; ".join(faults))
    _warn_of_shared_devices(places)
    return places


def _warn_of_shared_devices(places: Sequence[Place]) -> None:
    seen: dict[object, str] = {}
    for place in places:
        first = seen.setdefault(place.device_key, place.tier.name)
        if first != place.tier.name:
            warn("tiers %s and %s are on one device (%s): they share its bandwidth", first, place.tier.name, place.path)


def _find(tier: Tier) -> Place:
    path = auto_dir(tier.kind) if tier.dir == "auto" else expand(tier.dir)
    if tier.dir == "auto":
        say("tier %s: directory %s", tier.name, path)
    try:
        filesystem = describe(path)
        usable = os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)
    except OSError as error:
        raise storage_error("looking at the tier directory", path, error) from error
    if not usable:
        raise ConfigError(f"{here(path)} is not a directory that this user may write; correct 'dir' or its permissions")
    if filesystem.is_memory and not tier.allow_memory:
        raise ConfigError(
            f"{here(path)} is {filesystem.type}: its files are host memory, which the budget already counts. "
            "Point 'dir' to a disk, or set 'allow_memory': true if you mean it"
        )
    shared = filesystem.is_shared if tier.kind is None else tier.kind == "shared"
    return Place(tier, filesystem.path, filesystem, shared)


def default_tiers() -> list[Tier]:
    """Two directories of the temporary directory: the embedded default outside batch jobs.

    Raises
    ------
    ConfigError
        In a batch job, where the storage to use must be said.
    """
    variables = [name for name in BATCH_JOB_VARIABLES if name in os.environ]
    if variables:
        raise ConfigError(
            f"this is a batch job ({variables[0]} is set) and no tiers are configured. Say which storage to use, "
            f"for example\n    {PROPOSED_TIERS}"
        )
    root = default_root()
    tiers = []
    for name in ("nvme", "pfs"):
        path = os.path.join(root, name)
        os.makedirs(path, mode=0o700, exist_ok=True)
        tiers.append(Tier(name=name, dir=path, kind="node_local"))
    say("no tiers configured: using two directories in %s (one device; give 'tiers' to use more)", root)
    return tiers


def default_root() -> str:
    """Directory of the default tiers: in the temporary directory, or /var/tmp where that is memory."""
    base = tempfile.gettempdir()
    if describe(base).is_memory and os.path.isdir("/var/tmp"):
        base = "/var/tmp"
    return os.path.join(base, f"mlpo_hpc-{os.getuid()}")


def remove_default_tiers() -> None:
    """Remove the directories of the default tiers where they are empty."""
    root = default_root()
    for path in (os.path.join(root, "nvme"), os.path.join(root, "pfs"), root):
        try:
            os.rmdir(path)
        except FileNotFoundError:
            continue
        except OSError:
            return  # another rank or job still has files there, it removes them later
