"""Storage with a known speed: ext4 on a loop device whose bandwidth the block layer caps. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

THROTTLE = Path("/sys/fs/cgroup/blkio")


def missing() -> str:
    """Why the test bed cannot be built here; empty if it can."""
    if os.geteuid() != 0:
        return "loop devices need root"
    if not (THROTTLE / "blkio.throttle.read_bps_device").exists():
        return "this kernel has no cgroup v1 block throttle"
    lacking = [tool for tool in ("losetup", "mkfs.ext4", "mount") if shutil.which(tool) is None]
    return f"not installed: {lacking}" if lacking else ""


@dataclass(frozen=True)
class CappedDisk:
    """A mounted file system on a device of its own."""

    path: Path
    device: str

    @property
    def number(self) -> str:
        status = os.stat(self.device)
        return f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"

    def cap(self, bytes_per_s: int) -> None:
        """Cap both directions; 0 lifts the cap."""
        for way in ("read", "write"):
            (THROTTLE / f"blkio.throttle.{way}_bps_device").write_text(f"{self.number} {bytes_per_s}")

    def moved_bytes(self) -> dict[str, int]:
        """Bytes read and written, as the block layer counts them."""
        counts = {"Read": 0, "Write": 0}
        for line in (THROTTLE / "blkio.throttle.io_service_bytes").read_text().splitlines():
            fields = line.split()
            if fields[0] == self.number and fields[1] in counts:
                counts[fields[1]] = int(fields[2])
        return {"read": counts["Read"], "write": counts["Write"]}


@contextmanager
def capped_disk(folder: Path, name: str, size_bytes: int, bytes_per_s: int = 0) -> Iterator[CappedDisk]:
    """Make a capped disk; everything is undone at the end."""
    image, mount_point = folder / f"{name}.img", folder / name
    mount_point.mkdir()
    with image.open("wb") as file:
        file.truncate(size_bytes)
    _run("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
    device = _run("losetup", "-f", "--show", "--direct-io=on", str(image)).strip()
    try:
        _run("mount", device, str(mount_point))
        disk = CappedDisk(mount_point, device)
        try:
            if bytes_per_s:
                disk.cap(bytes_per_s)
            yield disk
        finally:
            disk.cap(0)
            _run("umount", str(mount_point))
    finally:
        _run("losetup", "-d", device)
        image.unlink()


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
