"""The one configuration tree: the section ``mlp_offload`` of a DeepSpeed configuration.

Sources, later ones win: defaults, ``ds_config["mlp_offload"]``, environment variables
``MLPO_HPC_<KEY>`` (``MLPO_HPC_TOKENS__BACKEND`` for a nested key; values in JSON or plain text).
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.functional_validators import field_validator

from mlpo_hpc.errors import ConfigError

SECTION = "mlp_offload"
ENV_PREFIX = "MLPO_HPC_"
ENV_OF_OTHERS = {"ROOT", "SITE", "IGNORE_CONTRACT", "INTERFACE", "STOP_FILE"}  # of module, contract, launch, signals


def _rate(value: Any) -> Any:
    """``5GB`` is as good as 5e9; what is no size is left to the number's own check."""
    if isinstance(value, str) and value.strip()[-1:].lower() == "b":
        return float(TypeAdapter(ByteSize).validate_python(value))
    return value


Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
BytesPerSecond = Annotated[Rate, BeforeValidator(_rate, json_schema_input_type=Rate | str)]


class Section(BaseModel):
    """A part of the tree: unknown keys are errors. What a key means is said below it; `mlpo config` prints it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys_only(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            unknown = sorted(set(values) - set(cls.model_fields))
            if unknown:
                valid = ", ".join(cls.model_fields)
                raise ValueError(f"unknown key {', '.join(map(repr, unknown))}; valid keys: {valid}")
        return values


class Stripes(Section):
    """Stripes of one extent of a file, on Lustre."""

    count: int | None = None
    """Stripes, 1 to 65534; -1: one on every storage target. With ``explicit`` it or ``components`` must be given."""
    size: ByteSize | None = None
    """Bytes on one stripe before the next: a multiple of 64 KiB under 4 GiB. Default: that of the file system."""
    pool: str | None = None
    """Pool of storage targets to take, as ``lfs pool_list`` names it. Default: that of the file system."""
    overstripe: bool = False
    """Whether a target may take several stripes of a file."""

    @field_validator("count")
    @classmethod
    def _count(cls, count: int | None) -> int | None:
        if count is not None and count != -1 and not 1 <= count <= 65534:
            raise ValueError("count must be -1 (all targets), or 1 to 65534")
        return count

    @field_validator("size")
    @classmethod
    def _size(cls, size: ByteSize | None) -> ByteSize | None:
        if size is not None and (size % 65536 or not 0 < size < 2**32):
            raise ValueError("size must be a multiple of 64 KiB under 4 GiB")
        return size


class Extent(Stripes):
    """One component of a progressive layout."""

    end: ByteSize | None = None
    """Byte of the file where it ends; absent for the last one."""


class Striping(Stripes):
    """How files that are made in a tier's directory are striped. It is set before the first of them, on Lustre only."""

    policy: Literal["inherit", "auto", "explicit"] = "inherit"
    """``inherit``: touch nothing; ``auto``: the site's profile, else a rule; ``explicit``: as given here."""
    components: list[Extent] | None = Field(default=None, min_length=2)
    """A progressive layout instead of one ``count``: extents with growing ends, the last without."""

    @model_validator(mode="after")
    def _fits_policy(self) -> Striping:
        said = self.count is not None or self.components is not None
        if self.policy == "explicit" and not said:
            raise ValueError("policy 'explicit' needs 'count' or 'components'")
        if self.policy != "explicit" and (said or self.size or self.pool or self.overstripe):
            raise ValueError(f"policy {self.policy!r} takes nothing else; say 'explicit' to set a layout")
        if self.components is not None:
            if self.count is not None or self.size or self.pool or self.overstripe:
                raise ValueError("give either 'components' or 'count', 'size', 'pool', 'overstripe'")
            ends = [extent.end for extent in self.components]
            given = [int(end) for end in ends if end is not None]
            if ends[-1] is not None or len(given) != len(ends) - 1 or given != sorted(set(given)):
                raise ValueError("the 'end' of components must grow, and the last has none")
            if any(extent.count is None for extent in self.components):
                raise ValueError("every component needs a 'count'")
        return self


