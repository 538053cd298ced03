"""Memory of a node: what is left for state, what may be locked, and shared memory."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

import psutil

from mlpo_hpc.cluster.memory import AUTO_FRACTION, available_bytes, total_bytes
from mlpo_hpc.cluster.node import Node
from mlpo_hpc.config import OffloadConfig
from mlpo_hpc.doctor.finding import Finding
from mlpo_hpc.tokens.mpi_window import SHARED_MEMORY, lack_of_memory

LEAST_LOCKED_BYTES = 2**30
CONTAINER_SHM_BYTES = 64 * 2**20
"""What container runtimes give unless they are told otherwise."""
TIGHT = 0.5


def gigabytes(count: float) -> str:
    """Two digits, so that nodes that are nearly alike say the same."""
    return f"{float(f'{count / 1e9:.2g}'):,.10g} GB"


def host_budget_bytes(config: OffloadConfig, available: int) -> int:
    """What ``host_memory`` means on a node with that much left, before weights and gradients are made."""
    return int(AUTO_FRACTION * available) if config.host_memory == "auto" else int(config.host_memory)


def judge_memory(config: OffloadConfig) -> Finding:
    """Finding ``memory``: ``host_memory`` against what the node and the control groups of the job leave."""
    available, free, total = available_bytes(), int(psutil.virtual_memory().available), total_bytes()
    budget = host_budget_bytes(config, available)
    limited = available < TIGHT * free
    left = f"{gigabytes(available)} left of {gigabytes(total)}"
    seen = f"{left}, limited by the job's control group" if limited else left
    if budget > available:
        return Finding(
            check="memory",
            verdict="fail",
            seen=f"{seen}, but 'host_memory' is {gigabytes(budget)}: the kernel would kill a rank",
            advice="lower 'host_memory', or ask for more memory (--mem=0 is all of a node)",
        )
    if limited:
        advice = "ask for more memory if the node is yours alone (--mem=0 is all of it)"
        return Finding(check="memory", verdict="warn", seen=seen, advice=advice)
    how = (
        f"'auto' takes up to {gigabytes(budget)}" if config.host_memory == "auto" else f"{gigabytes(budget)} are taken"
    )
    return Finding(check="memory", verdict="ok", seen=f"{seen}; {how} for state")


def judge_memlock() -> Finding:
    """Finding ``memlock``."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= LEAST_LOCKED_BYTES:
        seen = "unlimited" if soft == resource.RLIM_INFINITY else gigabytes(soft)
        return Finding(check="memlock", verdict="ok", seen=seen)
    return Finding(
        check="memlock",
        verdict="warn",
        seen=f"a process may lock {soft // 1024:,} KiB: network libraries (verbs, UCX) and pinned buffers need more",
        advice="ulimit -l unlimited before srun, which hands limits down; if that is refused, ask the support to raise "
        "memlock in limits.conf or in the scheduler's service (LimitMEMLOCK=infinity)",
    )


def judge_shm(local_size: int, folder: Path = SHARED_MEMORY) -> Finding:
    """Finding ``/dev/shm``: MPI's shared windows and torch's workers keep their memory there."""
    advice = "give it room (docker: --shm-size, or --ipc=host), or remove what others left there"
    if not os.access(folder, os.W_OK | os.X_OK):
        seen = f"{folder} is missing or not writable: MPI and torch's workers share memory there"
        return Finding(check="/dev/shm", verdict="fail", seen=seen, advice="mount it (tmpfs, mode 1777)")
    space = shutil.disk_usage(folder)
    seen = f"{gigabytes(space.free)} free of {gigabytes(space.total)}"
    lacks = folder == SHARED_MEMORY and bool(lack_of_memory(Node("", 0, local_size, 0, local_size)))
    if lacks or space.free < CONTAINER_SHM_BYTES:
        return Finding(
            check="/dev/shm", verdict="warn", seen=f"{seen}: a process that fills it is killed", advice=advice
        )
    return Finding(check="/dev/shm", verdict="ok", seen=seen)
