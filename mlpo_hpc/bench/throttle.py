"""The block layer's cap on a device's bandwidth, by control groups of version 1 or 2. Needs root."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from mlpo_hpc.errors import ConfigError

V1 = Path("/sys/fs/cgroup/blkio")
V2 = Path("/sys/fs/cgroup")
GROUP = "mlpo-testbed-"


class Throttle(Protocol):
    """Caps devices, given as ``MAJOR:MINOR``, and counts what they move."""

    def cap(self, number: str, bytes_per_s: int) -> None: ...

    def moved_bytes(self, number: str) -> dict[str, int]: ...


class ThrottleV1:
    """Version 1: the root group's cap holds for everybody."""

    def cap(self, number: str, bytes_per_s: int) -> None:
        """Cap both directions; 0 lifts the cap."""
        for way in ("read", "write"):
            (V1 / f"blkio.throttle.{way}_bps_device").write_text(f"{number} {bytes_per_s}")

    def moved_bytes(self, number: str) -> dict[str, int]:
        """Bytes read and written since the device was made."""
        counts = {"Read": 0, "Write": 0}
        for line in (V1 / "blkio.throttle.io_service_bytes").read_text().splitlines():
            fields = line.split()
            if fields[0] == number and fields[1] in counts:
                counts[fields[1]] = int(fields[2])
        return {"read": counts["Read"], "write": counts["Write"]}


class ThrottleV2:
    """Version 2: the cap holds for the processes of one group, which is this process's.

    Parameters
    ----------
    folder : Path
        Of that group.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def cap(self, number: str, bytes_per_s: int) -> None:
        """Cap both directions; 0 lifts the cap."""
        limit = bytes_per_s or "max"
        (self._folder / "io.max").write_text(f"{number} rbps={limit} wbps={limit}")

    def moved_bytes(self, number: str) -> dict[str, int]:
        """Bytes that the group read and wrote."""
        for line in (self._folder / "io.stat").read_text().splitlines():
            device, *fields = line.split()
            if device == number:
                counts = dict(field.split("=") for field in fields)
                return {"read": int(counts.get("rbytes", 0)), "write": int(counts.get("wbytes", 0))}
        return {"read": 0, "write": 0}


def has_v1() -> bool:
    """Whether version 1 caps block devices here."""
    return (V1 / "blkio.throttle.read_bps_device").exists()


def has_v2() -> bool:
    """Whether version 2 can cap block devices here."""
    controllers = V2 / "cgroup.controllers"
    return controllers.exists() and "io" in controllers.read_text().split()


def throttle() -> Throttle:
    """What caps devices for this process; with version 2 `throttled_group` must be open, here or in a parent."""
    return ThrottleV1() if has_v1() else ThrottleV2(_own_group())


@contextmanager
def throttled_group() -> Iterator[None]:
    """With version 2, this process and its later children are in a group of their own; nothing with version 1."""
    home = None if has_v1() else _own_group()
    if home is None or home.name.startswith(GROUP):
        yield
        return
    group = home / f"{GROUP}{os.getpid()}"
    group.mkdir()
    try:
        # A group that hands controllers down must be empty itself, the root excepted: first move, then hand down.
        (group / "cgroup.procs").write_text(str(os.getpid()))
        _hand_down_io(home)
        yield
    finally:
        (home / "cgroup.subtree_control").write_text("-io")
        (home / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def _hand_down_io(home: Path) -> None:
    try:
        (home / "cgroup.subtree_control").write_text("+io")
    except OSError as error:
        raise ConfigError(
            f"the control group {home} does not let its groups cap block devices ({error.strerror}): start this from "
            "a group that holds no other process, such as with 'systemd-run --scope -p Delegate=yes'"
        ) from error


def _own_group() -> Path:
    """Folder of this process's group of version 2."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return V2 / line[3:].lstrip("/")
    raise FileNotFoundError("this process is in no control group of version 2")
