"""Storage with a known speed: ext4 on a loop device whose bandwidth the block layer caps. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from mlpo_hpc.bench.throttle import has_v1, has_v2, throttle, throttled_group
from mlpo_hpc.errors import ConfigError, StorageError
from mlpo_hpc.storage.filesystem import describe

TOOLS = ("losetup", "mkfs.ext4", "mount", "umount")
TOOL_S = 120.0
"""Longest run of one of them."""
BUSY_S = 20.0
MB = 10**6


def missing() -> str:
    """Why the test bed cannot be built here; empty if it can."""
    if os.geteuid() != 0:
        return "loop devices need root"
    if not (has_v1() or has_v2()):
        return "no control group here caps block devices (neither blkio of version 1 nor io of version 2)"
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"not installed: {lacking}" if lacking else ""


@dataclass(frozen=True)
class CappedDisk:
    """A mounted file system on a device of its own."""

    path: Path
    device: str

    @property
    def number(self) -> str:
        """``MAJOR:MINOR``."""
        status = os.stat(self.device)
        return f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"

    def cap(self, bytes_per_s: int) -> None:
        """Cap both directions; 0 lifts the cap."""
        throttle().cap(self.number, bytes_per_s)

    def moved_bytes(self) -> dict[str, int]:
        """Bytes read and written, as the block layer counts them."""
        return throttle().moved_bytes(self.number)


@contextmanager
def capped_disk(folder: Path, name: str, size_bytes: int, bytes_per_s: int = 0) -> Iterator[CappedDisk]:
    """Make a capped disk; everything is undone at the end.

    Parameters
    ----------
    folder : Path
        Where its image file and its mount point lie: not in memory, or the cap means nothing.
    name : str
        Of both.
    size_bytes : int
        Of the disk; the image takes what is written to it.
    bytes_per_s : int
        The cap, each way; 0: none.
    """
    image, mount_point = folder / f"{name}.img", folder / name
    with ExitStack() as undoing:
        # What undoes a step is known before the step: a signal may come in between.
        undoing.enter_context(throttled_group())
        mount_point.mkdir()
        undoing.callback(mount_point.rmdir)
        undoing.callback(image.unlink, missing_ok=True)
        with image.open("wb") as file:
            file.truncate(size_bytes)
        _run("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
        undoing.callback(_detach, image)
        device = _run("losetup", "-f", "--show", "--direct-io=on", str(image)).strip()
        disk = CappedDisk(mount_point, device)
        undoing.callback(_unmount, mount_point)
        _run("mount", device, str(mount_point))
        undoing.callback(disk.cap, 0)
        if bytes_per_s:
            disk.cap(bytes_per_s)
        yield disk


@contextmanager
def capped_disks(
    folder: Path, caps_bps: dict[str, int], sizes_bytes: dict[str, int]
) -> Iterator[dict[str, CappedDisk]]:
    """Disks by name, each with its cap in bytes/s each way and its size.

    Raises
    ------
    ConfigError
        If they cannot be built here, before anything is.
    StorageError
        If a tool failed; nothing is left behind.
    """
    if reason := missing():
        raise ConfigError(f"the test bed cannot be built: {reason}; give directories instead")
    _look_at(folder, sum(sizes_bytes.values()))
    with ExitStack() as disks:
        yield {
            name: disks.enter_context(capped_disk(folder, name, sizes_bytes[name], cap_bps))
            for name, cap_bps in caps_bps.items()
        }


def _look_at(folder: Path, needed_bytes: int) -> None:
    filesystem = describe(str(folder))
    if filesystem.is_memory:
        raise ConfigError(f"the test bed's images would lie in memory ({filesystem.type} at {folder}): set TMPDIR")
    if filesystem.free_bytes < needed_bytes:
        raise ConfigError(
            f"the test bed may take {needed_bytes / MB:,.0f} MB in {folder}, {filesystem.free_bytes / MB:,.0f} MB are "
            "free: free space there, set TMPDIR, or give fewer --systems"
        )


def _unmount(mount_point: Path) -> None:
    """Once whoever was in the middle of a call there, and was killed meanwhile, is gone."""
    deadline = time.monotonic() + BUSY_S
    while mount_point.is_mount():
        try:
            _run("umount", str(mount_point))
        except StorageError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _detach(image: Path) -> None:
    """Whatever device the image became."""
    for line in _run("losetup", "-j", str(image)).splitlines():
        _run("losetup", "-d", line.split(":")[0])


def _run(*command: str) -> str:
    """In a session of its own: Ctrl-C is for this process, which undoes things in order."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_S, start_new_session=True)
    except subprocess.TimeoutExpired as error:
        raise StorageError(f"{' '.join(command)} did not end within {TOOL_S:.0f} s: see the system log") from error
    if done.returncode:
        raise StorageError(f"{' '.join(command)} failed ({done.returncode}): {done.stderr.strip()}")
    return done.stdout
