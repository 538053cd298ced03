"""MPI: whether the library and the launcher belong together, and what threads may do."""

from __future__ import annotations

import socket

from pydantic import BaseModel

from mlpo_hpc.cluster.launch import address_for
from mlpo_hpc.cluster.node import import_mpi, machine_id, start_mpi
from mlpo_hpc.doctor.finding import Finding, split_advice
from mlpo_hpc.doctor.start import SRUN_ADVICE, Start
from mlpo_hpc.errors import ConfigError, MpiMismatch

LEVELS = ("MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED", "MPI_THREAD_SERIALIZED", "MPI_THREAD_MULTIPLE")
"""In the order of their numbers (MPI 4.1, 11.6)."""
MPIRUN_ADVICE = "start with the mpirun of the MPI library that mpi4py loads"


class MpiFacts(BaseModel):
    """What a child saw.

    Parameters
    ----------
    missing, mismatch : str
        Why there is no MPI, or why it is not the launcher's; empty if all is well.
    library : str
        Name and version.
    thread_level : str
        One of `LEVELS`; empty where MPI was not started.
    hosts : list of str
        By MPI rank.
    address, port : str, int
        Of the first rank, for the others.
    """

    missing: str = ""
    mismatch: str = ""
    library: str = ""
    thread_level: str = ""
    hosts: list[str] = []
    address: str = ""
    port: int = 0


def look(world_size: str, port: str) -> MpiFacts:
    """Collective over the MPI world. Start MPI as training does, in a process of its own.

    Parameters
    ----------
    world_size : str
        Ranks that the launcher started; ``0``: load the library, do not start it, which login nodes may forbid.
    port : str
        At which this rank hears the others, if it is the first one.
    """
    try:
        mpi = import_mpi()
    except (ImportError, RuntimeError) as error:
        return MpiFacts(missing=f"mpi4py or its MPI library is missing ({error})")
    library = " ".join(mpi.Get_library_version().split(",")[0].splitlines()[0].split())
    if int(world_size) == 0:
        return MpiFacts(library=library)
    try:
        world = start_mpi(int(world_size))
    except MpiMismatch as error:
        return MpiFacts(library=library, mismatch=str(error))
    hosts = world.allgather((socket.gethostname(), machine_id()))
    address, first_port = world.bcast((_address(hosts), int(port)))
    return MpiFacts(
        library=library,
        thread_level=LEVELS[mpi.Query_thread()],
        hosts=[host for host, _ in hosts],
        address=address,
        port=first_port,
    )


def _address(hosts: list[tuple[str, str]]) -> str:
    try:
        return address_for(hosts)
    except ConfigError:  # no such network interface: check `network` tells
        return socket.gethostname()


def judge(facts: MpiFacts | None, trouble: str, start: Start, needs_mpi: bool) -> list[Finding]:
    """Findings ``mpi`` and ``thread level``.

    Parameters
    ----------
    facts : MpiFacts or None
        What the child saw.
    trouble : str
        Why it saw nothing.
    start : Start
        Of this process.
    needs_mpi : bool
        Whether ranks are to take turns by MPI, if there are several.
    """
    matters = needs_mpi and start.size > 1
    if facts is None:
        seen = f"MPI_Init of a process that {start.launcher or 'no launcher'} started {trouble}"
        advice = "if no rank is missing ('nodes'), library and launcher do not belong together: "
        advice += SRUN_ADVICE if start.launcher == "srun" else MPIRUN_ADVICE
        return [Finding(check="mpi", verdict="fail" if matters else "warn", seen=seen, advice=advice)]
    if facts.missing:
        return [_missing(facts, start)]
    if facts.mismatch:
        seen, advice = split_advice(facts.mismatch)
        return [Finding(check="mpi", verdict="fail" if matters else "warn", seen=seen, advice=advice or MPIRUN_ADVICE)]
    if not facts.thread_level:
        why = f"{start.launcher} makes no MPI world" if start.launcher else "there is no launcher to start it with"
        return [Finding(check="mpi", verdict="skipped", seen=f"mpi4py loads {facts.library}; {why}")]
    seen = f"{facts.library}: one world of {len(facts.hosts)} ranks"
    return [Finding(check="mpi", verdict="ok", seen=seen), _threads(facts)]


def _missing(facts: MpiFacts, start: Start) -> Finding:
    advice = "load the site's MPI module and install the extra: pip install 'mlpo-hpc[mpi]'"
    if not start.by_mpi:
        return Finding(check="mpi", verdict="skipped", seen=facts.missing, advice=advice)
    # Under srun ranks can meet without it, under an mpirun they cannot.
    return Finding(
        check="mpi", verdict="warn" if start.launcher == "srun" else "fail", seen=facts.missing, advice=advice
    )


def _threads(facts: MpiFacts) -> Finding:
    if facts.thread_level == LEVELS[-1]:
        return Finding(check="thread level", verdict="ok", seen=facts.thread_level)
    return Finding(
        check="thread level",
        verdict="warn",
        seen=f"{facts.library} gives {facts.thread_level} only: I/O threads cannot use it",
        advice="load an MPI that gives MPI_THREAD_MULTIPLE, or go on with file locks and transport 'posix', "
        "which are taken by themselves",
    )
