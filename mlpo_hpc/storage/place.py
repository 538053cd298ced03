"""Where each configured tier really is, and whether it can be used."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from mlpo_hpc.config import OffloadConfig, Tier, expand
from mlpo_hpc.errors import ConfigError, StorageError, here, storage_error
from mlpo_hpc.storage.filesystem import FileSystem, describe
from mlpo_hpc.telemetry.log import say, warn

BATCH_JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "COBALT_JOBID")

PROPOSED_TIERS = """"mlp_offload": {"tiers": [
      {"name": "nvme", "dir": "auto", "kind": "node_local"},
      {"name": "pfs", "dir": "${SCRATCH}/mlpo", "kind": "shared"}]}"""


# Where storage is usually found when `dir` is "auto", first fit wins.
NODE_LOCAL_CANDIDATES = (
    "${SLURM_TMPDIR}",
    "${LOCALSCRATCH}",
    "${LOCAL_SCRATCH}",
    "${LOCAL_TMPDIR}",
    "/mnt/bb/${USER}",
    "/local/scratch",
    "/raid/scratch",
    "${TMPDIR}",
    "/tmp",
    "/var/tmp",
)
SHARED_CANDIDATES = ("${SCRATCH}", "${PSCRATCH}", "${WORK}")


@dataclass(frozen=True)
class Place:
    """A tier's directory on this host, looked at."""

    tier: Tier
    path: str
    filesystem: FileSystem
    shared: bool
    ours: bool
    """Others use the directory too (`/tmp`): our files lie in one of our own in it, and it is not locked."""

    @property
    def device_key(self) -> tuple[str, Hashable]:
        """Equal for two tiers or ranks of a host that fill the same file system, whatever their `kind` says."""
        return self.filesystem.key

    def directory_key(self, node_key: Hashable) -> tuple[Hashable, ...]:
        """Equal for two ranks that use the same directory."""
        if self.shared:
            return (self.path,)
        return (node_key, self.filesystem.device, os.stat(self.path).st_ino)


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
            places.append(_find(tier, is_default=config.tiers is None))
        except (ConfigError, StorageError) as error:
            faults.append(f"tier {tier.name!r}: {error}")
    named = [place.path for place in places if not place.ours]
    twice = {path for path in named if named.count(path) > 1}
    faults += [f"directory {path} is given to two tiers: give each its own" for path in sorted(twice)]
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


def _find(tier: Tier, is_default: bool) -> Place:
    ours = is_default or tier.dir == "auto"
    path = auto_base(tier.kind) if tier.dir == "auto" else os.path.abspath(expand(tier.dir))
    filesystem = _look(path)
    if filesystem.is_memory and not tier.allow_memory:
        raise ConfigError(
            f"{here(path)} is {filesystem.type}: its files are host memory, which the budget already counts. "
            "Point 'dir' to a disk, or set 'allow_memory': true if you mean it"
        )
    shared = filesystem.is_shared if tier.kind is None else tier.kind == "shared"
    if tier.dir == "auto":
        say("tier %s: a directory of its own in %s", tier.name, filesystem.path)
    return Place(tier, filesystem.path, filesystem, shared, ours)


def _look(path: str) -> FileSystem:
    try:
        filesystem = describe(path)
        usable = os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)
    except OSError as error:
        raise storage_error("looking at the tier directory", path, error) from error
    if not usable:
        raise ConfigError(f"{here(path)} is not a directory that this user may write; correct 'dir' or its permissions")
    return filesystem


def auto_base(kind: str | None) -> str:
    """First usual place for a tier of this kind that exists, is writable and is no memory.

    Raises
    ------
    ConfigError
        If none fits.
    """
    candidates = SHARED_CANDIDATES if kind == "shared" else NODE_LOCAL_CANDIDATES
    for path in map(os.path.expandvars, candidates):
        if os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK) and not describe(path).is_memory:
            return path
    raise ConfigError(
        f"no usual place for a {kind or 'node_local'} tier fits here; give its 'dir' (tried {', '.join(candidates)})"
    )


def default_tiers() -> list[Tier]:
    """Two directories in the temporary directory: the embedded default outside batch jobs.

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
    base = tempfile.gettempdir()
    if describe(base).is_memory and os.path.isdir("/var/tmp"):
        say("%s is memory: passed over", base)
        base = "/var/tmp"
    say("no tiers configured: using two directories in %s (one device; give 'tiers' to use more)", base)
    nvme = Tier(name="nvme", dir=base, kind="node_local")
    return [nvme, Tier(name="pfs", dir=base, kind="node_local", container="hdf5")]
