"""What is installed: versions, and what interrupted compilations left behind."""

from __future__ import annotations

import platform
import time
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from mlpo_hpc import __version__
from mlpo_hpc.bench.toolchain import is_stale, locks
from mlpo_hpc.doctor.finding import Finding

DISTRIBUTION = "mlpo-hpc"
TOLD = ("torch", "deepspeed", "h5py", "mpi4py")
COMPILED_OPS = ("cpu_adam", "fused_adam", "async_io", "pin_memory", "utils", "deepspeed_shm_comm")
"""Operators that DeepSpeed compiles when they are first used."""


def describe_versions() -> str:
    """Of what must be the same on all nodes."""
    found = [f"Python {platform.python_version()}", f"mlpo_hpc {__version__}"]
    return ", ".join([*found, *(f"{name} {installed(name)}" for name in TOLD if installed(name))])


def installed(name: str) -> str:
    """Version of a distribution; empty if it is missing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def judge_versions(distribution: str = DISTRIBUTION) -> list[Finding]:
    """Findings ``versions``: one for each package that is missing or was not tested."""
    try:
        wanted = [Requirement(text) for text in requires(distribution) or ()]
    except PackageNotFoundError:
        seen = f"{describe_versions()}; {distribution} itself is not installed, only on the path"
        return [
            Finding(check="versions", verdict="skipped", seen=seen, advice="pip install mlpo-hpc: it says what fits")
        ]
    needed = [need for need in wanted if need.marker is None or need.marker.evaluate({"extra": ""})]
    bad = [finding for need in needed if (finding := _judge(need)) is not None]
    return bad or [Finding(check="versions", verdict="ok", seen=describe_versions())]


def _judge(need: Requirement) -> Finding | None:
    found = installed(need.name)
    advice = f"pip install '{need.name}{need.specifier}'"
    if not found:
        return Finding(
            check="versions", verdict="fail", seen=f"{need.name} is missing", advice=advice, subject=need.name
        )
    if need.specifier.contains(found, prereleases=True):
        return None
    seen = f"{need.name} {found} was not tested: {need.specifier} was"
    return Finding(check="versions", verdict="warn", seen=seen, advice=advice, subject=need.name)


def judge_locks() -> Finding:
    """Finding ``compile locks``."""
    stale = [str(lock) for lock in locks(COMPILED_OPS) if is_stale(lock, time.time())]
    if not stale:
        return Finding(check="compile locks", verdict="ok", seen="none is left over")
    return Finding(
        check="compile locks",
        verdict="warn",
        seen=f"left over from an interrupted compilation, and whoever needs it waits for ever: {', '.join(stale)}",
        advice="remove these files, unless a job of yours compiles on another node now",
    )