class Tier(Section):
    """One place on storage that can hold state."""

    name: str = Field(pattern=r"^[\w.-]+$")
    """Name in logs, reports and file names, such as ``nvme`` or ``pfs``: letters, digits, ``_``, ``.``, ``-``."""
    dir: str = Field(min_length=1)
    """Existing directory that this job has for itself; ``${VAR}`` is expanded. ``auto``: one of our own in the first
    usual place that is writable and no memory."""
    kind: Literal["node_local", "shared"] | None = None
    """Whether other nodes see the same files. Default: by the type of the file system."""
    container: Literal["raw", "hdf5"] | None = None
    """The file that holds slots. ``raw``: one without a name for each rank, the default on node-local storage;
    ``hdf5``: one for each node, the default on shared storage."""
    transport: Literal["posix", "mpiio"] | None = None
    """How bytes reach the container. Default: ``mpiio`` for ``hdf5`` where MPI can be used, else ``posix``."""
    striping: Striping = Striping()
    """How files here are striped, on Lustre. Default: as the directory is."""
    hints: dict[str, str] = {}
    """Hints for MPI-IO, such as ``{"striping_unit": 4194304}``; the log names those that it ignores."""
    keep: bool = False
    """Leave the ``hdf5`` container behind, under a name that the log tells, to look into it. It is no checkpoint."""
    capacity: ByteSize | None = None
    """Bytes this job may use here, on each node: give it where a quota is lower. Default: what is free."""
    read_bps: BytesPerSecond | None = None
    """Bytes/s that all ranks of a node read here together. Tiers are measured at start-up unless all have both."""
    write_bps: BytesPerSecond | None = None
    """The same for writing."""
    permits: int | None = Field(default=None, ge=1)
    """How many ranks of a node may move bytes here at once. Default: ``tokens.permits``."""
    allow_memory: bool = False
    """Accept a file system that is memory (tmpfs, ramfs), which ``host_memory`` does not count: for tests."""

    @field_validator("hints", mode="before")
    @classmethod
    def _hints_are_text(cls, hints: Any) -> Any:
        """MPI knows text only; ``true`` and numbers are meant as such."""
        if not isinstance(hints, Mapping):
            return hints
        return {key: value if isinstance(value, str) else json.dumps(value) for key, value in hints.items()}

    @model_validator(mode="after")
    def _fits(self) -> Tier:
        if self.keep and self.container == "raw":
            raise ValueError("'keep' needs container 'hdf5': a raw one does not say what it holds")
        if self.hints and self.transport == "posix":
            raise ValueError("'hints' are for transport 'mpiio'")
        return self


class Tokens(Section):
    """How ranks of one node take turns on a tier, and how long they wait."""

    backend: Literal["auto", "mpi", "flock", "local", "off"] = "auto"
    """``mpi``: fair turns, by MPI's shared memory; ``flock``: turns by file locks, fairness not promised; ``local``:
    within the process only; ``off``: none; ``auto``: ``mpi`` where MPI's world is the training world, else
    ``flock``, and for each tier it is measured at start-up whether turns pay."""
    permits: int = Field(default=1, ge=1)
    """How many ranks of a node may hold a tier's token at once."""
    timeout_s: float = Field(default=1800, gt=0)
    """Seconds without any progress after which a wait for a tier or its token ends the job."""


