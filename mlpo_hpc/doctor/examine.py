"""The whole examination: each rank looks, the first one hears all."""

from __future__ import annotations

import os
import socket
import time
from contextlib import ExitStack
from dataclasses import dataclass

from ClusterShell.NodeSet import NodeSet
from pydantic import BaseModel, computed_field

from mlpo_hpc.cluster.launch import job_step
from mlpo_hpc.cluster.memory import available_bytes
from mlpo_hpc.cluster.network import first_free_port
from mlpo_hpc.cluster.node import machine_id
from mlpo_hpc.doctor import joint, memory, software
from mlpo_hpc.doctor.finding import Merged, merge
from mlpo_hpc.doctor.meeting import Answer, Greeting, find_point, reception, report
from mlpo_hpc.doctor.own import Looks, Seen
from mlpo_hpc.doctor.plan import read_plan
from mlpo_hpc.doctor.start import find_start, judge_start
from mlpo_hpc.errors import MlpoError
from mlpo_hpc.storage.folder import private_folder

GRACE_S = 5.0
"""For what comes after the looks: ranks that began later, the way to the first rank."""


@dataclass(frozen=True)
class Wish:
    """What is asked for.

    Parameters
    ----------
    config : str, optional
        Path of a DeepSpeed configuration.
    parameters : float, optional
        Of the model.
    num_nodes : int, optional
        That will train it; None: those that there are.
    limit_s : float
        Longest wait for a look, and then for another node.
    """

    config: str | None = None
    parameters: float | None = None
    num_nodes: int | None = None
    limit_s: float = 30.0


class Report(BaseModel):
    """What was found on all nodes, worst first."""

    hosts: list[str]
    num_ranks: int
    findings: list[Merged]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def fit(self) -> bool:
        """Whether nothing will fail."""
        return not any(finding.verdict == "fail" for finding in self.findings)


class Examination:
    """Of all nodes that the launcher gave.

    Parameters
    ----------
    wish : Wish
        The same on all ranks.
    endings : ExitStack
        To be closed when the report is out: the end of one rank's process may end the job.
    """

    def __init__(self, wish: Wish, endings: ExitStack) -> None:
        self._wish = wish
        self._endings = endings
        self._deadline = time.monotonic() + wish.limit_s
        self._start = find_start(os.environ)
        self._plan = read_plan(wish.config)

    def run(self) -> Report | None:
        """Collective over the launcher's ranks. The report on the first one, None on the others.

        Raises
        ------
        MlpoError
            On a rank that cannot tell the first one what it saw.
        """
        start, point, job = self._start, find_point(self._start, os.environ), job_step(os.environ)
        port = point[1] if point else first_free_port()
        num_nodes = self._wish.num_nodes or start.num_nodes
        seen = Looks(start, self._plan, num_nodes, self._deadline, self._endings).look(port)
        if point is None and seen.mpi is not None and seen.mpi.address:
            point, job = (seen.mpi.address, seen.mpi.port), f"{seen.mpi.address}:{seen.mpi.port}"
        if start.rank == 0:
            return self._merge(seen, *self._hear(seen, job, port if point else None))
        if point is not None:
            report(point, job, lambda greeting: self._answer(seen, greeting), self._deadline + GRACE_S)
        elif seen.mpi is None or not seen.mpi.mismatch:  # which the first rank sees too
            reason = "; ".join(finding.seen for finding in seen.findings if finding.check == "mpi")
            raise MlpoError(
                f"the first rank was not told what rank {start.rank} on {socket.gethostname()} saw: {reason}"
            )
        return None

    def _answer(self, seen: Seen, greeting: Greeting) -> Answer:
        first = self._start.local_rank == 0
        marks = {name: path for name, path in greeting.marks.items() if name in seen.rooms}
        threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
        return Answer(
            job=greeting.job,
            rank=self._start.rank,
            local_size=self._start.local_size,
            host=socket.gethostname(),
            machine=machine_id(),
            cores=sorted(os.sched_getaffinity(0)),
            threads=int(threads) if threads.isdigit() else None,
            findings=seen.findings,
            rooms=seen.rooms,
            budget_bytes=memory.host_budget_bytes(self._plan.config, available_bytes()) if first else 0,
            versions=software.describe_versions() if first else "",
            marks={name: os.path.isdir(os.path.join(seen.rooms[name].path, mark)) for name, mark in marks.items()},
        )

    def _hear(self, seen: Seen, job: str, port: int | None) -> tuple[list[Answer], tuple[str, str]]:
        """All answers that came, this rank's first; why others did not, and what to do."""
        start, mine = self._start, self._answer(seen, Greeting(job=job))
        if start.size == 1:
            return [mine], ("", "")
        if port is None:
            reason = f"not heard, for under {start.launcher} MPI alone tells where to meet, and it does not work"
            return [mine], (reason, "put MPI right first (finding 'mpi'): then the other ranks are heard too")
        marks = self._mark(seen) if start.num_nodes > 1 else {}
        try:
            server = self._endings.enter_context(reception(port, Greeting(job=job, marks=marks)))
        except OSError as error:
            reason = f"not heard, for port {port} cannot be used ({error.strerror})"
            return [mine], (
                reason,
                "see which process of that host has the port (ss -tlnp), or run it in another job step",
            )
        answers = server.collect(start.size - 1, self._deadline + GRACE_S)
        reason = f"no answer within {self._wish.limit_s + GRACE_S:.0f} s"
        advice = "run 'srun -w NODE -n1 mlpo doctor' there, and see whether the node is up and its file systems answer"
        return [mine, *answers], (reason, advice)

    def _mark(self, seen: Seen) -> dict[str, str]:
        """Name of a folder of ours in each tier's directory, for the other nodes to look for."""
        folders = {name: self._endings.enter_context(private_folder(room.path)) for name, room in seen.rooms.items()}
        return {name: os.path.basename(folder) for name, folder in folders.items()}

    def _merge(self, seen: Seen, answers: list[Answer], silence: tuple[str, str]) -> Report:
        start, plan, nodes = self._start, self._plan, joint.by_node(answers)
        firsts = [answer for answer in answers if answer.versions]
        num_nodes = self._wish.num_nodes or max(len(nodes), start.num_nodes)
        found = [("", finding) for finding in judge_start(start, os.environ, plan.needs_mpi)]
        found += [(answer.host, finding) for answer in answers for finding in answer.findings]
        found += joint.judge_nodes(answers, start, _hosts(seen), silence)
        found += [(ranks[0].host, joint.judge_cores(ranks, start)) for ranks in nodes.values()]
        found += joint.judge_versions(firsts)
        found += joint.judge_sharing(firsts, plan.tiers)
        found += joint.judge_devices_of(firsts)
        if self._wish.parameters is not None:
            state_bytes = int(plan.item_bytes * self._wish.parameters)
            found += joint.judge_rooms(list(nodes.values()), plan, state_bytes, num_nodes, start.size)
        hosts = sorted({answer.host for answer in answers})
        return Report(hosts=hosts, num_ranks=len(answers), findings=merge(found))


def _hosts(seen: Seen) -> list[str]:
    """Of all ranks as MPI tells, else each node once as Slurm tells, else none."""
    if seen.mpi is not None and seen.mpi.hosts:
        return seen.mpi.hosts
    return list(NodeSet(os.environ.get("SLURM_STEP_NODELIST", "")))
