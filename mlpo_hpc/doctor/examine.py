"""The whole examination: each rank looks, the first one hears all."""

from __future__ import annotations

import os
import socket
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ClusterShell.NodeSet import NodeSet
from pydantic import BaseModel, computed_field

from mlpo_hpc.cluster.launch import job_step
from mlpo_hpc.cluster.memory import available_bytes
from mlpo_hpc.cluster.network import INTERFACE, address_of, first_free_port
from mlpo_hpc.cluster.node import machine_id
from mlpo_hpc.doctor import gpu, hdf5, joint, memory, mpi, software
from mlpo_hpc.doctor.child import Child
from mlpo_hpc.doctor.finding import Finding, Merged, merge, split_advice
from mlpo_hpc.doctor.meeting import Answer, Greeting, find_point, reception, report
from mlpo_hpc.doctor.plan import read_plan
from mlpo_hpc.doctor.start import find_start, judge_start
from mlpo_hpc.doctor.storage import Room, TierFacts
from mlpo_hpc.errors import ConfigError, MlpoError
from mlpo_hpc.storage.folder import private_folder

Facts = TypeVar("Facts", bound=BaseModel)

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


@dataclass
class Seen:
    """What this rank saw by itself."""

    findings: list[Finding]
    rooms: dict[str, Room] = field(default_factory=dict)
    mpi: mpi.MpiFacts | None = None


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
        seen = self._look(port)
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

    def _look(self, port: int) -> Seen:
        """Start all that may hang at once, look at the rest meanwhile."""
        start, plan = self._start, self._plan
        first = start.local_rank == 0
        mpi_child = self._child("mpi", str(start.size), str(port)) if start.by_mpi else None
        if mpi_child is None and first:
            mpi_child = self._child("mpi", "0", "0")
        seen = self._look_at_node() if first else Seen([])
        if mpi_child is not None:
            answer, trouble = mpi_child.answer(self._deadline)
            seen.mpi = None if answer is None else mpi.MpiFacts.model_validate(answer)
            seen.findings += mpi.judge(seen.mpi, trouble, start, plan.needs_mpi)
        return seen

    def _look_at_node(self) -> Seen:
        """What is the same for all ranks of a node."""
        start, plan = self._start, self._plan
        num_nodes = str(self._wish.num_nodes or start.num_nodes)
        tiers = {tier.name: self._child("tier", tier.model_dump_json(), num_nodes) for tier in plan.tiers}
        places = self._child("places") if not plan.tiers and self._wish.config is None else None
        h5py_child = self._child("h5py")
        signs = gpu.signs_of_gpus(os.environ)
        gpu_child = self._child("gpu") if signs and os.environ.get("DS_ACCELERATOR") != "cpu" else None
        seen = Seen([*plan.findings, *software.judge_versions(), software.judge_locks(), *_network()])
        seen.findings += [memory.judge_memory(plan.config), memory.judge_memlock(), memory.judge_shm(start.local_size)]
        seen.findings.append(hdf5.judge(*_validated(h5py_child.answer(self._deadline), hdf5.Hdf5Facts)))
        if gpu_child is None:
            seen.findings.append(gpu.without_gpu(os.environ, start))
        else:
            facts, trouble = _validated(gpu_child.answer(self._deadline), gpu.GpuFacts)
            seen.findings.append(gpu.judge(facts, trouble, signs, os.environ, start))
        for name, child in [*tiers.items(), *([("", places)] if places else [])]:
            self._look_at_tier(name, child, seen)
        return seen

    def _look_at_tier(self, name: str, child: Child, seen: Seen) -> None:
        facts, trouble = _validated(child.answer(self._deadline), TierFacts)
        if facts is None:
            advice = "see whether its file system answers on that node (df, ls); if not, tell the support"
            finding = Finding(
                check="tier", verdict="fail", seen=f"its directory {trouble}", advice=advice, subject=name
            )
            facts = TierFacts(findings=[finding])
        seen.findings += [self._as_from_here(finding) for finding in facts.findings]
        if facts.room is not None:
            seen.rooms[name] = facts.room

    def _as_from_here(self, finding: Finding) -> Finding:
        """What a login node lacks the nodes may have."""
        tier = next((tier for tier in self._plan.tiers if tier.name == finding.subject), None)
        if finding.verdict != "fail" or tier is None or tier.kind == "shared" or not self._start.is_login:
            return finding
        advice = f"look in a job ('srun mlpo doctor'); if it is the same there: {finding.advice}"
        return finding.model_copy(update={"verdict": "skipped", "advice": advice})

    def _child(self, name: str, *arguments: str) -> Child:
        child = Child(name, *arguments)
        self._endings.callback(child.end)
        return child

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
        firsts = [ranks[0] for ranks in nodes.values()]
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


def _validated(answer: tuple[Any, str], model: type[Facts]) -> tuple[Facts | None, str]:
    told, trouble = answer
    return (None if told is None else model.model_validate(told)), trouble


def _network() -> list[Finding]:
    """Finding ``network``, where an interface was named."""
    if INTERFACE not in os.environ:
        return []
    name = os.environ[INTERFACE]
    try:
        return [Finding(check="network", verdict="ok", seen=f"{name} has the address {address_of(name)}")]
    except ConfigError as error:
        advice = f"correct {INTERFACE}: 'ip -br address' shows the interfaces of a node"
        return [Finding(check="network", verdict="fail", seen=split_advice(str(error))[0], advice=advice)]


def _hosts(seen: Seen) -> list[str]:
    """Of all ranks as MPI tells, else each node once as Slurm tells, else none."""
    if seen.mpi is not None and seen.mpi.hosts:
        return seen.mpi.hosts
    return list(NodeSet(os.environ.get("SLURM_STEP_NODELIST", "")))