class Checkpoint(Section):
    """What `save_checkpoint` writes."""

    format: Literal["mlpo_hpc", "deepspeed"] = "mlpo_hpc"
    """``mlpo_hpc``: our own, committed at once and loaded on any number of ranks; ``deepspeed``: that of stock ZeRO-3,
    to go back to it. Both are loaded, whichever is set."""
    commit: Literal["wait", "background"] = "wait"
    """Whether `save_checkpoint` returns when the checkpoint is committed, or at once while it is written beside
    training: ``engine.checkpoint_committed(tag)`` tells. In the format of stock ZeRO-3 it always waits."""
    keep_last: int | None = Field(default=None, ge=1)
    """How many checkpoints of a directory stay, those saved last; a commit removes older ones. Default: all."""
    keep_every: int | None = Field(default=None, ge=1)
    """Those of optimizer steps that this divides stay too. Needs ``keep_last``."""

    @model_validator(mode="after")
    def _removes_some(self) -> Checkpoint:
        if self.keep_every is not None and self.keep_last is None:
            raise ValueError("'keep_every' says what stays beside the last ones: give 'keep_last' too")
        return self


class Telemetry(Section):
    """What a run writes about itself."""

    dir: str | None = None
    """Folder for each rank's journal, which ``mlpo report`` reads; ``${VAR}`` is expanded. Default: none is kept."""
    trace: bool = False
    """Write ``trace.<rank>.json`` there too: what moved, waited and computed when, for ui.perfetto.dev."""

    @model_validator(mode="after")
    def _has_a_place(self) -> Telemetry:
        if self.trace and self.dir is None:
            raise ValueError("'trace' needs 'dir': say where to write it")
        return self


class Static(Section):
    """Placement by fixed weights, one for each tier, as in the paper (2:1)."""

    static: list[float] = Field(min_length=1)
    """A weight for each tier, in their order, none negative: ``[2, 1]`` gives the first two thirds of the state."""

    @field_validator("static")
    @classmethod
    def _weights(cls, weights: list[float]) -> list[float]:
        if min(weights) < 0 or sum(weights) <= 0:
            raise ValueError("weights must not be negative, and one must be positive")
        return weights


class OffloadConfig(Section):
    """Everything the offload engine can be told; every key is optional."""

    tiers: list[Tier] | None = None
    """Storage tiers. ``[]``: host memory only. Default: two directories under ``$TMPDIR``, but in a batch job they must
    be given."""
    host_memory: ByteSize | Literal["auto"] = "auto"
    """Bytes per **node** for buffers and cache together, shared by its ranks. ``auto``: 80 % of what the node and the
    job's control group leave at start-up."""
    state_format: Literal["auto", "fp32", "split"] = "auto"
    """How state is laid out in bytes. ``fp32``: 12 bytes a parameter for Adam; ``split``: 10, without loss, for
    models in bf16; ``auto``: ``split`` where it can be used and no tier has ``keep``."""
    order: Literal["alternate", "sequential"] = "alternate"
    """Order of subgroups from step to step. ``alternate`` turns it round after each, so that what is in host memory at
    the end of one is used first in the next."""
    placement: Literal["adaptive", "proportional"] | Static = "adaptive"
    """Which tier a chunk is written to. ``adaptive``: by what each gives now; ``proportional``: by what was
    measured or given at the start; ``{"static": [2, 1]}``: by weights."""
    prefetch: int | Literal["auto"] = "auto"
    """How many subgroups are read ahead at most, 0 or more; ``auto``: as many as memory holds."""
    tokens: Tokens = Tokens()
    """How ranks of one node take turns on a tier."""
    checkpoint: Checkpoint = Checkpoint()
    """How checkpoints are saved, and which stay."""
    telemetry: Telemetry = Telemetry()
    """Whether a run keeps a journal and a trace, and where."""
    chunk_bytes: ByteSize = ByteSize(64 * 2**20)
    """Largest unit of I/O, at least 4096. Small subgroups use smaller chunks, so that all tiers share one."""
    checksum: Literal["xxh3", "off"] = "xxh3"
    """Checksum computed before each write and compared at the next read: what differs ends the job."""

    @field_validator("prefetch")
    @classmethod
    def _prefetch(cls, depth: int | str) -> int | str:
        if isinstance(depth, int) and depth < 0:
            raise ValueError("prefetch must be 0 or more, or 'auto'")
        return depth

    @field_validator("chunk_bytes")
    @classmethod
    def _chunk(cls, size: ByteSize) -> ByteSize:
        if size < 4096:
            raise ValueError("chunk_bytes must be at least 4096")
        return size

    @model_validator(mode="after")
    def _consistent(self) -> OffloadConfig:
        names = [tier.name for tier in self.tiers or []]
        if len(set(names)) != len(names):
            raise ValueError(f"tier names must differ, got {names}")
        if isinstance(self.placement, Static) and len(self.placement.static) != len(names):
            raise ValueError(f"placement.static needs one weight for each of {len(names)} tiers")
        return self


