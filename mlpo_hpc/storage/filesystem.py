"""What is mounted where: type of a file system, whether it is memory, shared, and its free space."""

from __future__ import annotations

import os
from dataclasses import dataclass

IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "rootfs"}
SHARED = {"lustre", "gpfs", "nfs", "nfs4", "beegfs", "beegfs_nodev", "ceph", "panfs", "wekafs", "fuse.daos", "orangefs"}


@dataclass(frozen=True)
class FileSystem:
    """One mounted file system, as seen from a path on it."""

    path: str
    mount_point: str
    type: str
    device: int
    """`st_dev`: equal numbers on one host mean one device."""
    free_bytes: int
    """What an ordinary user may still write."""

    @property
    def is_memory(self) -> bool:
        """Whether its files are host memory, which the budget already counts."""
        return self.type in IN_MEMORY

    @property
    def is_shared(self) -> bool:
        """Whether other nodes usually see the same files."""
        return self.type in SHARED


def describe(path: str) -> FileSystem:
    """Describe the file system that holds an existing path.

    Raises
    ------
    OSError
        If the path cannot be looked at.
    """
    real = os.path.realpath(path, strict=True)
    space = os.statvfs(real)
    mount_point, kind = _mount_of(real)
    return FileSystem(real, mount_point, kind, os.stat(real).st_dev, space.f_bavail * space.f_frsize)


def _mount_of(real: str) -> tuple[str, str]:
    """Mount point and type of the longest mount that holds the path; the last one mounted wins."""
    best = ("/", "unknown")
    with open("/proc/self/mountinfo") as mounts:
        for line in mounts:
            left, _, right = line.partition(" - ")
            mount_point = left.split()[4].encode().decode("unicode_escape")
            inside = real == mount_point or real.startswith(mount_point.rstrip("/") + "/")
            if inside and len(mount_point) >= len(best[0]):
                best = (mount_point, right.split()[0])
    return best
