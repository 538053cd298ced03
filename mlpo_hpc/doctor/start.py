"""How this process was started: by which launcher, as one of how many, with a way for MPI to find the others or not."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from mlpo_hpc.cluster.launch import JOB_VARIABLES, PMI_VARIABLES, find_launcher, mpi_launcher, ranks
from mlpo_hpc.doctor.finding import Finding

SCHEDULERS = ("sbatch", "qsub", "bsub", "flux")
"""Commands that submit jobs."""
SRUN_ADVICE = (
    "start with srun --mpi=pmix for Open MPI, pmi2 for MPICH, cray_shasta on Cray systems ('srun --mpi=list' shows "
    'what there is), or do without MPI: "tokens": {"backend": "flock"}'
)


@dataclass(frozen=True)
class Start:
    """What the launcher says.

    Parameters
    ----------
    launcher : str
        Its name; empty if there is none.
    rank, size, local_rank, local_size : int
        Of this process, in the job and on its node.
    by_mpi : bool
        Whether all processes should be one MPI world.
    job : str
        The variable that tells of a batch job; empty outside of one.
    """

    launcher: str = ""
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    by_mpi: bool = False
    job: str = ""

    @property
    def num_nodes(self) -> int:
        """As far as the launcher tells."""
        return -(-self.size // self.local_size)

    @property
    def is_login(self) -> bool:
        """Whether jobs are submitted from here and this is none: storage of the nodes is not to be seen then."""
        return not (self.launcher or self.job) and any(shutil.which(command) for command in SCHEDULERS)


def find_start(environ: Mapping[str, str]) -> Start:
    """Read the variables of the launcher."""
    launcher = find_launcher(environ)
    told = ranks(environ, launcher)
    rank, size, local_rank, local_size = (
        int(told[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    )
    by_mpi = mpi_launcher(environ, size) is not None
    job = next((name for name in JOB_VARIABLES if name in environ), "")
    return Start(launcher.name if launcher else "", rank, size, local_rank, local_size, by_mpi, job)


def judge_start(start: Start, environ: Mapping[str, str], needs_mpi: bool) -> list[Finding]:
    """Findings ``launcher`` and ``pmi``.

    Parameters
    ----------
    start : Start
        Of this process.
    environ : mapping
        Its environment.
    needs_mpi : bool
        Whether ranks are to take turns by MPI, if there are several.
    """
    if not start.launcher:
        return [_alone(start)]
    found = [
        Finding(
            check="launcher",
            verdict="ok",
            seen=f"{start.launcher} started {start.size} ranks, {start.local_size} on this node",
        )
    ]
    if start.launcher == "srun":
        found.append(_pmi(start, environ, needs_mpi))
    return found


def _alone(start: Start) -> Finding:
    if start.job:
        seen = f"a batch job ({start.job} is set), but not one of its tasks: only this host is looked at"
        advice = "start it as the training is started, such as with 'srun mlpo doctor': all nodes are looked at then"
    else:
        seen = f"no launcher: only this host is looked at{', a login node' if start.is_login else ''}"
        advice = "run it in a job too, such as with 'srun mlpo doctor'"
    return Finding(check="launcher", verdict="skipped", seen=seen, advice=advice)


def _pmi(start: Start, environ: Mapping[str, str], needs_mpi: bool) -> Finding:
    offered = [name for name in PMI_VARIABLES if name in environ]
    if offered:
        return Finding(check="pmi", verdict="ok", seen=f"srun offers it ({offered[0]})")
    return Finding(
        check="pmi",
        verdict="fail" if needs_mpi and start.size > 1 else "warn",
        seen="srun offers MPI no way to find the other ranks (--mpi=none, which may be the default of this site)",
        advice=SRUN_ADVICE,
    )
