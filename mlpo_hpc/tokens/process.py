"""The processes that share tokens: who they are, and whether they still live."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A rank's process: its number may be given to another one, its start time not."""

    world_rank: int
    host: str
    pid: int
    start_ticks: int

    @classmethod
    def this(cls, world_rank: int, host: str) -> Process:
        """The calling process."""
        return cls(world_rank, host, os.getpid(), start_ticks(os.getpid()) or 0)

    def is_alive(self) -> bool:
        """Whether it still runs on this host."""
        return start_ticks(self.pid) == self.start_ticks

    def __str__(self) -> str:
        return f"rank {self.world_rank} (process {self.pid} on {self.host})"


def start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; None if there is no such process, or only its zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])