def read_ds_config(ds_config: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """Return a DeepSpeed configuration as a dict of our own, from a dict or a JSON file.

    Raises
    ------
    ConfigError
        If the file is missing or is not a JSON object.
    """
    if isinstance(ds_config, Mapping):
        return dict(_copy(ds_config))
    try:
        content = json.loads(Path(ds_config).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the DeepSpeed configuration {ds_config}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{ds_config} must hold a JSON object, not {type(content).__name__}")
    return content


def load(ds_config: Mapping[str, Any] | str | os.PathLike[str]) -> OffloadConfig:
    """Validate the section ``mlp_offload`` of a DeepSpeed configuration with its overrides.

    Raises
    ------
    ConfigError
        With one line for each fault.
    """
    config = read_ds_config(ds_config)
    misspelt = [] if SECTION in config else difflib.get_close_matches(SECTION, map(str, config), n=1)
    if misspelt:
        raise ConfigError(f"unknown section {misspelt[0]!r} in the DeepSpeed configuration: did you mean {SECTION!r}?")
    section = config.get(SECTION) or {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"{SECTION} must be an object, not {type(section).__name__}")
    merged = _merge(_copy(section), _from_environment(os.environ))
    try:
        return OffloadConfig.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(_explain(error) + _from_where(os.environ)) from None


def expand(path: str) -> str:
    """Expand ``${VAR}``, ``$VAR`` and ``~``; an unset variable is an error that names it."""

    def value(match: re.Match[str]) -> str:
        name = match.group(1) or match.group(2)
        if name not in os.environ:
            raise ConfigError(f"{path!r} needs the environment variable {name}, which is not set")
        return os.environ[name]

    return os.path.expanduser(re.sub(r"\$\{(\w+)\}|\$(\w+)", value, path))


def _copy(value: Any) -> Any:
    """Copy nested mappings and lists; leave the rest (``auto`` strings, numbers) as it is."""
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _merge(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    for key, value in extra.items():
        nested = isinstance(value, dict) and isinstance(base.get(key), dict)
        base[key] = _merge(base[key], value) if nested else value
    return base


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for variable, text in sorted(environ.items()):
        key = variable.removeprefix(ENV_PREFIX)
        if key == variable or key in ENV_OF_OTHERS:
            continue
        *parents, leaf = key.lower().split("__")
        node = found
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = _json_or_text(text)
    return found


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _from_where(environ: Mapping[str, str]) -> str:
    """Say which variables took part: a fault may be there and not in the user's file."""
    names = sorted(
        name for name in environ if name.startswith(ENV_PREFIX) and name[len(ENV_PREFIX) :] not in ENV_OF_OTHERS
    )
    return f"\n(overridden by the environment: {', '.join(names)})" if names else ""


def _explain(error: ValidationError) -> str:
    lines = []
    for fault in error.errors():
        # Branches of unions ("literal['auto']", "function-after[...]") are pydantic's words, not the user's.
        path = [str(part) for part in fault["loc"] if "[" not in str(part)]
        lines.append(f"{'.'.join([SECTION, *path])}: {fault['msg'].removeprefix('Value error, ')}")
    return "the configuration cannot be used:\n  " + "\n  ".join(lines)
