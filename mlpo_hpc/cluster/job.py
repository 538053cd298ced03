"""The batch job that this process belongs to, and whether Slurm still knows another one."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from mlpo_hpc.cluster.launch import JOB_VARIABLES

ASK_S = 10.0
"""Longest wait for an answer of Slurm."""
OVER = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
}
"""States in which a job has no process any more, of those that squeue(1) lists."""
NO_SUCH_JOB = "Invalid job id specified"


@dataclass(frozen=True)
class Job:
    """A batch job, with what a file name can hold of its identity."""

    scheduler: str
    """``slurm``, ``pbs``, ``lsb`` or ``flux``."""
    cluster: str
    """Two clusters may share storage, and give a number twice. Empty where the scheduler does not tell."""
    number: str
    restart_count: int
    """How often it was requeued; 0 where the scheduler does not tell."""

    @property
    def identity(self) -> tuple[str, str, str]:
        """Equal for all runs of a job that is requeued."""
        return (self.scheduler, self.cluster, self.number)

    def __str__(self) -> str:
        cluster = f" of cluster {self.cluster}" if self.cluster else ""
        return f"job {self.number}{cluster}, restart {self.restart_count}"


def this_job(environ: Mapping[str, str]) -> Job | None:
    """The job that this process runs in, by what its scheduler set; None outside of jobs."""
    for variable in JOB_VARIABLES:
        if variable in environ:
            cluster = _plain(environ.get("SLURM_CLUSTER_NAME", "")) if variable.startswith("SLURM") else ""
            scheduler = variable.partition("_")[0].lower()
            restarts = environ.get("SLURM_RESTART_COUNT", "")
            return Job(scheduler, cluster, _plain(environ[variable]), int(restarts) if restarts.isdecimal() else 0)
    return None


def _plain(text: str) -> str:
    """Letters, digits and underscores, for a name."""
    return re.sub(r"\W", "_", text, flags=re.ASCII)


class Slurm:
    """Answers whether a job is over. Once it did not answer it is not asked again."""

    def __init__(self, environ: Mapping[str, str], timeout_s: float = ASK_S) -> None:
        # What narrows a list by default would hide jobs.
        self._environ = {key: value for key, value in environ.items() if not key.startswith("SQUEUE_")}
        self._environ.pop("SLURM_CLUSTERS", None)
        self._timeout_s = timeout_s
        self._cluster: str | None = None
        self._silence = ""
        self._answers: dict[tuple[str, str, str], tuple[bool, str]] = {}

    def is_over(self, job: Job) -> tuple[bool | None, str]:
        """Whether a job has ended, and how that is known; None if Slurm cannot be asked, and why."""
        if job.scheduler != "slurm" or not job.number.isdecimal():
            return None, f"{job} is not Slurm's"
        if not self._silence and job.identity not in self._answers:
            try:
                if job.cluster != self._find_cluster():
                    return None, f"{job} is not of this cluster ({self._cluster}), whose Slurm cannot tell"
                self._answers[job.identity] = self._ask(job)
            except (OSError, subprocess.SubprocessError, ValueError) as error:
                self._silence = f"Slurm cannot be asked: {error}"
        return self._answers.get(job.identity, (None, self._silence))

    def _ask(self, job: Job) -> tuple[bool, str]:
        """As squeue tells; a job that ended some minutes ago is unknown to it."""
        done = self._run("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job.number}")
        if done.returncode and NO_SUCH_JOB in done.stderr:
            return True, f"Slurm knows no job {job.number} any more"
        if done.returncode:
            raise ValueError(f"squeue failed with {done.returncode}: {done.stderr.strip()}")
        running = sorted(set(done.stdout.split()) - OVER)
        if running:
            return False, f"Slurm says that job {job.number} is {', '.join(running)}"
        return True, f"Slurm says that job {job.number} is over"

    def _find_cluster(self) -> str:
        """Its name, as `Job` has it."""
        if self._cluster is None:
            name = self._environ.get("SLURM_CLUSTER_NAME") or self._ask_for_cluster()
            self._cluster = _plain(name)
        return self._cluster

    def _ask_for_cluster(self) -> str:
        done = self._run("scontrol", "show", "config")
        found = re.search(r"^ClusterName\s*=\s*(\S+)", done.stdout, re.MULTILINE)
        if done.returncode or found is None:
            raise ValueError(f"scontrol does not tell the cluster's name ({done.returncode}): {done.stderr.strip()}")
        return found.group(1)

    def _run(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        program = shutil.which(name)
        if program is None:
            raise ValueError(f"there is no {name!r} on PATH")
        # Without closing files Python starts it by posix_spawn, which network libraries stand after MPI_Init.
        return subprocess.run(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            close_fds=False,
            timeout=self._timeout_s,
            env=self._environ,
            check=False,
        )
