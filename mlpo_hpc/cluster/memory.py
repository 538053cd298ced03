"""Host memory: how much this process may still take, and giving back what it freed."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

AUTO_FRACTION = 0.8
"""Part of what is left that ``host_memory: auto`` takes."""

CGROUP_ROOT = Path("/sys/fs/cgroup")


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
GIVE_BACK_BYTES = 2**20
REUSE_BYTES = 2**25
"""The most that glibc allows."""
SPARE_FACTOR = 4
"""Times what a heap with holes may take, for holes to be no danger."""


def return_freed_memory() -> None:
    """Let the C library give large freed blocks back to the system at once.

    glibc raises its limit for that up to 32 MB by itself; what DeepSpeed gathers and frees then
    stays in the heap: hundreds of MB a rank, outside every budget. ``MALLOC_MMAP_THRESHOLD_`` in the
    environment is respected.
    """
    _set_limits(GIVE_BACK_BYTES)


def reuse_freed_memory(holes_bytes: int, ranks: int) -> bool:
    """Let what training frees stay for its next micro-step, on a node that has memory to spare.

    Without it each new page of a large block is a page fault, which training on CPUs feels: a fifth of a backward pass.

    Parameters
    ----------
    holes_bytes : int
        What a heap with holes may take on each rank.
    ranks : int
        On this node.

    Returns
    -------
    bool
        Whether it does.
    """
    return available_bytes() >= SPARE_FACTOR * holes_bytes * ranks and _set_limits(REUSE_BYTES)


def _set_limits(nbytes: int) -> bool:
    """Blocks from this size on are given back one by one; smaller ones when twice as much is free at the end."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return False
    return bool(set_option(M_MMAP_THRESHOLD, nbytes) and set_option(M_TRIM_THRESHOLD, 2 * nbytes))


def total_bytes() -> int:
    """Host memory of this node."""
    return int(psutil.virtual_memory().total)


def available_bytes() -> int:
    """Host memory that can still be allocated on this node: MemAvailable, or less by a cgroup limit."""
    free = [psutil.virtual_memory().available, *_cgroup_headrooms(Path("/proc/self/cgroup"), CGROUP_ROOT)]
    return int(max(0, min(free)))


def _cgroup_headrooms(membership: Path, root: Path) -> Iterator[int]:
    """Headroom of each control group above us that limits memory (cgroup v1 and v2)."""
    if not membership.exists():
        return
    for line in membership.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            yield from _headrooms(root, group, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            yield from _headrooms(
                root / "memory", group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            )


def _headrooms(top: Path, group: str, limit_file: str, usage_file: str, cache_key: str) -> Iterator[int]:
    folder = top / group.lstrip("/")
    for path in [folder, *folder.parents]:
        if path == top.parent:
            return
        limit, usage = _number(path / limit_file), _number(path / usage_file)
        if limit is not None and usage is not None:
            yield limit - usage + _reclaimable(path / "memory.stat", cache_key)


def _number(path: Path) -> int | None:
    if not path.exists():
        return None
    text = path.read_text().strip()
    return int(text) if text.isdigit() else None  # "max": no limit


def _reclaimable(path: Path, key: str) -> int:
    """Page cache that the kernel gives back before it kills."""
    if not path.exists():
        return 0
    stats = dict(line.split() for line in path.read_text().splitlines())
    return int(stats.get(key, 0))
