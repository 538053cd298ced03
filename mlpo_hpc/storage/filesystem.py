"""What is mounted where: type of a file system, whether it is memory, shared, and its free space."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Hashable
from dataclasses import dataclass

IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "rootfs"}
SHARED = {"lustre", "gpfs", "nfs", "nfs4", "beegfs", "beegfs_nodev", "ceph", "panfs", "wekafs", "fuse.daos", "orangefs"}

MAGIC = {
    0x0BD00BD0: "lustre",
    0x47504653: "gpfs",
    0x6969: "nfs",
    0x19830326: "beegfs",
    0x00C36400: "ceph",
    0xAAD7AAEA: "panfs",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x2FC12FC1: "zfs",
}
"""`f_type` of statfs(2), from the headers of Linux, Lustre, Storage Scale and BeeGFS."""


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

    @property
    def key(self) -> tuple[str, Hashable]:
        """Equal for paths on a host that fill the same file system."""
        return (self.mount_point, "shared" if self.is_shared else self.device)

    @property
    def is_lustre(self) -> bool:
        """Whether its files have stripes."""
        return self.type == "lustre"


def describe(path: str) -> FileSystem:
    """Describe the file system that holds an existing path.

    Raises
    ------
    OSError
        If the path cannot be looked at.
    """
    real = os.path.realpath(path, strict=True)
    space = os.statvfs(real)
    mount_point, mounted_as = _mount_of(real)
    # A bind mount or a container may show another name; a FUSE client has no number of its own.
    kind = MAGIC.get(_magic(real), mounted_as) if not mounted_as.startswith("fuse") else mounted_as
    return FileSystem(real, mount_point, kind, os.stat(real).st_dev, space.f_bavail * space.f_frsize)


def _magic(real: str) -> int:
    """`f_type`, the first word of statfs(2)'s answer on Linux; 0 if the C library does not tell."""
    words = (ctypes.c_ulong * 32)()  # larger than any struct statfs
    statfs = getattr(ctypes.CDLL(None, use_errno=True), "statfs", None)
    if statfs is None or statfs(os.fsencode(real), words) != 0:
        return 0
    return words[0] & 0xFFFFFFFF


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
