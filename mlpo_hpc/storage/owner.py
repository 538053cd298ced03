"""Names of what must have one for a moment: they tell who made it, so that others can find out whether he is gone.

A name is ``.mlpo_hpc-<host>-<machine>-<job>-<process>-<start time>-<number>``, where the job is
``none`` or ``<scheduler>.<cluster>.<id>.<restart count>``, and the machine the begin of its boot id.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
from dataclasses import dataclass

from mlpo_hpc.cluster.job import Job, this_job
from mlpo_hpc.cluster.node import machine_id
from mlpo_hpc.tokens.process import start_ticks

PREFIX = ".mlpo_hpc-"
NO_JOB = "none"
NO_MACHINE = "unknown"
NAME = re.compile(
    re.escape(PREFIX) + r"(?P<host>[\w.-]{1,64})-(?P<machine>[0-9a-f]{8}|unknown)"
    r"-(?:none|(?P<scheduler>[a-z]+)\.(?P<cluster>\w*)\.(?P<job>\w+)\.(?P<restart>\d{1,9}))"
    r"-(?P<pid>\d{1,9})-(?P<ticks>\d{1,20})-\d{1,9}",
    re.ASCII,
)

_numbers = itertools.count()


@dataclass(frozen=True)
class Owner:
    """The process that made something, and its job."""

    host: str
    machine: str
    """Two machines may have one host name, and one is another after it was started again."""
    job: Job | None
    pid: int
    start_ticks: int

    @classmethod
    def this(cls) -> Owner:
        """The calling process."""
        host = re.sub(r"[^\w.-]", "_", socket.gethostname(), flags=re.ASCII)[:64]
        pid = os.getpid()
        return cls(host, machine_id()[:8] or NO_MACHINE, this_job(os.environ), pid, start_ticks(pid) or 0)

    @property
    def is_alive(self) -> bool:
        """Whether the process runs, if it is one of this machine."""
        return start_ticks(self.pid) == self.start_ticks

    def __str__(self) -> str:
        job = f"{self.job}, " if self.job else ""
        return f"{job}process {self.pid} on {self.host}"


def new_name() -> str:
    """A name that nobody else gives."""
    owner = Owner.this()
    job = owner.job
    whose = f"{job.scheduler}.{job.cluster}.{job.number}.{job.restart_count}" if job else NO_JOB
    parts = (owner.host, owner.machine, whose, owner.pid, owner.start_ticks, next(_numbers))
    return PREFIX + "-".join(map(str, parts))


def read_name(name: str) -> Owner | None:
    """Who gave a name; None if it is none of ours."""
    found = NAME.fullmatch(name)
    if found is None:
        return None
    job = None
    if found["job"] is not None:
        job = Job(found["scheduler"], found["cluster"], found["job"], int(found["restart"]))
    return Owner(found["host"], found["machine"], job, int(found["pid"]), int(found["ticks"]))
